"""Physical parts matched across APIs, their thermal domains and thresholds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from profile_helpers import CPU_SUBJECT, LAVAPIPE, OPENCL_GPU, VULKAN_GPU, ZONES
from sysfs_tree import build_device, device_files

from switchgear.daemon.thermal.zones import find_sensors
from switchgear.fingerprints.devices import device_of, match_devices
from switchgear.fingerprints.measurement import Subject
from switchgear.fingerprints.profile import Device
from switchgear.fingerprints.zones_model import TripPoint, Zone

POCL = Subject(api="opencl", name="pthread-haswell", device_type="cpu", platform="PoCL")
CARD = Subject(
    api="vulkan",
    name="AMD Radeon RX 7900 (RADV)",
    vendor_id=0x1002,
    device_uuid="00000000030000000000000000000000",
    pci_address="0000:03:00.0",
    device_type="discrete",
)


def by_id(devices: tuple[Device, ...]) -> dict[str, list[str]]:
    return {device.device_id: [api.name for api in device.apis] for device in devices}


def test_a_gpu_seen_twice_is_one_device_and_software_is_the_cpu() -> None:
    devices = match_devices([CPU_SUBJECT, VULKAN_GPU, LAVAPIPE, POCL, OPENCL_GPU])
    assert by_id(devices) == {
        "cpu": ["Cortex-A76", "llvmpipe (LLVM 19)", "pthread-haswell"],
        "gpu-8680a656": ["Mali-G610", "Mali-G610 r0p0"],
    }
    assert [device.kind for device in devices] == ["cpu", "gpu"]
    assert devices[1].matched_by == "device UUID"
    assert device_of(LAVAPIPE, devices) == "cpu"
    assert device_of(OPENCL_GPU, devices) == "gpu-8680a656"
    assert device_of(None, devices) is None


def test_by_pci_address() -> None:
    opencl = Subject(
        api="opencl", name="gfx1100", pci_address="0000:03:00.0", device_type="gpu"
    )
    other = replace(opencl, pci_address="0000:0b:00.0")
    devices = match_devices([CARD, other, opencl])
    assert by_id(devices) == {
        "cpu": [],
        "gpu-0000:0b:00.0": ["gfx1100"],
        "gpu-0000:03:00.0": [CARD.name, "gfx1100"],
    }


def test_two_cards_that_tell_one_uuid_stay_two() -> None:
    twin = replace(CARD, pci_address="0000:0b:00.0")
    assert len(match_devices([CARD, twin])) == 3


@pytest.mark.parametrize("uuid", ["", "0" * 32, "f" * 32])
def test_a_placeholder_is_no_identity(uuid: str) -> None:
    one = Subject(
        api="vulkan", name="A", vendor_id=1, device_uuid=uuid, device_type="integrated"
    )
    other = Subject(api="opencl", name="B", vendor_id=2, device_uuid=uuid, device_type="gpu")
    assert len(match_devices([one, other])) == 3


def test_a_third_subject_joins_two_groups() -> None:
    pci_only = Subject(api="opencl", name="a", pci_address=CARD.pci_address, device_type="gpu")
    uuid_only = Subject(api="opencl", name="b", device_uuid=CARD.device_uuid, device_type="gpu")
    (_, gpu) = match_devices([pci_only, uuid_only, CARD])
    assert len(gpu.apis) == 3


def test_the_only_gpu_of_each_api_is_one_gpu() -> None:
    vulkan = Subject(
        api="vulkan", name="Adreno 750", vendor_id=0x5143, device_type="integrated"
    )
    opencl = Subject(api="opencl", name="QUALCOMM Adreno", vendor_id=0x5143, device_type="gpu")
    (_, gpu) = match_devices([vulkan, LAVAPIPE, opencl])
    assert gpu.apis == (vulkan, opencl)
    assert "only pairing" in gpu.matched_by


@pytest.mark.parametrize(("kind", "parts"), [("integrated", 2), ("discrete", 3)])
def test_two_uuids_of_two_drivers(kind: str, parts: int) -> None:
    """On a chip they are one GPU behind two makers' drivers; they do tell cards apart."""
    vulkan = Subject("vulkan", "panvk", vendor_id=5, device_uuid="ab" * 16, device_type=kind)
    opencl = Subject("opencl", "Mali", vendor_id=5, device_uuid="cd" * 16, device_type="gpu")
    assert len(match_devices([vulkan, opencl])) == parts


def test_the_vendor_decides_between_several() -> None:
    intel = Subject(api="vulkan", name="Iris", vendor_id=0x8086, device_type="integrated")
    nvidia = Subject(api="vulkan", name="RTX", vendor_id=0x10DE, device_type="discrete")
    opencl = Subject(api="opencl", name="NVIDIA", vendor_id=0x10DE, device_type="gpu")
    devices = match_devices([intel, nvidia, opencl])
    assert by_id(devices) == {"cpu": [], "gpu-iris": ["Iris"], "gpu-rtx": ["RTX", "NVIDIA"]}


