"""Two profiles compared: what changed, by how much, and whether that is beyond the spread."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_helpers import CPU_SUBJECT, LAVAPIPE, NO_NPU, VULKAN_GPU, ZONES, key, profile

from switchgear.fingerprints.assemble import assemble
from switchgear.fingerprints.diff import SPREADS, ValueChange, compare, to_table
from switchgear.fingerprints.measurement import CPU, VULKAN_MATMUL, Measured, Report, Value
from switchgear.fingerprints.profile import Profile

BASE = Value("float_1_thread_ms", 100.0, 2.0, 10, "ms", "clock")


def holding(*values: Measured) -> Profile:
    return assemble([Report(CPU, CPU_SUBJECT, values)], key=key(), measured_at=1)


def change(old: Measured, new: Measured) -> ValueChange:
    (found,) = compare(holding(old), holding(new)).values
    return found


def test_a_profile_does_not_differ_from_itself() -> None:
    difference = compare(profile(), profile())
    assert not difference.differs
    assert to_table(difference) == "0 of 7 values changed\n"


@pytest.mark.parametrize(
    ("old", "new", "expected", "verdict"),
    [
        (BASE, replace(BASE, median=106.0), "same", ""),
        (BASE, replace(BASE, median=106.1), "changed", "worse"),
        (BASE, replace(BASE, median=93.9), "changed", "better"),
        (BASE, replace(BASE, median=110.0, spread=4.0), "same", ""),
        (BASE, replace(BASE, median=200.0, noisy=True), "unclear", ""),
        (BASE, replace(BASE, noisy=True), "same", ""),
        (BASE, replace(BASE, median=101.0, samples=1), "unclear", ""),
        (BASE, replace(BASE, unit="us"), "unclear", ""),
    ],
)
def test_beyond_the_spread_or_not(old: Value, new: Value, expected: str, verdict: str) -> None:
    found = change(old, new)
    assert (found.change, found.verdict) == (expected, verdict)


def test_more_is_better_for_bandwidth_and_neither_for_a_share() -> None:
    bandwidth = replace(BASE, name="memory_copy_mb_s", unit="MB/s")
    assert change(bandwidth, replace(bandwidth, median=50.0)).verdict == "worse"
    share = replace(BASE, name="float_utilisation_pct", unit="%")
    assert change(share, replace(share, median=50.0)).verdict == ""


def test_the_change_says_by_how_much() -> None:
    found = change(BASE, replace(BASE, median=125.0))
    assert (found.old, found.new, found.ratio) == (100.0, 125.0, 1.25)
    assert "100 -> 125 ms (+25.0 %): beyond the spread, worse" in found.text


def test_numbers_and_failures() -> None:
    failure = replace(NO_NPU, name=BASE.name)
    assert change(BASE, failure).change == "disappeared"
    assert change(failure, BASE).change == "appeared"
    assert change(failure, failure).change == "same"
    assert change(failure, replace(failure, code=407)).change == "failure"
    (gone,) = compare(holding(BASE), holding()).values
    assert (gone.change, gone.new) == ("disappeared", None)


def test_what_the_numbers_depend_on_is_told() -> None:
    new_key = key().model_copy(update={"kernel": "6.13.0", "engines": {"pyopencl": "2027.1"}})
    updated = replace(VULKAN_GPU, driver_version="25.1.0", driver_info="Mesa 25.1.0")
    old = assemble(
        [Report(VULKAN_MATMUL, VULKAN_GPU, ())], key=key(), measured_at=1, zones=ZONES
    )
    new = assemble(
        [Report(VULKAN_MATMUL, updated, ())], key=new_key, measured_at=2, zones=ZONES[:1]
    )
    facts = "\n".join(compare(old, new).facts)
    assert "kernel: 6.12.1 -> 6.13.0" in facts
    assert "ai-edge-litert: 2.3.0 -> none" in facts
    assert "vulkan driver of Mali-G610: panvk 25.0.7 Mesa 25.0.7 -> panvk 25.1.0" in facts
    assert "throttle threshold of gpu-8680a656: 75 C (kernel_passive_trip) -> 85 C" in facts
    assert "zone gone: gpu-thermal" in facts


def test_equal_cards_are_compared_in_their_order() -> None:
    def two(first: float, second: float) -> Profile:
        value = replace(BASE, name="matmul_ms")
        made = [
            Report(VULKAN_MATMUL, replace(LAVAPIPE, index=n), (replace(value, median=m),))
            for n, m in enumerate((first, second))
        ]
        return assemble(made, key=key(), measured_at=1)

    found = compare(two(100.0, 100.0), two(100.0, 300.0)).values
    assert [value.change for value in found] == ["same", "changed"]


def test_the_table_fits_and_the_json_is_plain() -> None:
    difference = compare(profile(), profile(1.5))
    table = to_table(difference, everything=True)
    assert max(len(line) for line in table.splitlines()) <= 80
    assert "matmul_ms" in table
    data = json.loads(json.dumps(difference.to_json()))
    assert data["differs"] is True
    assert {value["change"] for value in data["values"]} == {"same", "changed", "unclear"}


FINITE = st.floats(min_value=-1e12, max_value=1e12)
VALUES = st.builds(
    Value,
    name=st.just("matmul_ms"),
    median=FINITE,
    spread=st.floats(min_value=0, max_value=1e12),
    samples=st.integers(1, 10**6),
    unit=st.just("ms"),
    method=st.text(max_size=40),
    noisy=st.booleans(),
)


@given(VALUES, VALUES)
def test_a_diff_turned_round_is_the_opposite(old: Value, new: Value) -> None:
    there, back = change(old, new), change(new, old)
    assert there.change == back.change
    assert (there.old, there.new) == (back.new, back.old)
    opposite = {"better": "worse", "worse": "better", "": ""}
    assert back.verdict == opposite[there.verdict]
    if there.change == "changed":
        assert abs(new.median - old.median) > SPREADS * max(old.spread, new.spread)
    elif there.change == "same" and not (old.noisy or new.noisy):
        assert abs(new.median - old.median) <= SPREADS * max(old.spread, new.spread)

    lines = to_table(compare(holding(old), holding(new)), everything=True).splitlines()
    assert max(len(line) for line in lines) <= 80


@given(VALUES)
def test_a_value_does_not_differ_from_itself(value: Value) -> None:
    assert change(value, value).change == "same"
