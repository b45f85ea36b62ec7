"""How fast a temperature changes, and how long until it reaches a limit."""

from __future__ import annotations

from collections import deque
from typing import Final

# Long enough that half a degree of noise is below 0.1 °C a second, short enough to follow a
# block whose time constant is some seconds.
WINDOW_S: Final = 8.0
# Numbers within one step are averaged: fast polling adds no points.
STEP_S: Final = 0.25
# Below this span a slope is noise.
LEAST_SPAN_S: Final = 2.0


class Slope:
    """A least-squares slope over the last 8 s. Feed it temperatures in the order of time."""

    def __init__(self) -> None:
        # Of each step: the sum of the times, the sum of the temperatures, the count.
        self._points: deque[tuple[float, float, int]] = deque()
        self._step = -1
        self._slope_mc_per_s: float | None = 0.0

    def take(self, temperature_mc: float, at_s: float) -> None:
        """One temperature in m°C."""
        step = int(at_s / STEP_S)
        points = self._points
        if points and step == self._step:
            times_s, sum_mc, count = points[-1]
            points[-1] = (times_s + at_s, sum_mc + temperature_mc, count + 1)
        else:
            points.append((at_s, temperature_mc, 1))
            self._step = step

        while points[0][0] / points[0][2] < at_s - WINDOW_S:
            points.popleft()

        self._slope_mc_per_s = None

    def forget(self) -> None:
        self._points.clear()
        self._step = -1
        self._slope_mc_per_s = 0.0

    @property
    def mc_per_s(self) -> float:
        """The slope in m°C a second; 0.0 while too little is known."""
        if self._slope_mc_per_s is None:
            self._slope_mc_per_s = self._fit()

        return self._slope_mc_per_s

    def _fit(self) -> float:
        means = [(times_s / n, sum_mc / n) for times_s, sum_mc, n in self._points]
        if len(means) < 3 or means[-1][0] - means[0][0] < LEAST_SPAN_S:
            return 0.0

        middle_s = sum(at_s for at_s, _ in means) / len(means)
        middle_mc = sum(value_mc for _, value_mc in means) / len(means)
        spread = sum((at_s - middle_s) ** 2 for at_s, _ in means)
        return sum((at_s - middle_s) * (value - middle_mc) for at_s, value in means) / spread


def forecast_mc(temperature_mc: float, slope_mc_per_s: float, horizon_s: float) -> float:
    """The temperature in `horizon_s` if it goes on like this."""
    return temperature_mc + slope_mc_per_s * horizon_s


def headroom_s(temperature_mc: float, slope_mc_per_s: float, limit_mc: float) -> float:
    """Seconds until the limit is reached: 0 at or above it, infinite while it does not rise."""
    if temperature_mc >= limit_mc:
        return 0.0

    if slope_mc_per_s <= 0:
        return float("inf")

    return (limit_mc - temperature_mc) / slope_mc_per_s
