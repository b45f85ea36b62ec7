"""How long a pair takes now, and how long its lane has to be waited for.

Times of the clock are seconds of one monotonic clock, durations milliseconds.
"""

from __future__ import annotations

from math import exp
from typing import Final

# The newest frame counts 1/16 in the long run: half of a change is seen after 11 frames.
MEMORY_FRAMES: Final = 16
# A frame further from the estimate than this many spreads, and than this share of it, is cut to
# that: a hiccup must not look like a slow device.
CLIP_SPREADS: Final = 4.0
CLIP_SHARE: Final = 0.1
# So many cut frames in a row on one side are no hiccup: the estimate jumps to their middle.
JUMP_FRAMES: Final = 3
# The spread of a pair that was seen once, as a share of its time.
FIRST_SPREAD_SHARE: Final = 0.1
# A prior is right within about this share of itself.
PRIOR_SPREAD_SHARE: Final = 0.25
# The cool time follows a slower pace by 1/2048 a frame: a minute of throttling at 30 frames a
# second does not become the healthy pace, a model's new input sizes do in the end.
COOL_MEMORY_FRAMES: Final = 2048
# A slowed pair that nobody uses cools: after this its estimate goes back to its cool time, with
# this time constant (twice the 60 s of a die and its board).
STALE_S: Final = 30.0
RELAX_S: Final = 120.0

PRIOR: Final = "prior"
MEASURED: Final = "measured"


class ServiceEstimate:
    """A robust moving estimate of the run time of one pair (model, backend, precision, shapes).

    A moving mean whose outliers are cut, with the mean absolute deviation as its spread.
    `median_ms` and `spread_ms` are the estimate, `cool_ms` the pace of the healthy device;
    `why` says in words where a prior comes from.
    """

    __slots__ = (
        "_outliers",
        "cool_ms",
        "median_ms",
        "observed_s",
        "samples",
        "spread_ms",
        "why",
    )

    def __init__(self, prior_ms: float, why: str = "", now_s: float = 0.0) -> None:
        if not prior_ms > 0.0:
            raise ValueError(f"an estimate is above 0, not {prior_ms}")

        self.median_ms = prior_ms
        self.spread_ms = prior_ms * PRIOR_SPREAD_SHARE
        self.cool_ms = prior_ms
        self.samples = 0
        self.observed_s = now_s
        self.why = why
        self._outliers: tuple[float, ...] = ()

    @property
    def source(self) -> str:
        return MEASURED if self.samples else PRIOR

    def observe(self, run_ms: float, now_s: float) -> None:
        """A run that ended at `now_s`. First-use frames and failures do not belong here."""
        self.observed_s = now_s
        samples = self.samples
        self.samples = samples + 1
        if not samples:
            self.median_ms = self.cool_ms = run_ms
            self.spread_ms = run_ms * FIRST_SPREAD_SHARE
            return

        median_ms = self.median_ms
        off_ms = run_ms - median_ms
        bound_ms = max(CLIP_SPREADS * self.spread_ms, CLIP_SHARE * median_ms)
        if -bound_ms <= off_ms <= bound_ms:
            if self._outliers:
                self._outliers = ()
        elif self._jumped(run_ms, median_ms):
            return
        else:
            off_ms = bound_ms if off_ms > 0.0 else -bound_ms

        weight = 1.0 / (samples + 1) if samples < MEMORY_FRAMES else 1.0 / MEMORY_FRAMES
        median_ms += off_ms * weight
        self.median_ms = median_ms
        self.spread_ms += (abs(off_ms) - self.spread_ms) * weight
        if samples < MEMORY_FRAMES:
            self.cool_ms = median_ms
        elif median_ms < self.cool_ms:
            self.cool_ms += (median_ms - self.cool_ms) / MEMORY_FRAMES
        else:
            self.cool_ms += (median_ms - self.cool_ms) / COOL_MEMORY_FRAMES

    def _jumped(self, run_ms: float, median_ms: float) -> bool:
        """Takes three outliers in a row on one side for the new pace."""
        outliers = self._outliers
        if outliers and (outliers[-1] > median_ms) != (run_ms > median_ms):
            outliers = ()

        outliers = (*outliers, run_ms)
        if len(outliers) < JUMP_FRAMES:
            self._outliers = outliers
            return False

        self._outliers = ()
        self.median_ms = sorted(outliers)[JUMP_FRAMES // 2]
        self.spread_ms = max(outliers) - min(outliers)
        self.cool_ms = min(self.cool_ms, self.median_ms)
        return True

    def expected_ms(self, now_s: float) -> float:
        """What the next run takes."""
        median_ms = self.median_ms
        slowed_ms = median_ms - self.cool_ms
        idle_s = now_s - self.observed_s - STALE_S
        if idle_s <= 0.0 or slowed_ms <= 0.0:
            return median_ms

        return self.cool_ms + slowed_ms * exp(-idle_s / RELAX_S)


class LaneLoad:
    """What stands before a new request in one lane; the lane keeps it up to date."""

    __slots__ = ("_queued_ms", "_running_ms", "_started_s")

    def __init__(self) -> None:
        self._queued_ms = 0.0
        self._running_ms = 0.0
        self._started_s = 0.0

    def queued(self, expected_ms: float) -> None:
        self._queued_ms += expected_ms

    def left(self, expected_ms: float) -> None:
        """A request left the queue: it starts, was cancelled or expired."""
        # Sums of floats do not come back to zero by themselves.
        self._queued_ms = max(0.0, self._queued_ms - expected_ms)

    def started(self, expected_ms: float, now_s: float) -> None:
        self._running_ms = expected_ms
        self._started_s = now_s

    def ended(self) -> None:
        self._running_ms = 0.0

    def clear(self) -> None:
        """Empty: nothing waits and nothing runs."""
        self._queued_ms = self._running_ms = 0.0

    def wait_ms(self, now_s: float) -> float:
        """The wait of a request that joins the queue now.

        A run that is over its time is expected to take as long again as it is late: a hung one
        looks worse from moment to moment, before anybody calls it hung.
        """
        if self._running_ms == 0.0:
            return self._queued_ms

        left_ms = self._running_ms - (now_s - self._started_s) * 1000.0
        return self._queued_ms + (left_ms if left_ms >= 0.0 else -left_ms)


class EnergyEstimate:
    """Energy of one inference in mJ: measured, or modelled as busy power times time."""

    __slots__ = ("_busy_w", "_measured_mj")

    def __init__(self, busy_w: float, measured_mj: float | None = None) -> None:
        self._busy_w = busy_w
        self._measured_mj = measured_mj

    @property
    def source(self) -> str:
        return "modelled" if self._measured_mj is None else MEASURED

    def observe(self, energy_mj: float) -> None:
        """A measurement, from powercap, a hwmon power sensor or the battery's current."""
        known_mj = self._measured_mj
        if known_mj is None:
            self._measured_mj = energy_mj
        else:
            self._measured_mj = known_mj + (energy_mj - known_mj) / MEMORY_FRAMES

    def per_inference_mj(self, cool_ms: float) -> float:
        """`cool_ms` is the time at full clock: a slowed clock takes less power, so that the
        slowed time times the full power would count too much."""
        return self._busy_w * cool_ms if self._measured_mj is None else self._measured_mj
