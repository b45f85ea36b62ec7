"""The reports' own rules: statistics, and JSON both ways."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from switchgear.fingerprints.measurement import (
    NOISY_SHARE,
    Failure,
    Measured,
    Report,
    Subject,
    Value,
    failure_of,
    measured_from_json,
    median_absolute_deviation,
    own_failure,
    report_from_json,
    subject_from_json,
    value_of,
)
from switchgear.ipc.errors import DriverError

finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
values = st.builds(
    Value, st.text(), finite, finite, st.integers(0), st.text(), st.text(), st.booleans()
)
failures = st.builds(
    Failure, st.text(), st.text(), st.integers(), st.text(), st.text(), st.text()
)
measured: st.SearchStrategy[Measured] = st.one_of(values, failures)
subjects = st.builds(Subject, st.text(), st.text(), st.integers(0), st.integers(0))
reports = st.builds(
    Report,
    st.text(),
    st.one_of(st.none(), subjects),
    st.lists(measured, max_size=3).map(tuple),
    st.lists(st.text(), max_size=3).map(tuple),
    st.floats(0, 1e6),
)


@given(reports)
def test_json_both_ways(report: Report) -> None:
    assert report_from_json(json.loads(json.dumps(report.to_json()))) == report


def test_median_absolute_deviation() -> None:
    assert median_absolute_deviation([1, 1, 2, 2, 4, 6, 9]) == 1
    assert median_absolute_deviation([5]) == 0
    with pytest.raises(ValueError, match="no samples"):
        median_absolute_deviation([])


def test_one_outlier_moves_neither_median_nor_spread() -> None:
    quiet = value_of("t", [10.0, 10.1, 9.9, 10.0, 10.1], "ms", "clock")
    disturbed = value_of("t", [10.0, 10.1, 9.9, 10.0, 1000.0], "ms", "clock")
    assert disturbed.median == quiet.median
    assert disturbed.spread <= 0.11
    assert not disturbed.noisy


def test_noisy_from_the_spread_or_by_word() -> None:
    assert not value_of("t", [100, 100 + 100 * NOISY_SHARE, 100], "ms", "clock").noisy
    assert value_of("t", [80, 100, 120], "ms", "clock").noisy
    assert value_of("t", [100, 100], "ms", "clock", disturbed=True).noisy
    assert not value_of("t", [0, 0], "ms", "clock").noisy


def test_failures_carry_domain_code_and_name() -> None:
    lost = DriverError("vulkan", -4, "VK_ERROR_DEVICE_LOST", "vkQueueSubmit")
    assert failure_of("matmul_ms", lost, "/lib/x.so") == Failure(
        "matmul_ms", "vulkan", -4, "VK_ERROR_DEVICE_LOST", "vkQueueSubmit", "/lib/x.so"
    )
    assert own_failure("cpu", "TimedOut", "late").code == 407


def test_lookup_in_a_report() -> None:
    value = value_of("a", [1.0], "ms", "clock", disturbed=True)
    failure = own_failure("b", "NoBackend", "none")
    report = Report("cpu", None, (value, failure))
    assert report.value("a") is value
    assert report.value("c") is None
    assert report.failures == (failure,)
    assert report.noisy


def test_unknown_keys_are_ignored() -> None:
    data = Report("cpu", Subject("cpu", "x"), ()).to_json()
    data["later"] = 1
    data["subject"]["later"] = 2
    assert report_from_json(data) == Report("cpu", Subject("cpu", "x"), ())


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"test": 1, "subject": None, "values": [], "notes": [], "duration_s": 0},
        {"test": "a", "subject": [], "values": [], "notes": [], "duration_s": 0},
        {"test": "a", "subject": {"api": "x"}, "values": [], "notes": [], "duration_s": 0},
        {"test": "a", "subject": None, "values": [3], "notes": [], "duration_s": 0},
        {"test": "a", "subject": None, "values": [], "notes": [3], "duration_s": 0},
    ],
)
def test_what_is_no_report(data: object) -> None:
    with pytest.raises(ValueError):
        report_from_json(data)  # type: ignore[arg-type]  # what came over a pipe


@pytest.mark.parametrize("median", [math.nan, math.inf, "1", True, None])
def test_values_are_finite_numbers(median: object) -> None:
    data = value_of("a", [1.0], "ms", "clock").to_json() | {"median": median}
    with pytest.raises(ValueError):
        measured_from_json(data)


def test_a_subject_by_itself() -> None:
    subject = Subject("vulkan", "GPU", 1, pci_address="0000:01:00.0")
    assert subject_from_json(subject.to_json()) == subject
    with pytest.raises(ValueError):
        subject_from_json({"api": "vulkan", "name": "GPU", "index": "1"})
