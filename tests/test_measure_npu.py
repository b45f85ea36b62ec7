"""The NPU test on a real external delegate that this project builds for itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import native_build
import pytest
from measure_helpers import LIMITS, fault, measure, number, plan

from switchgear.fingerprints.measure.npu_utilisation import nodes_taken
from switchgear.fingerprints.measurement import NPU_UTILISATION, Report
from switchgear.fingerprints.runner import run

if TYPE_CHECKING:
    from switchgear.fingerprints.runner import Progress


def on_delegate(sysfs: str = "/nonexistent", **options: str) -> Report:
    (report,) = measure(
        plan(
            NPU_UTILISATION,
            delegate=str(native_build.delegate()),
            delegate_options=options,
            sysfs=sysfs,
        )
    )
    return report


def test_absent_without_a_delegate() -> None:
    (report,) = measure(plan(NPU_UTILISATION))
    failure = fault(report, NPU_UTILISATION)
    assert report.subject is None
    assert (failure.domain, failure.code_name) == ("switchgear", "NoBackend")
    assert failure.text == "absent: no external delegate is configured"


def test_values_of_a_delegate() -> None:
    report = on_delegate()
    assert report.subject is not None
    assert report.subject.device_type == "npu"
    assert report.subject.library == str(native_build.delegate())
    # All 28 convolutions; pooling and reshape are left to the CPU.
    assert number(report, "float_nodes_on_device").median == 28
    assert number(report, "float_nodes_total").median == 30
    utilisation = number(report, "float_utilisation_pct")
    assert 50 < utilisation.median <= 100
    assert "own timestamps" in utilisation.method
    assert any("no NPU busy counter" in note for note in report.notes)
    latency = number(report, "float_latency_ms")
    assert latency.median > 0
    assert "28 of 30 nodes" in latency.method


def test_delegate_that_takes_nothing_is_not_called_an_npu() -> None:
    report = on_delegate()
    assert number(report, "int8_nodes_on_device").median == 0
    failure = fault(report, "int8_utilisation_pct")
    assert failure.code_name == "UnsupportedModel"
    assert "none of the 30 nodes" in failure.text
    assert report.value("int8_latency_ms") is None


def test_slow_device_shows_in_the_latency() -> None:
    slow = number(on_delegate(latency_us="60000", max_nodes="1"), "float_latency_ms")
    assert slow.median > 60


def test_part_of_the_nodes() -> None:
    report = on_delegate(max_nodes="3")
    assert number(report, "float_nodes_on_device").median == 3


def test_busy_counter_of_the_platform(tmp_path: Path) -> None:
    """The delegate keeps the counter that the kernel driver of an NPU would keep."""
    device = tmp_path / "class/accel/accel0/device"
    device.mkdir(parents=True)
    (device / "uevent").write_text("DRIVER=intel_vpu\n")
    counter = device / "npu_busy_time_us"
    counter.write_text("0\n")
    report = on_delegate(sysfs=str(tmp_path), busy_file=str(counter))
    utilisation = number(report, "float_utilisation_pct")
    assert utilisation.method == "busy counter npu_busy_time_us"
    assert 50 < utilisation.median <= 100
    assert f"busy counter {counter}" in report.notes


def test_counter_that_is_reset_again_and_again_is_replaced(tmp_path: Path) -> None:
    device = tmp_path / "class/accel/accel0/device"
    device.mkdir(parents=True)
    (device / "uevent").write_text("DRIVER=intel_vpu\n")
    counter = device / "npu_busy_time_us"
    counter.write_text("0\n")
    report = on_delegate(sysfs=str(tmp_path), busy_file=str(counter), busy_back="1")
    assert "own timestamps" in number(report, "float_utilisation_pct").method
    assert "float: the counter gave no usable reading" in report.notes


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "fail_create"}, "cannot open /dev/testnpu0"),
        ({"mode": "wrong"}, "unknown mode"),
        ({"mode": "fail_prepare"}, "refuses the model"),
        ({"mode": "fail_invoke"}, "the inference failed"),
    ],
)
def test_each_stage_of_failure(options: dict[str, str], text: str) -> None:
    failure = fault(on_delegate(**options), "float_utilisation_pct")
    assert failure.domain == "delegate"
    assert text in failure.text
    assert failure.library == str(native_build.delegate())


def test_crash_in_the_delegate() -> None:
    report = on_delegate(abort_after="3")
    failure = fault(report, NPU_UTILISATION)
    assert (failure.domain, failure.code_name) == ("signal", "SIGABRT")
    assert "assertion failed in run 4" in failure.text
    assert failure.library == str(native_build.delegate())


def test_missing_delegate(tmp_path: Path) -> None:
    path = tmp_path / "libgone.so"
    (report,) = measure(plan(NPU_UTILISATION, delegate=str(path)))
    failure = fault(report, "float_utilisation_pct")
    assert (failure.domain, failure.code, failure.code_name) == ("errno", 2, "ENOENT")
    assert failure.library == str(path)


def test_library_that_is_no_delegate() -> None:
    other = native_build.library("stub_opencl_driver", "CL/cl_icd.h")
    (report,) = measure(plan(NPU_UTILISATION, delegate=str(other)))
    failure = fault(report, "float_utilisation_pct")
    assert failure.code_name == "BackendFailed"
    assert "no TFLite external delegate" in failure.text


def test_file_that_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / "text.so"
    path.write_text("not a library")
    (report,) = measure(plan(NPU_UTILISATION, delegate=str(path)))
    failure = fault(report, "float_utilisation_pct")
    assert failure.code_name == "BackendFailed"
    assert "cannot be opened" in failure.text


def test_progress_names_the_delegate() -> None:
    heard: list[Progress] = []
    what = plan(NPU_UTILISATION, delegate=str(native_build.delegate()), limits=LIMITS)
    asyncio.run(run(what, progress=heard.append))
    assert any("test_delegate.so" in each.text for each in heard)
    shares = [each.done for each in heard]
    assert shares == sorted(shares)
    assert shares[-1] == 1


def node(inputs: list[int], outputs: list[int]) -> dict[str, Any]:
    return {"inputs": inputs, "outputs": outputs}


def test_nodes_taken_counts_what_lies_between() -> None:
    """0 -> A -> 1 -> B -> 2 -> C -> 3, and D beside B from 1 to 4, joined by E."""
    before = [
        node([0], [1]),
        node([1], [2]),
        node([2], [3]),
        node([1], [4]),
        node([3, 4], [5]),
    ]
    assert nodes_taken(before, before) == 0
    assert nodes_taken(before, [*before, node([1], [3])]) == 2
    assert nodes_taken(before, [*before, node([0], [1]), node([2], [3])]) == 2
    assert nodes_taken(before, [*before, node([0], [5])]) == 5
