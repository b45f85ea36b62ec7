"""How far the device's case is from its limit: all parts heat it, and a hand holds it."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from switchgear.daemon.protocol.constants import Constants
from switchgear.daemon.thermal.watch import DeviceSensors
from switchgear.fingerprints.zones_model import passive_trip_mc

if TYPE_CHECKING:
    from collections.abc import Mapping

    from switchgear.daemon.protocol.reading import Reading
    from switchgear.fingerprints.zones_model import Zone

# What it is called among the devices that are followed.
CASE: Final = "skin"
# Sensors that were lost count as at their last temperature for so long, then as none; as the
# protocol's own do.
LOST_MS: Final = 1000 * (Constants().sensor_hold_s + Constants().sensor_warm_s)


class Case:
    """The zones of role `skin` that the kernel throttles by, and the headroom they leave."""

    def __init__(self) -> None:
        self._limit_mc: int | None = None
        self._headroom_c = inf

    def sensors(self, zones: tuple[Zone, ...]) -> Mapping[str, DeviceSensors]:
        """What to follow, under CASE; nothing where no such zone has a passive trip."""
        skin = tuple(zone for zone in zones if zone.role == "skin")
        self._limit_mc = passive_trip_mc(skin)
        if self._limit_mc is None:
            self._headroom_c = inf
            return {}

        ids = tuple(zone.zone_id for zone in skin)
        return {CASE: DeviceSensors(ids, self._limit_mc)}

    def headroom_c(self, reading: Reading) -> float:
        """To the lowest passive trip, in C; infinite where there is none or no reading."""
        if self._limit_mc is None:
            return inf

        if reading.temperature_mc is not None:
            self._headroom_c = (self._limit_mc - reading.temperature_mc) / 1000
        elif reading.kind != "lost" or reading.age_ms > LOST_MS:
            self._headroom_c = inf

        return self._headroom_c
