"""Thermal zones as plain data: what the daemon read, in the form the profile keeps.

Standard library only. `switchgear.daemon.thermal` fills these from sysfs; the layers below it
see nothing but them. All temperatures are millidegrees Celsius, as sysfs has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Role: TypeAlias = Literal["cpu", "gpu", "npu", "skin", "other"]
ROLES: Final[tuple[Role, ...]] = ("cpu", "gpu", "npu", "skin", "other")


@dataclass(frozen=True, slots=True)
class TripPoint:
    """One trip point; `kind` is the kernel's `active`, `passive`, `hot` or `critical`.

    `temperature_mc` is None where the platform left the trip unset or stored no temperature in
    it (-274000, 0, -32768000 have all been seen); `raw_mc` is what stands in sysfs.
    """

    kind: str
    raw_mc: int
    temperature_mc: int | None
    hysteresis_mc: int = 0


@dataclass(frozen=True, slots=True)
class Zone:
    """One temperature sensor, known by what it is called and never by its number.

    `zone_id` is `type`, or `type#2` for the second zone of that type; a sensor of hwmon is
    `name/label`. `chip_wide` marks a sensor of the whole chip, which stands in for a part that
    has none of its own. `pci_address` (`dddd:bb:dd.f`) is the card that the sensor sits on,
    where it sits on one. `cooling` names the cooling devices that the kernel bound to the zone.
    """

    zone_id: str
    type: str
    role: Role
    chip_wide: bool = False
    trips: tuple[TripPoint, ...] = ()
    cooling: tuple[str, ...] = ()
    source: Literal["thermal", "hwmon"] = "thermal"
    pci_address: str = ""

    @property
    def passive_trip_mc(self) -> int | None:
        """The lowest passive trip that holds a temperature: where the kernel throttles."""
        trips = (
            trip.temperature_mc
            for trip in self.trips
            if trip.kind == "passive" and trip.temperature_mc is not None
        )
        return min(trips, default=None)


@dataclass(frozen=True, slots=True)
class Reading:
    """One try to read a zone: a temperature, or why there is none.

    Without a temperature, `errno` is the error of the read (0 where the read worked and the
    number was no temperature) and `reason` says it in words. It is never 0 C and never NaN.
    """

    zone_id: str
    temperature_mc: int | None
    reason: str = ""
    errno: int = 0


def passive_trip_mc(zones: tuple[Zone, ...]) -> int | None:
    """The lowest passive trip of a domain, or None when the kernel throttles nothing there."""
    trips = (zone.passive_trip_mc for zone in zones)
    return min((trip for trip in trips if trip is not None), default=None)