def test_what_may_be_either_stays_apart() -> None:
    first = Subject(api="vulkan", name="One", device_type="discrete")
    second = Subject(api="vulkan", name="Two", device_type="discrete")
    unnamed = Subject(api="opencl", name="Some", device_type="gpu")
    assert len(match_devices([first, second, unnamed])) == 4


def test_equal_cards_get_ids_of_their_own() -> None:
    one = Subject(api="vulkan", name="Twin", index=0, device_type="discrete")
    other = Subject(api="vulkan", name="Twin", index=1, device_type="discrete")
    assert list(by_id(match_devices([one, other]))) == ["cpu", "gpu-twin", "gpu-twin-2"]


def test_ids_do_not_depend_on_the_order_of_the_apis() -> None:
    one = match_devices([VULKAN_GPU, OPENCL_GPU, LAVAPIPE])
    other = match_devices([LAVAPIPE, OPENCL_GPU, VULKAN_GPU])
    assert {device.device_id for device in one} == {device.device_id for device in other}


def test_npu_by_api_and_by_type() -> None:
    delegate = Subject(api="npu", name="libteflon.so", device_type="npu")
    accelerator = Subject(api="opencl", name="FPGA", device_type="accelerator")
    kinds = [device.kind for device in match_devices([delegate, accelerator])]
    assert kinds == ["cpu", "npu", "npu"]


def domain_and_threshold(name: str, subject: Subject, root: Path) -> Device:
    build_device(next(file for file in device_files() if file.stem == name), root)
    devices = match_devices([subject], find_sensors(root).zones)
    return devices[-1]


GPU = Subject(api="vulkan", name="gpu", device_type="integrated")
NPU = Subject(api="npu", name="npu", device_type="npu")


@pytest.mark.parametrize(
    ("name", "subject", "zones", "shared", "throttle_c", "source"),
    [
        ("rk3568_rock3a_mainline", GPU, ("gpu-thermal",), False, 70, "kernel_passive_trip"),
        ("rk3568_rock3a_mainline", NPU, ("cpu-thermal",), True, 70, "kernel_passive_trip"),
        ("rk3588_rock5b_mainline", NPU, ("npu-thermal",), False, 65, "default"),
        ("rpi5_bcm2712", GPU, ("cpu-thermal",), True, 65, "default"),
        ("pixel8pro_tensor_g3", NPU, ("TPU", "AUR"), False, 80, "kernel_passive_trip"),
        ("dimensity_mtk_partial", GPU, ("gpu",), False, 65, "default"),
        (
            "intel_laptop_t14s",
            GPU,
            ("TCPU", "x86_pkg_temp"),
            True,
            90,
            "kernel_passive_trip",
        ),
    ],
)
def test_the_domain_of_a_part_on_real_devices(
    tmp_path: Path,
    name: str,
    subject: Subject,
    zones: tuple[str, ...],
    shared: bool,
    throttle_c: float,
    source: str,
) -> None:
    device = domain_and_threshold(name, subject, tmp_path)
    assert (device.domain.zones, device.domain.shared) == (zones, shared)
    assert (device.threshold.throttle_c, device.threshold.source) == (throttle_c, source)
    assert device.threshold.recover_c == throttle_c - 7


def test_a_card_has_its_own_sensors_or_none() -> None:
    on_card = Zone("amdgpu/edge", "amdgpu", "gpu", source="hwmon", pci_address="0000:03:00.0")
    cpu = Zone("k10temp/Tctl", "k10temp", "cpu", source="hwmon")
    (_, card) = match_devices([CARD], [on_card, cpu])
    assert (card.domain.zones, card.domain.shared) == (("amdgpu/edge",), False)
    (_, card) = match_devices([CARD], [cpu])
    assert card.domain.zones == ()
    assert card.domain.note
    (only_cpu,) = match_devices([], [on_card, cpu])
    assert only_cpu.domain.zones == ("k10temp/Tctl",)


def test_no_sensor_at_all() -> None:
    (cpu,) = match_devices([CPU_SUBJECT])
    assert cpu.domain.zones == ()
    assert (cpu.threshold.throttle_c, cpu.threshold.source) == (65.0, "default")


def test_who_decides_the_threshold() -> None:
    gpu_id = "gpu-8680a656"

    def gpu(
        operator_c: dict[str, float] | None = None, measured_c: dict[str, float] | None = None
    ) -> tuple[float, str]:
        _, device = match_devices(
            [VULKAN_GPU], ZONES, operator_c=operator_c, measured_c=measured_c
        )
        threshold = device.threshold
        return threshold.throttle_c, threshold.source

    assert gpu() == (75.0, "kernel_passive_trip")
    assert gpu(measured_c={gpu_id: 71.0}) == (71.0, "measured")
    assert gpu(measured_c={gpu_id: 71.0}, operator_c={"gpu": 62.5}) == (62.5, "operator")
    assert gpu(operator_c={"gpu": 62.5, gpu_id: 60.0}) == (60.0, "operator")
    assert gpu(operator_c={"npu": 50.0}) == (75.0, "kernel_passive_trip")


def test_an_unset_trip_is_no_threshold() -> None:
    zone = Zone("gpu", "gpu", "gpu", trips=(TripPoint("passive", -274000, None),))
    assert match_devices([GPU], [zone])[1].threshold.source == "default"
