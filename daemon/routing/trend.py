"""A temperature and where it is going, from noisy readings."""

from __future__ import annotations

from math import exp
from typing import Final

# The protocol's filter (DESIGN section 7).
FILTER_S: Final = 1.0
# A second, slower filter; the difference of the two is the slope. Long enough that 0.4 C of
# noise, read ten times a second, makes 0.01 C/s.
SLOPE_S: Final = 10.0


class Trend:
    """Two first-order filters of one sensor: `temperature_c` and `slope_c_per_s`."""

    __slots__ = ("_at_s", "_slow_c", "temperature_c")

    def __init__(self) -> None:
        self.temperature_c = 0.0
        self._slow_c = 0.0
        self._at_s: float | None = None

    def read(self, temperature_c: float, now_s: float) -> None:
        """A reading taken at `now_s`, which never goes back."""
        if self._at_s is None:
            self.temperature_c = self._slow_c = temperature_c
        else:
            passed_s = now_s - self._at_s
            self.temperature_c += (temperature_c - self.temperature_c) * (
                1.0 - exp(-passed_s / FILTER_S)
            )
            self._slow_c += (temperature_c - self._slow_c) * (1.0 - exp(-passed_s / SLOPE_S))

        self._at_s = now_s

    def forget(self) -> None:
        """Drops what was read: the next reading starts anew."""
        self._at_s = None

    @property
    def slope_c_per_s(self) -> float:
        """0 before the first reading. On a steady ramp the filters are apart by slope times the
        difference of their time constants."""
        if self._at_s is None:
            return 0.0

        return (self.temperature_c - self._slow_c) / (SLOPE_S - FILTER_S)
