"""Finds sensors that always say the same although the chip around them warms and cools."""

from __future__ import annotations

from statistics import median
from typing import Final

# Whole degrees may stay for minutes; a block beside others that move by 5 °C does not.
UNCHANGED_S: Final = 300.0
MOVED_MC: Final = 5_000
SAMPLE_S: Final = 10.0


class StuckSensors:
    """Watches the sensors of one chip. Feed it every temperature of each.

    What moves is told from the median of those sensors that changed lately.
    """

    def __init__(self) -> None:
        self._values: dict[str, tuple[int, float]] = {}
        # The median over time, one every 10 s, over as long as a sensor may be unchanged.
        self._middles: list[tuple[float, float]] = []

    def take(self, zone_id: str, temperature_mc: int, at_s: float) -> bool:
        """One temperature; True where the sensor is stuck."""
        known = self._values.get(zone_id)
        if known is None or known[0] != temperature_mc:
            self._values[zone_id] = (temperature_mc, at_s)
            self._sample(at_s)
            return False

        self._sample(at_s)
        since_s = known[1]
        if at_s - since_s < UNCHANGED_S:
            return False

        middles = [value for sampled_s, value in self._middles if sampled_s >= since_s]
        return len(middles) > 1 and max(middles) - min(middles) >= MOVED_MC

    def forget(self) -> None:
        self._values.clear()
        self._middles.clear()

    def _sample(self, at_s: float) -> None:
        if self._middles and at_s < self._middles[-1][0] + SAMPLE_S:
            return

        live = [
            value for value, since_s in self._values.values() if at_s - since_s < UNCHANGED_S
        ]
        if not live:
            return

        self._middles.append((at_s, median(live)))
        oldest_s = min(since_s for _, since_s in self._values.values())
        oldest_s = max(oldest_s, at_s - 4 * UNCHANGED_S)
        self._middles = [entry for entry in self._middles if entry[0] >= oldest_s]
