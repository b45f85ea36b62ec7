"""Profiles and reports for tests, with every kind of entry in them."""

from __future__ import annotations

from switchgear.fingerprints.assemble import assemble
from switchgear.fingerprints.measurement import (
    CPU,
    NPU_UTILISATION,
    OPENCL_BANDWIDTH,
    TESTS,
    VULKAN_MATMUL,
    Failure,
    Report,
    Subject,
    Value,
)
from switchgear.fingerprints.profile import SCHEMA_VERSION, Key, Profile
from switchgear.fingerprints.zones_model import TripPoint, Zone

GPU_UUID = "8680a656000000000002000000000000"
VULKAN_GPU = Subject(
    api="vulkan",
    name="Mali-G610",
    vendor_id=0x13B5,
    driver_name="panvk",
    driver_version="25.0.7",
    driver_info="Mesa 25.0.7",
    device_uuid=GPU_UUID,
    device_type="integrated",
    library="/usr/lib/libvulkan_panfrost.so",
)
OPENCL_GPU = Subject(
    api="opencl",
    name="Mali-G610 r0p0",
    vendor_id=0x13B5,
    driver_version="3.0",
    device_uuid=GPU_UUID.upper(),
    device_type="gpu",
    platform="rusticl",
)
LAVAPIPE = Subject(
    api="vulkan",
    name="llvmpipe (LLVM 19)",
    index=1,
    driver_name="llvmpipe",
    device_type="cpu",
)
NO_IMPORT = Failure(
    "host_pointer_import_us", "vulkan", -7, "VK_ERROR_EXTENSION_NOT_PRESENT", "not offered"
)
NO_NPU = Failure(NPU_UTILISATION, "switchgear", 400, "NoBackend", "no delegate is configured")
CPU_SUBJECT = Subject(api="cpu", name="Cortex-A76", device_type="cpu")

ZONES = (
    Zone(
        "bigcore0-thermal",
        "bigcore0-thermal",
        "cpu",
        trips=(TripPoint("passive", 85000, 85000),),
    ),
    Zone("gpu-thermal", "gpu-thermal", "gpu", trips=(TripPoint("passive", 75000, 75000),)),
    Zone("center-thermal", "center-thermal", "other", chip_wide=True),
)


def key(**inputs: str) -> Key:
    """A key whose parts all hold the same inputs."""
    part = {"soc": "rockchip,rk3588", "kernel": "6.12.1", **inputs}
    return Key(
        schema_version=SCHEMA_VERSION,
        soc="rockchip,rk3588",
        soc_source="device tree",
        kernel="6.12.1",
        engines={"ai-edge-litert": "2.3.0"},
        parts={test: dict(part) for test in TESTS},
    )


def reports(scale: float = 1.0) -> list[Report]:
    """One run: a GPU through two APIs, software Vulkan beside it, no NPU."""
    return [
        Report(
            CPU,
            CPU_SUBJECT,
            (
                Value("float_1_thread_ms", 40.0 * scale, 0.2, 20, "ms", "clock"),
                Value("memory_copy_mb_s", 9000.0 / scale, 50.0, 5, "MB/s", "memcpy of 64 MiB"),
            ),
            duration_s=2.0,
        ),
        Report(
            OPENCL_BANDWIDTH,
            OPENCL_GPU,
            (Value("write_mb_s", 6000.0 / scale, 40.0, 5, "MB/s", "1 GiB, blocking"),),
            notes=("512 MiB instead of 1 GiB: memory",),
        ),
        Report(
            VULKAN_MATMUL,
            VULKAN_GPU,
            (
                Value("matmul_ms", 12.0 * scale, 0.1, 10, "ms", "timestamps"),
                Failure(
                    "host_pointer_import_us", "vulkan", -7, "VK_ERROR_EXTENSION_NOT_PRESENT", ""
                ),
            ),
        ),
        Report(
            VULKAN_MATMUL,
            LAVAPIPE,
            (Value("matmul_ms", 250.0 * scale, 30.0, 10, "ms", "timestamps", noisy=True),),
        ),
        Report(
            NPU_UTILISATION,
            None,
            (
                Failure(
                    NPU_UTILISATION, "switchgear", 400, "NoBackend", "no delegate is configured"
                ),
            ),
        ),
    ]


def profile(scale: float = 1.0, measured_at: int = 1_760_000_000) -> Profile:
    return assemble(
        reports(scale),
        key=key(),
        measured_at=measured_at,
        zones=ZONES,
        excluded_zones=("soc",),
    )
