"""The key: read without a driver, and what each change makes stale."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from profile_helpers import key, reports

from switchgear.fingerprints import soc as soc_module
from switchgear.fingerprints.driver_files import file_identity, find_library
from switchgear.fingerprints.key import (
    UNKNOWN,
    current_key,
    merge_parts,
    stale_parts,
    with_drivers,
)
from switchgear.fingerprints.measurement import (
    CPU,
    NPU_UTILISATION,
    OPENCL_BANDWIDTH,
    TESTS,
    VULKAN_MATMUL,
)
from switchgear.fingerprints.profile import Key
from switchgear.fingerprints.soc import read_soc, system_image


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A root with a Vulkan driver, an OpenCL driver and an Arm chip."""
    write(tmp_path / "proc/device-tree/compatible", "radxa,rock5b\0rockchip,rk3588\0")
    write(tmp_path / "usr/lib/libmali.so.1", "mali, first build")
    write(tmp_path / "usr/lib/libvulkan_one.so", "one, first build")
    write(tmp_path / "usr/lib/libvulkan.so.1", "loader")
    write(tmp_path / "icd.d/one.json", '{"ICD": {"library_path": "libvulkan_one.so"}}')
    write(tmp_path / "vendors/mali.icd", "libmali.so.1\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def read(root: Path, *delegates: str) -> Key:
    environment = {
        "VK_DRIVER_FILES": str(root / "icd.d"),
        "OCL_ICD_VENDORS": str(root / "vendors"),
    }
    return current_key(npu_libraries=delegates, environment=environment, root=root)


def test_nothing_changed_is_nothing_stale(machine: Path) -> None:
    assert stale_parts(read(machine), read(machine)) == {}


def test_without_a_profile_all_is_stale(machine: Path) -> None:
    assert list(stale_parts(None, read(machine))) == list(TESTS)
    assert list(stale_parts(read(machine), read(machine), force=True)) == list(TESTS)


@pytest.mark.parametrize(
    ("file", "text", "stale"),
    [
        ("usr/lib/libmali.so.1", "mali, second one", {OPENCL_BANDWIDTH}),
        ("usr/lib/libvulkan_one.so", "one, second one", {VULKAN_MATMUL}),
        ("usr/lib/libvulkan.so.1", "a newer loader", {VULKAN_MATMUL}),
        ("icd.d/two.json", '{"ICD": {"library_path": "./two.so"}}', {VULKAN_MATMUL}),
        ("vendors/pocl.icd", "libpocl.so.2", {OPENCL_BANDWIDTH}),
        ("vendor/lib64/libOpenCL.so", "an Android driver", {OPENCL_BANDWIDTH}),
        ("vendor/lib64/hw/vulkan.mali.so", "an Android driver", {VULKAN_MATMUL}),
        ("npu.so", "another delegate", {NPU_UTILISATION}),
        ("proc/device-tree/compatible", "x\0rockchip,rk3576\0", set(TESTS)),
        ("system/build.prop", "ro.build.fingerprint=oem/dev:15/1:user\n", set(TESTS)),
        ("sys/devices/system/cpu/possible", "0-7\n", set(TESTS)),
    ],
)
def test_an_update_makes_its_own_part_stale(
    machine: Path, file: str, text: str, stale: set[str]
) -> None:
    delegate = machine / "npu.so"
    write(delegate, "a delegate")
    before = read(machine, str(delegate))
    write(machine / file, text)
    assert set(stale_parts(before, read(machine, str(delegate)))) == stale


def test_a_removed_driver_makes_its_part_stale(machine: Path) -> None:
    before = read(machine)
    (machine / "icd.d/one.json").unlink()
    (reasons,) = stale_parts(before, read(machine)).values()
    assert any("one.json" in reason and reason.endswith("absent") for reason in reasons)


def test_a_files_time_is_not_looked_at(machine: Path) -> None:
    before = read(machine)
    os.utime(machine / "usr/lib/libmali.so.1", (1, 1))
    assert stale_parts(before, read(machine)) == {}


def test_a_new_card_makes_its_apis_stale(machine: Path) -> None:
    before = read(machine)
    card = machine / "sys/devices/pci0000:00/0000:03:00.0"
    write(card / "vendor", "0x1002\n")
    write(card / "device", "0x744c\n")
    node = machine / "sys/class/drm/renderD128"
    node.mkdir(parents=True)
    (node / "device").symlink_to(card)
    assert set(stale_parts(before, read(machine))) == {OPENCL_BANDWIDTH, VULKAN_MATMUL}


def test_what_a_driver_says_is_compared_only_where_it_was_asked() -> None:
    subjects = [report.subject for report in reports() if report.subject]
    old = with_drivers(key(), subjects)
    assert {driver.api for driver in old.drivers} == {"vulkan", "opencl"}
    assert stale_parts(old, key()) == {}
    updated = with_drivers(key(), subjects)
    part = dict(updated.parts[VULKAN_MATMUL])
    name = next(name for name in part if name.startswith("driver:Mali"))
    part[name] = "panvk 25.1.0 Mesa 25.1.0"
    new = updated.model_copy(update={"parts": {**updated.parts, VULKAN_MATMUL: part}})
    assert list(stale_parts(old, new)) == [VULKAN_MATMUL]


def test_what_an_older_profile_did_not_record_counts_as_unchanged() -> None:
    assert stale_parts(key(cpus=UNKNOWN), key(cpus="0-7")) == {}


def test_a_stale_part_that_was_not_measured_stays_stale() -> None:
    old, new = key(), key(kernel="6.13")
    merged = merge_parts(old, new, [CPU])
    assert set(stale_parts(merged, new)) == set(TESTS) - {CPU}


def test_the_build_id_of_a_real_library_is_read() -> None:
    library = Path(os.path.realpath("/proc/self/exe"))
    system = find_library("libc.so.6", os.environ)
    assert system is not None
    assert "build id " in file_identity(system)
    assert file_identity(library) == file_identity(library)


def test_files_that_are_no_libraries(tmp_path: Path) -> None:
    assert file_identity(tmp_path / "missing").startswith("unreadable: No such file")
    assert file_identity(tmp_path).startswith("unreadable: ")
    large = tmp_path / "large"
    large.write_bytes(bytes(100_000) + b"1")
    before = file_identity(large)
    large.write_bytes(bytes(100_000) + b"2")
    assert file_identity(large) != before


@pytest.mark.parametrize("length", range(0, 200, 7))
def test_a_damaged_elf_file_is_a_file_all_the_same(tmp_path: Path, length: int) -> None:
    real = Path(os.path.realpath("/proc/self/exe")).read_bytes()[:length]
    path = tmp_path / "cut.so"
    path.write_bytes(real + b"\xff" * (200 - length))
    assert file_identity(path).startswith("200 bytes, sha256")


SOCS = [
    ({"proc/device-tree/compatible": "radxa,rock3a\0rockchip,rk3568\0"}, "rockchip,rk3568"),
    (
        {
            "vendor/build.prop": "ro.soc.manufacturer=QTI\nro.soc.model=SM8650\n",
            "proc/device-tree/compatible": "qcom,pineapple-mtp\0",
        },
        "QTI SM8650",
    ),
    ({"system/build.prop": "ro.board.platform=mt6989\n"}, "mt6989"),
    ({"sys/devices/soc0/family": "Snapdragon\n", "sys/devices/soc0/soc_id": "557\n"}, "557"),
    (
        {
            "proc/cpuinfo": "processor: 0\nmodel name\t: AMD Ryzen 9 7950X\n",
            "sys/class/dmi/id/product_name": "B650\n",
        },
        "AMD Ryzen 9 7950X in B650",
    ),
    ({"proc/cpuinfo": "CPU part\t: 0xd0b\nCPU part\t: 0xd05\n"}, "arm parts 0xd05 0xd0b"),
    ({"proc/cpuinfo": "Hardware\t: BCM2835\n"}, "BCM2835"),
    ({}, "unknown"),
]


@pytest.mark.parametrize(("files", "soc"), SOCS, ids=[soc for _, soc in SOCS])
def test_the_chips_name(tmp_path: Path, files: dict[str, str], soc: str) -> None:
    for name, text in files.items():
        write(tmp_path / name, text)

    assert soc in read_soc(tmp_path)[0]


def test_android_is_asked_where_its_files_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A shell that starts late is no property that is missing.
    monkeypatch.setattr(soc_module, "_GETPROP_LIMIT_S", 15.0)
    command = tmp_path / "system/bin/getprop"
    write(
        command,
        "#!/bin/sh\necho '[ro.soc.model]: [Tensor G3]'\n"
        "echo '[ro.build.fingerprint]: [google/husky:15]'\n",
    )
    command.chmod(0o755)
    assert read_soc(tmp_path) == ("Tensor G3", "ro.soc.model")
    assert system_image(tmp_path) == "google/husky:15"


def test_no_driver_and_no_numpy_is_loaded() -> None:
    """Reading the key, storing and dumping are the daemon's, which loads neither."""
    code = (
        "import sys\n"
        "from switchgear.fingerprints import key, store, dump, diff, refresh\n"
        "key.current_key()\n"
        "bad = {'numpy', 'vulkan', 'pyopencl', 'ai_edge_litert', 'tflite_runtime'}\n"
        "print(sorted(bad & {name.split('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
