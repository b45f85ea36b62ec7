"""One sensor's numbers made fit to decide by: a median of three, then a first-order filter."""

from __future__ import annotations

from math import exp
from typing import Final

# A block's temperature follows its load within seconds: slower would come too late, faster
# would let noise decide.
TIME_CONSTANT_S: Final = 1.0
MEDIAN_OF: Final = 3
# After a gap this long the old value says nothing about the new one.
GAP_S: Final = 10.0


class ZoneFilter:
    """The filtered temperature of one sensor. Feed it every try to read, in the order of time.

    `value_mc` is None until the first temperature, `taken_s` is when the last one was taken,
    `failing` says that the latest try gave none.
    """

    __slots__ = ("_recent", "failing", "taken_s", "value_mc")

    def __init__(self) -> None:
        self.value_mc: float | None = None
        self.taken_s = float("-inf")
        self.failing = False
        self._recent: list[int] = []

    def take(self, temperature_mc: int | None, taken_s: float) -> None:
        """One try: a temperature in m°C, or None where there was no reading."""
        if temperature_mc is None:
            self.failing = True
            return

        gap_s = taken_s - self.taken_s
        if gap_s < 0:
            # Out of order: it is older than what is known.
            return

        self.failing = False
        self.taken_s = taken_s
        if gap_s > GAP_S:
            self._recent.clear()
            self.value_mc = None

        recent = self._recent
        recent.append(temperature_mc)
        del recent[:-MEDIAN_OF]
        # Of two the older: one odd number must not pass because it came second.
        middle_mc = sorted(recent)[1] if len(recent) == MEDIAN_OF else recent[0]
        if self.value_mc is None:
            self.value_mc = float(middle_mc)
        else:
            weight = 1.0 - exp(-gap_s / TIME_CONSTANT_S)
            self.value_mc += weight * (middle_mc - self.value_mc)

    def forget(self) -> None:
        """Drops all numbers: the machine slept, or another sensor is behind the name."""
        self.value_mc = None
        self.taken_s = float("-inf")
        self.failing = False
        self._recent.clear()
