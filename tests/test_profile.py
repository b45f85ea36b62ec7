"""The profile's model, and how a run is assembled into it."""

from __future__ import annotations

import pytest
from profile_helpers import LAVAPIPE, VULKAN_GPU, ZONES, key, profile, reports
from pydantic import ValidationError

from switchgear.fingerprints.assemble import assemble, best_value
from switchgear.fingerprints.key import stale_parts
from switchgear.fingerprints.measurement import (
    CPU,
    OPENCL_BANDWIDTH,
    TESTS,
    VULKAN_MATMUL,
    Failure,
    Report,
    Value,
)
from switchgear.fingerprints.profile import Profile, Threshold, threshold_of


def median(found: Profile, test: str, name: str) -> float:
    (value,) = [v for entry in found.of_test(test)[:1] for v in entry.values if v.name == name]
    assert isinstance(value, Value)
    return value.median


def test_a_profile_survives_json() -> None:
    whole = profile()
    assert Profile.model_validate_json(whole.model_dump_json()) == whole
    assert {type(v) for entry in whole.measurements for v in entry.values} == {Value, Failure}


@pytest.mark.parametrize(
    ("change", "value"),
    [("schema_version", 3), ("measured_at", -1), ("devices", None), ("unknown", 1)],
)
def test_what_is_no_profile_is_refused(change: str, value: object) -> None:
    data = profile().model_dump(mode="json") | {change: value}
    with pytest.raises(ValidationError):
        Profile.model_validate(data)


@pytest.mark.parametrize("celsius", [float("nan"), float("inf"), 0.0, 400.0])
def test_a_threshold_is_a_temperature(celsius: float) -> None:
    with pytest.raises(ValidationError):
        threshold_of(celsius, "operator")


def test_recover_is_seven_below_unless_the_operator_says() -> None:
    assert threshold_of(65.0, "default").recover_c == 58.0
    assert threshold_of(65.0, "operator", recover_c=50.0) == Threshold(
        throttle_c=65.0, recover_c=50.0, source="operator"
    )


def test_every_measurement_knows_its_device() -> None:
    whole = profile()
    places = {(entry.test, entry.device_id) for entry in whole.measurements}
    assert places == {
        (CPU, "cpu"),
        (OPENCL_BANDWIDTH, "gpu-8680a656"),
        (VULKAN_MATMUL, "gpu-8680a656"),
        (VULKAN_MATMUL, "cpu"),
        ("npu_utilisation", None),
    }
    assert whole.zones == ZONES
    assert {driver.device for driver in whole.key.drivers} == {
        "Mali-G610",
        "Mali-G610 r0p0",
        "llvmpipe (LLVM 19)",
    }


def test_a_part_that_was_not_measured_keeps_its_numbers_and_its_key() -> None:
    old = profile(1.0, measured_at=1000)
    changed = key()
    parts = {test: dict(part) for test, part in changed.parts.items()}
    parts[VULKAN_MATMUL]["file:/usr/lib/libvulkan_panfrost.so"] = "another build"
    parts[CPU]["engine:ai-edge-litert"] = "9"
    changed = changed.model_copy(update={"parts": parts})
    assert set(stale_parts(old.key, changed)) == {CPU, VULKAN_MATMUL}

    # Only Vulkan gets its turn.
    fresh = [report for report in reports(3.0) if report.test == VULKAN_MATMUL]
    new = assemble(fresh, key=changed, measured_at=2000, old=old, zones=ZONES)
    assert median(new, OPENCL_BANDWIDTH, "write_mb_s") == 6000.0
    assert median(new, CPU, "float_1_thread_ms") == 40.0
    assert median(new, VULKAN_MATMUL, "matmul_ms") == 36.0
    times = {entry.test: entry.measured_at for entry in new.measurements}
    assert (times[CPU], times[VULKAN_MATMUL], new.measured_at) == (1000, 2000, 2000)
    assert set(stale_parts(new.key, changed)) == {CPU}


def test_a_device_that_is_gone_leaves_with_its_test() -> None:
    old = profile()
    fresh = [r for r in reports() if r.test == VULKAN_MATMUL and r.subject == LAVAPIPE]
    new = assemble(fresh, key=key(), measured_at=2, old=old, zones=ZONES)
    assert [entry.subject for entry in new.of_test(VULKAN_MATMUL)] == [LAVAPIPE]
    # OpenCL still sees the GPU.
    assert [device.device_id for device in new.devices] == ["cpu", "gpu-8680a656"]
    assert VULKAN_GPU not in new.devices[1].apis


def test_nothing_measured_is_a_profile_too() -> None:
    empty = assemble([], key=key(), measured_at=7)
    assert (empty.measurements, empty.measured_at) == ((), 7)
    assert [device.device_id for device in empty.devices] == ["cpu"]
    assert set(stale_parts(empty.key, key())) == set(TESTS)


def test_zones_alone_may_change() -> None:
    old = profile()
    new = assemble([], key=key(), measured_at=9, old=old, zones=())
    assert new.zones == ()
    assert new.measurements == old.measurements
    assert {device.threshold.source for device in new.devices} == {"default"}


def test_the_best_number_is_the_hardwares() -> None:
    slow_gpu = Report(
        VULKAN_MATMUL, VULKAN_GPU, (Value("matmul_ms", 900.0, 1.0, 5, "ms", "clock"),)
    )
    fast_software = Report(
        VULKAN_MATMUL, LAVAPIPE, (Value("matmul_ms", 100.0, 1.0, 5, "ms", "clock"),)
    )
    found = assemble([fast_software, slow_gpu], key=key(), measured_at=1)
    best = best_value(found, VULKAN_MATMUL, "matmul_ms", highest=False)
    assert best is not None
    assert best[1].median == 900.0
    assert best_value(found, CPU, "float_1_thread_ms", highest=False) is None
