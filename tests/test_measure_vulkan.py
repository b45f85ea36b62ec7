"""The Vulkan test on a real driver, and the arithmetic around it."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from measure_helpers import lavapipe, measure, number, plan, vulkan_drivers

from switchgear.backends.vulkan_compute.api import driver_version
from switchgear.fingerprints.measure.vulkan_matmul import (
    SIZE,
    TOLERANCE,
    kernel_for,
    operands,
    relative_error,
)
from switchgear.fingerprints.measurement import VULKAN_MATMUL

SHADERS = Path(__file__).parent.parent / "fingerprints" / "shaders"


# What it waits for a CPU does not count to its own limit of 15 s.
@pytest.mark.timeout(60)
def test_values_of_a_software_device() -> None:
    (report,) = measure(plan(VULKAN_MATMUL, vulkan_drivers(lavapipe())))
    assert report.subject is not None
    assert report.subject.api == "vulkan"
    assert report.subject.device_type == "cpu"
    assert report.subject.driver_name == "llvmpipe"
    assert "Mesa" in report.subject.driver_info
    assert len(report.subject.device_uuid) == len(report.subject.driver_uuid) == 32
    assert Path(report.subject.library).name == "libvulkan_lvp.so"

    matmul = number(report, "matmul_ms")
    clock = number(report, "matmul_clock_ms")
    assert matmul.samples >= 5
    # No processor does 2.1 G operations in a millisecond, and none here needs a minute.
    assert 1 < matmul.median < 60_000
    # The clock sees the submit as well.
    assert clock.median >= matmul.median * 0.99
    assert 0 < number(report, "submit_overhead_us").median < matmul.median * 1000
    assert number(report, "host_pointer_import_us").median > 0
    assert any(note.startswith("kernel matmul_blocks") for note in report.notes)
    assert any("checked against the reference" in note for note in report.notes)
    # Half of the samples took as long as the median, or longer.
    assert report.duration_s > matmul.median * matmul.samples / 2 / 1000


def test_kernel_by_device_type() -> None:
    assert kernel_for("discrete", 1024) == ("matmul_tiles", (64, 64, 1))
    assert kernel_for("integrated", 256)[0] == "matmul_tiles"
    assert kernel_for("cpu", 1024) == ("matmul_blocks", (16, 16, 1))
    assert kernel_for("integrated", 128)[0] == "matmul_blocks"


def test_relative_error_finds_each_kind_of_wrong_product() -> None:
    left, right = operands()
    assert left.shape == right.shape == (SIZE, SIZE)
    reference = left @ right
    exact = (left.astype(np.float64) @ right).astype(np.float32)
    assert 0 < relative_error(exact, reference) <= TOLERANCE / 10
    assert relative_error(np.zeros_like(reference), reference) > TOLERANCE
    assert relative_error(reference.T, reference) > TOLERANCE
    one_product_missing = reference.copy()
    one_product_missing[3, 5] -= left[3, 7] * right[7, 5]
    assert relative_error(one_product_missing, reference) > TOLERANCE
    not_finite = reference.copy()
    not_finite[0, 0] = np.nan
    assert math.isinf(relative_error(not_finite, reference))


def test_operands_are_the_same_at_every_run() -> None:
    for first, second in zip(operands(), operands(), strict=True):
        assert np.array_equal(first, second)


@pytest.mark.parametrize("kernel", ["matmul_tiles", "matmul_blocks"])
def test_both_kernels_are_right(kernel: str) -> None:
    """Whatever this machine's device type: the other kernel is for other machines."""
    script = Path(__file__).parent / "matmul_kernel.py"
    environment = vulkan_drivers(lavapipe())
    done = subprocess.run(
        [sys.executable, str(script), kernel, "128"],
        capture_output=True,
        text=True,
        env={**environment, "HOME": "/nonexistent", "MESA_SHADER_CACHE_DISABLE": "true"},
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5


@pytest.mark.parametrize(
    ("vendor_id", "packed", "text"),
    [
        (0x10005, (25 << 22) | (0 << 12) | 7, "25.0.7"),
        (0x10DE, (535 << 22) | (161 << 14) | (8 << 6), "535.161.8.0"),
    ],
)
def test_driver_version(vendor_id: int, packed: int, text: str) -> None:
    assert driver_version(vendor_id, packed) == text


def test_spirv_is_built_from_the_source_beside_it(tmp_path: Path) -> None:
    if shutil.which("glslangValidator") is None:
        pytest.skip("glslangValidator (glslang-tools) is not installed")

    subprocess.run([str(SHADERS / "build.sh"), str(tmp_path)], check=True)
    built = {path.name: path.read_bytes() for path in tmp_path.glob("*.spv")}
    kept = {path.name: path.read_bytes() for path in SHADERS.glob("*.spv")}
    assert sorted(built) == sorted(kept) == ["matmul_blocks.spv", "matmul_tiles.spv"]
    for name, spirv in built.items():
        # The third word names the compiler and its version, which may differ.
        assert spirv[:8] + spirv[12:] == kept[name][:8] + kept[name][12:], name
