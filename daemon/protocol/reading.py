"""A temperature as the protocol takes it, and what it says of a device's limits."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from switchgear.daemon.protocol.constants import Constants

ReadingKind: TypeAlias = Literal["measured", "held", "estimated", "none", "lost"]


class Reading(NamedTuple):
    """The temperature of a device's domain, in m°C.

    `measured` came from the sensor `age_ms` ago, `held` is the last one of a sensor that fails,
    `estimated` is inferred. `none`: there has never been a sensor; `lost`: there was one.
    `slope_mc_per_s` is how fast it changes.
    """

    temperature_mc: int | None
    kind: ReadingKind = "measured"
    age_ms: float = 0.0
    slope_mc_per_s: float = 0.0


NO_SENSOR: Final = Reading(None, "none")


class Warmth(IntEnum):
    """A temperature against a device's limits. Without a reading it is never `COOL`."""

    COOL = 0  # below recover
    BETWEEN = 1  # from recover to trip
    ABOVE = 2  # above trip, or a sensor lost a short while ago
    NONE = 3  # no sensor: latency and hold decide


class Thermometer(NamedTuple):
    """What is known of a device's temperature. `taken_s` is when the last good one was taken.

    `sensor` turns True with the first temperature and stays so.
    """

    temperature_mc: int | None = None
    taken_s: float = float("-inf")
    kind: ReadingKind = "none"
    slope_mc_per_s: float = 0.0
    sensor: bool = False


def taken(known: Thermometer, reading: Reading, now_s: float) -> Thermometer:
    """The thermometer after a reading; one without a temperature keeps the last good one."""
    if reading.temperature_mc is None:
        kind: ReadingKind = "lost" if known.sensor or reading.kind == "lost" else "none"
        since_s = known.taken_s
        if kind == "lost" and not known.sensor:
            # Lost before it was ever read here: it counts from now.
            since_s = now_s - reading.age_ms / 1000

        return Thermometer(known.temperature_mc, since_s, kind, 0.0, kind == "lost")

    return Thermometer(
        reading.temperature_mc,
        now_s - reading.age_ms / 1000,
        reading.kind,
        reading.slope_mc_per_s,
        sensor=True,
    )


def warmth(
    known: Thermometer, now_s: float, trip_mc: int, recover_mc: int, constants: Constants
) -> Warmth:
    """Where the device stands. A lost sensor holds its last temperature for a while, then
    counts as too warm, then as none; never as cool."""
    if not known.sensor:
        return Warmth.NONE

    age_s = now_s - known.taken_s
    temperature_mc = known.temperature_mc
    if age_s > constants.sensor_hold_s or temperature_mc is None:
        warm_s = constants.sensor_hold_s + constants.sensor_warm_s
        return Warmth.ABOVE if age_s <= warm_s else Warmth.NONE

    if temperature_mc > trip_mc:
        return Warmth.ABOVE

    return Warmth.COOL if temperature_mc < recover_mc else Warmth.BETWEEN


def forgotten(known: Thermometer, now_s: float, constants: Constants) -> bool:
    """Whether there was a sensor and it has been silent for so long that it counts as none."""
    silent_s = constants.sensor_hold_s + constants.sensor_warm_s
    return known.sensor and now_s - known.taken_s > silent_s
