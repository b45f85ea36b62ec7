"""Memory planning: no two buffers that live together overlap, and nothing beats the bound."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from switchgear.backends.opencl.plan import ALIGNMENT_BYTES, LiveRange, aligned, plan_memory


@st.composite
def live_ranges(draw: st.DrawFn) -> LiveRange:
    first = draw(st.integers(0, 30))
    return LiveRange(draw(st.integers(1, 100_000)), first, first + draw(st.integers(0, 8)))


@settings(max_examples=200, deadline=None)
@given(st.lists(live_ranges(), max_size=40))
def test_neighbours_in_time_do_not_overlap(ranges: list[LiveRange]) -> None:
    plan = plan_memory(ranges)
    for one, live in enumerate(ranges):
        assert plan.offsets[one] % ALIGNMENT_BYTES == 0
        assert plan.offsets[one] + live.size_bytes <= plan.planned_bytes
        for other in range(one):
            beside = ranges[other]
            if live.first <= beside.last and beside.first <= live.last:
                apart = (
                    plan.offsets[one] + live.size_bytes <= plan.offsets[other]
                    or plan.offsets[other] + beside.size_bytes <= plan.offsets[one]
                )
                assert apart, (live, beside)


@settings(max_examples=200, deadline=None)
@given(st.lists(live_ranges(), max_size=40))
def test_between_the_bound_and_separate_buffers(ranges: list[LiveRange]) -> None:
    plan = plan_memory(ranges)
    assert plan.lower_bound_bytes <= plan.planned_bytes <= plan.naive_bytes
    assert plan.naive_bytes == sum(aligned(live.size_bytes) for live in ranges)


def test_a_chain_takes_two_buffers() -> None:
    """Each launch reads what the one before wrote: two are alive at any time."""
    chain = [LiveRange(4096, n, n + 1) for n in range(20)]
    plan = plan_memory(chain)
    assert plan.naive_bytes == 20 * 4096
    assert plan.planned_bytes == plan.lower_bound_bytes == 2 * 4096


def test_the_smallest_gap_is_taken() -> None:
    small_gap, large_gap = 1024, 4096
    ranges = [
        LiveRange(large_gap, 0, 1),
        LiveRange(8192, 0, 9),
        LiveRange(small_gap, 0, 1),
        LiveRange(small_gap, 2, 9),
    ]
    plan = plan_memory(ranges)
    assert plan.planned_bytes == 8192 + large_gap + small_gap


def test_nothing_takes_nothing() -> None:
    plan = plan_memory([])
    assert (plan.offsets, plan.planned_bytes, plan.lower_bound_bytes) == ((), 0, 0)


@pytest.mark.parametrize(
    "live", [LiveRange(0, 0, 1), LiveRange(8, 2, 1), LiveRange(8, -1, 1), LiveRange(-4, 0, 0)]
)
def test_impossible_ranges_are_refused(live: LiveRange) -> None:
    with pytest.raises(ValueError, match="not a live range"):
        plan_memory([live])
