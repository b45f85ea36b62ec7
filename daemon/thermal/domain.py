"""A device's thermal domain: its sensors, put together to the one reading that decides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from switchgear.daemon.protocol.constants import Constants
from switchgear.daemon.protocol.reading import NO_SENSOR, Reading
from switchgear.daemon.thermal.filter import ZoneFilter
from switchgear.daemon.thermal.forecast import Slope

# A temperature older than this is held, whatever the last try said: no try came.
MEASURED_S: Final = 2.0
# The last temperature of sensors that fail is given for so long; then they are lost.
HELD_S: Final = Constants().sensor_hold_s


class Domain:
    """The sensors of one device; the hottest that answers counts.

    `shared`: they are another part's, or the whole chip's, so that a reading is an estimate.
    Times are monotonic seconds. Nothing here blocks.
    """

    def __init__(self, zones: Iterable[str], *, shared: bool = False) -> None:
        self._filters = {zone_id: ZoneFilter() for zone_id in zones}
        self._shared = shared
        self._slope = Slope()

    @property
    def zones(self) -> frozenset[str]:
        return frozenset(self._filters)

    def take(self, zone_id: str, temperature_mc: int | None, taken_s: float) -> None:
        """One try to read a sensor, None where it gave no temperature; others' are ignored."""
        known = self._filters.get(zone_id)
        if known is None:
            return

        known.take(temperature_mc, taken_s)
        if temperature_mc is not None:
            hottest = self._hottest(taken_s)
            if hottest is not None and hottest.value_mc is not None:
                self._slope.take(hottest.value_mc, taken_s)

    def reading(self, now_s: float) -> Reading:
        """What is known of the temperature now: measured, held, estimated, none or lost.

        Without any sensor that ever answered it is `none`; without one for 10 s, `lost`.
        """
        hottest = self._hottest(now_s)
        if hottest is not None and hottest.value_mc is not None:
            age_s = max(0.0, now_s - hottest.taken_s)
            temperature_mc = round(hottest.value_mc)
            if hottest.failing or age_s > MEASURED_S:
                return Reading(temperature_mc, "held", age_s * 1000)

            return Reading(
                temperature_mc,
                "estimated" if self._shared else "measured",
                age_s * 1000,
                self._slope.mc_per_s,
            )

        taken = [
            known.taken_s for known in self._filters.values() if known.value_mc is not None
        ]
        if not taken:
            return NO_SENSOR

        return Reading(None, "lost", (now_s - max(taken)) * 1000)

    def forget(self) -> None:
        """Drops numbers, not the knowledge of sensors: the machine slept."""
        for known in self._filters.values():
            known.forget()

        self._slope.forget()

    def _hottest(self, now_s: float) -> ZoneFilter | None:
        """The hottest of those that answer, else of those that did in the last 10 s."""
        best: ZoneFilter | None = None
        best_key = (False, 0.0)
        for known in self._filters.values():
            age_s = now_s - known.taken_s
            if known.value_mc is None or age_s > HELD_S:
                continue

            key = (not known.failing and age_s <= MEASURED_S, known.value_mc)
            if best is None or key > best_key:
                best, best_key = known, key

        return best
