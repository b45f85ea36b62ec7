"""Tells from two clocks that the machine slept: CLOCK_MONOTONIC stands still meanwhile."""

from __future__ import annotations

from typing import Final

# More than the two clocks are read apart, less than any sleep that a device notices.
SLEPT_S: Final = 0.5


class SuspendWatch:
    """Feed it both clocks, read one after the other."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None

    def slept_s(self, monotonic_ns: int, boottime_ns: int) -> float:
        """For how long the machine slept since the last call; 0.0 where it did not."""
        ahead_s = (boottime_ns - monotonic_ns) / 1e9
        before_s, self._ahead_s = self._ahead_s, ahead_s
        if before_s is None or ahead_s - before_s < SLEPT_S:
            return 0.0

        return ahead_s - before_s
