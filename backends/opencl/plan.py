"""Where intermediate tensors lie: buffers that live at different times share memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

# Enough for every device's sub-buffer alignment that is known (CL_DEVICE_MEM_BASE_ADDR_ALIGN is
# at most 4096 bits on those).
ALIGNMENT_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class LiveRange:
    """A buffer of `size_bytes` that is used from launch `first` to launch `last`, inclusive."""

    size_bytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Plan:
    """An offset for each live range, in bytes, and how good that is.

    `naive_bytes` is what separate buffers would take, `lower_bound_bytes` the most that is
    alive at one launch: no plan takes less.
    """

    offsets: tuple[int, ...]
    naive_bytes: int
    planned_bytes: int
    lower_bound_bytes: int


def aligned(size_bytes: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """The size rounded up to the alignment."""
    return -(-size_bytes // alignment) * alignment


def plan_memory(ranges: Sequence[LiveRange], alignment: int = ALIGNMENT_BYTES) -> Plan:
    """Places one after another, each into the smallest gap between those it lives beside.

    The largest first; the largest for the longest first; by size where they begin: the order
    that takes the least is kept.

    :raises ValueError: a range has no size or ends before it begins.
    """
    for live in ranges:
        if live.size_bytes < 1 or not 0 <= live.first <= live.last:
            raise ValueError(f"not a live range: {live}")

    sizes = [aligned(live.size_bytes, alignment) for live in ranges]
    orders: list[Callable[[int], tuple[int, ...]]] = [
        lambda n: (-sizes[n], ranges[n].first, n),
        lambda n: (-sizes[n] * (1 + ranges[n].last - ranges[n].first), -sizes[n], n),
        lambda n: (ranges[n].first, -sizes[n], n),
    ]
    plans = [_placed(ranges, sizes, sorted(range(len(ranges)), key=order)) for order in orders]
    planned, offsets = min(plans, key=lambda plan: plan[0])
    return Plan(tuple(offsets), sum(sizes), planned, _most_alive(ranges, sizes))


def _placed(
    ranges: Sequence[LiveRange], sizes: Sequence[int], order: Sequence[int]
) -> tuple[int, list[int]]:
    """The memory it takes in this order, and the offsets."""
    offsets = [0] * len(ranges)
    placed: list[int] = []
    for number in order:
        live = ranges[number]
        beside = sorted(
            (offsets[other], offsets[other] + sizes[other])
            for other in placed
            if ranges[other].first <= live.last and live.first <= ranges[other].last
        )
        offsets[number] = _smallest_gap(beside, sizes[number])
        placed.append(number)

    most = max((o + s for o, s in zip(offsets, sizes, strict=True)), default=0)
    return most, offsets


def _smallest_gap(taken: Sequence[tuple[int, int]], size_bytes: int) -> int:
    best = -1
    best_room = 0
    end = 0
    for begin, after in taken:
        room = begin - end
        if room >= size_bytes and (best < 0 or room < best_room):
            best, best_room = end, room

        end = max(end, after)

    return end if best < 0 else best


def _most_alive(ranges: Sequence[LiveRange], sizes: Sequence[int]) -> int:
    # At equal times what begins counts first: both are alive at that launch.
    events = [(live.first, 0, size) for live, size in zip(ranges, sizes, strict=True)]
    events += [(live.last, 1, -size) for live, size in zip(ranges, sizes, strict=True)]
    alive = most = 0
    for _, _, change in sorted(events):
        alive += change
        most = max(most, alive)

    return most
