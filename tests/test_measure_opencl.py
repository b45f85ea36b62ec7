"""The OpenCL test on a real driver, and on drivers that fail."""

from __future__ import annotations

from pathlib import Path

import native_build
import pytest
from measure_helpers import (
    TRANSFER_BYTES,
    fault,
    measure,
    number,
    opencl_drivers,
    plan,
)

from switchgear.fingerprints.child import Limits
from switchgear.fingerprints.measurement import OPENCL_BANDWIDTH, Report


def with_stub(mode: str, folder: Path, limits: Limits | None = None) -> tuple[Report, Report]:
    """The report of the failing driver and that of the real one beside it."""
    environment = {
        **opencl_drivers(folder, stub=native_build.stub_opencl_driver()),
        "SWITCHGEAR_TEST_OPENCL_DRIVER": mode,
    }
    reports = measure(plan(OPENCL_BANDWIDTH, environment, limits=limits or Limits(15, 10)))
    real = [each for each in reports if each.subject and "stub" not in each.subject.library]
    stub = [each for each in reports if each not in real]
    assert len(real) == len(stub) == 1, reports
    assert number(real[0], "write_mb_s").median > 0
    assert stub[0].subject is not None
    assert stub[0].subject.library == str(native_build.stub_opencl_driver())
    assert real[0].subject is not None
    assert real[0].subject.index != stub[0].subject.index
    return stub[0], real[0]


def test_values_of_a_software_device(tmp_path: Path) -> None:
    (report,) = measure(plan(OPENCL_BANDWIDTH, opencl_drivers(tmp_path)))
    assert report.subject is not None
    assert report.subject.api == "opencl"
    assert report.subject.platform == "Portable Computing Language"
    assert report.subject.device_type == "cpu"
    assert report.subject.driver_version
    assert "libpocl" in report.subject.library
    for name in ("write_mb_s", "read_mb_s", "pinned_write_mb_s"):
        value = number(report, name)
        assert value.samples >= 5
        assert value.unit == "MB/s"
        # From a slow flash controller to well beyond any memory bus.
        assert 10 < value.median < 1e6
        assert "first one dropped" in value.method
        assert f"{TRANSFER_BYTES // 2**20} MiB" in value.method

    assert number(report, "submit_overhead_us").median > 0
    assert any("read back and compared: equal" in note for note in report.notes)
    assert any(note == "16 MiB: a quick run" for note in report.notes)


def test_no_driver(tmp_path: Path) -> None:
    (report,) = measure(plan(OPENCL_BANDWIDTH, opencl_drivers(tmp_path, real=False)))
    failure = fault(report, OPENCL_BANDWIDTH)
    assert report.subject is None
    assert (failure.domain, failure.code) == ("opencl", -1001)
    assert failure.code_name == "CL_PLATFORM_NOT_FOUND_KHR"
    assert "OpenCL" in Path(failure.library).name


def test_no_binding(tmp_path: Path) -> None:
    (tmp_path / "pyopencl.py").write_text("import a_library_that_is_not_there\n")
    (report,) = measure(plan(OPENCL_BANDWIDTH, {"PYTHONPATH": str(tmp_path)}))
    failure = fault(report, OPENCL_BANDWIDTH)
    assert (failure.domain, failure.code_name) == ("switchgear", "NoBackend")
    assert "a_library_that_is_not_there" in failure.text


@pytest.mark.parametrize("mode", ["platform_crash", "context_crash"])
def test_one_driver_crashes_the_other_is_measured(mode: str, tmp_path: Path) -> None:
    stub, _ = with_stub(mode, tmp_path)
    failure = fault(stub, OPENCL_BANDWIDTH)
    assert (failure.domain, failure.code, failure.code_name) == ("signal", 6, "SIGABRT")
    assert "stub driver: assertion failed in cl" in failure.text


@pytest.mark.parametrize("mode", ["platform_hang", "context_hang"])
def test_one_driver_hangs_the_other_is_measured(mode: str, tmp_path: Path) -> None:
    stub, _ = with_stub(mode, tmp_path, Limits(total_s=15, silence_s=2))
    failure = fault(stub, OPENCL_BANDWIDTH)
    assert (failure.domain, failure.code, failure.code_name) == ("switchgear", 407, "TimedOut")
    assert "no sign of life for 2 s" in failure.text


@pytest.mark.parametrize(
    ("mode", "code", "name", "call"),
    [
        ("context_memory", -6, "CL_OUT_OF_HOST_MEMORY", "Context"),
        ("buffer_memory", -4, "CL_MEM_OBJECT_ALLOCATION_FAILURE", "create_buffer"),
        ("write_lost", -5, "CL_OUT_OF_RESOURCES", "clEnqueueWriteBuffer"),
        ("no_device", -1, "CL_DEVICE_NOT_FOUND", "no device"),
    ],
)
def test_driver_errors_keep_their_code(
    mode: str, code: int, name: str, call: str, tmp_path: Path
) -> None:
    stub, _ = with_stub(mode, tmp_path)
    failure = fault(stub, OPENCL_BANDWIDTH)
    assert (failure.domain, failure.code, failure.code_name) == ("opencl", code, name)
    assert call in failure.text


def test_device_without_a_compiler_says_so(tmp_path: Path) -> None:
    """What needs the compiler fails under its own name."""
    stub, _ = with_stub("buffer_memory", tmp_path)
    failure = fault(stub, "submit_overhead_us")
    assert (failure.code, failure.code_name) == (-3, "CL_COMPILER_NOT_AVAILABLE")
    assert "\n" not in failure.text
