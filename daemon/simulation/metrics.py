"""What a run comes to: rates, frame times, swing, switches, energy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from switchgear.daemon.simulation.run import Trace
    from switchgear.daemon.simulation.scenario import Scenario

# Frame rates are counted in windows of this, after the first minute: the definition of the
# swing that the project reports.
WINDOW_S: Final = 10.0
WARM_UP_S: Final = 60.0
SWITCH_WINDOW_S: Final = 60.0
# A frame is in time up to this many periods after its arrival.
IN_TIME_PERIODS: Final = 1.5


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one run.

    `swing_pct`: half the range from the 2.5th to the 97.5th percentile of the rates in windows
    of 10 s, over their mean, after the first minute. `tail_ratio`: the 97.5th percentile of the
    frame time over its median. `switches` counts each pair of successive answers from different
    backends. `in_time` is None where frames have no period.
    """

    policy: str
    answered: int
    offered: int
    superseded: int
    lost: int
    in_time: int | None
    mean_fps: float
    swing_pct: float
    median_ms: float
    tail_ratio: float
    switches: int
    worst_switches_per_min: int
    probes: int
    energy_j: float
    energy_per_frame_mj: float
    shares: dict[str, float]


def result_of(trace: Trace, scenario: Scenario, policy: str) -> Result:
    """The figures of a trace; rates are 0 and ratios NaN where nothing was answered."""
    order = sorted(range(len(trace.ends_s)), key=trace.ends_s.__getitem__)
    ends = [trace.ends_s[at] for at in order]
    backends = [trace.backends[at] for at in order]
    rates = window_rates(ends, scenario.duration_s)
    latencies = sorted(trace.latencies_ms)
    median_ms = percentile(latencies, 50.0)
    switched = [ends[at] for at in range(1, len(ends)) if backends[at] != backends[at - 1]]
    mean_fps = sum(rates) / len(rates) if rates else 0.0
    limit_ms = limit_of(scenario)
    return Result(
        policy=policy,
        answered=len(ends),
        offered=trace.offered,
        superseded=trace.superseded,
        lost=trace.lost,
        in_time=None if limit_ms is None else sum(one <= limit_ms for one in latencies),
        mean_fps=mean_fps,
        swing_pct=swing_pct(rates),
        median_ms=median_ms,
        tail_ratio=percentile(latencies, 97.5) / median_ms,
        switches=len(switched),
        worst_switches_per_min=most_within(switched, SWITCH_WINDOW_S),
        probes=trace.probes,
        energy_j=trace.energy_j,
        energy_per_frame_mj=trace.energy_j * 1000.0 / len(ends) if ends else math.nan,
        shares={name: backends.count(name) / len(backends) for name in sorted(set(backends))},
    )


def limit_of(scenario: Scenario) -> float | None:
    """Up to when a frame is in time, in ms; None as fast as it goes."""
    fps = scenario.load.fps
    return IN_TIME_PERIODS * 1000.0 / fps if fps > 0.0 else None


def window_rates(ends_s: Sequence[float], duration_s: float) -> list[float]:
    """Answers per second in each whole window after the first minute."""
    windows = int((duration_s - WARM_UP_S) / WINDOW_S)
    counts = [0] * max(windows, 0)
    for end_s in ends_s:
        at = math.floor((end_s - WARM_UP_S) / WINDOW_S)
        if 0 <= at < len(counts):
            counts[at] += 1

    return [number / WINDOW_S for number in counts]


def swing_pct(rates: Sequence[float]) -> float:
    mean = sum(rates) / len(rates) if rates else 0.0
    if mean == 0.0:
        return math.nan

    ordered = sorted(rates)
    span = percentile(ordered, 97.5) - percentile(ordered, 2.5)
    return 100.0 * span / 2.0 / mean


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between the two nearest of sorted values, linearly; NaN of none."""
    if not ordered:
        return math.nan

    place = (len(ordered) - 1) * percent / 100.0
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def most_within(times_s: Sequence[float], window_s: float) -> int:
    """The most of sorted moments that fall in any window, its end left out."""
    most = first = 0
    for last, when_s in enumerate(times_s):
        while times_s[first] <= when_s - window_s:
            first += 1

        most = max(most, last - first + 1)

    return most
