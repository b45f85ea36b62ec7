"""What is known of a device, the events that it takes, and the conditions and effects of the
rows of `device`, each a pure function. Temperatures are m°C, times monotonic seconds.
"""

from __future__ import annotations

from typing import NamedTuple

from switchgear.daemon.protocol import breaker as breakers
from switchgear.daemon.protocol.breaker import NEVER, Breaker
from switchgear.daemon.protocol.constants import Constants
from switchgear.daemon.protocol.reading import (
    Reading,
    Thermometer,
    Warmth,
    forgotten,
    taken,
    warmth,
)
from switchgear.daemon.protocol.table import NOTHING, Actions, RefugeFrame, Returned, Tick


class Limits(NamedTuple):
    """A device's own limits in m°C; `hard_mc` ends an INT4 trial."""

    trip_mc: int
    recover_mc: int
    hard_mc: int
    is_cpu: bool = False


class DeviceState(NamedTuple):
    """One device. `began`: a temperature was seen since the start.

    While it is open: `opened_mc` is the temperature it opened at, `good_frames` counts good
    frames in a row of the model that left, `frame_s` is when the last of its frames was,
    `refuge_heats` says that the load's new place does not let it cool. `shed` is the step of
    shedding, 0 for none, since `shed_s`.
    """

    limits: Limits
    constants: Constants
    breaker: Breaker = Breaker()
    thermometer: Thermometer = Thermometer()
    began: bool = False
    opened_mc: int | None = None
    good_frames: int = 0
    frame_s: float = NEVER
    refuge_heats: bool = False
    shed: int = 0
    shed_s: float = NEVER


class Heat(NamedTuple):
    """A reading. `elsewhere`: another device can serve what this one does."""

    reading: Reading
    elsewhere: bool


class Trip(NamedTuple):
    """A pair on this device had its slow frames while the device was warm."""

    elsewhere: bool


class Lost(NamedTuple):
    """The driver says that the device is gone."""

    what: str


class RefugeHeats(NamedTuple):
    """The device does not cool although its load left."""


def warmth_of(state: DeviceState, now_s: float) -> Warmth:
    """Where the device stands against its limits."""
    limits = state.limits
    return warmth(state.thermometer, now_s, limits.trip_mc, limits.recover_mc, state.constants)


def share_of(state: DeviceState) -> float:
    """The share of the frames that the device may be given, 0 to 1."""
    constants = state.constants
    phase = state.breaker.phase
    if phase == "closed":
        return 1.0

    if phase == "shedding":
        return 1.0 if state.limits.is_cpu else constants.shed_shares[state.shed - 1]

    if phase == "ramping":
        return constants.ramp_shares[state.breaker.ramp]

    if phase == "open" and state.refuge_heats:
        return constants.refuge_share

    return 0.0


def put(state: DeviceState, breaker: Breaker) -> DeviceState:
    if breaker.phase == "open" and state.breaker.phase != "open":
        return opened(state, breaker)

    return state._replace(breaker=breaker, refuge_heats=False)


def opened(state: DeviceState, breaker: Breaker) -> DeviceState:
    return state._replace(
        breaker=breaker,
        opened_mc=state.thermometer.temperature_mc,
        good_frames=0,
        frame_s=NEVER,
        refuge_heats=False,
        shed=0,
    )


def hold_s(state: DeviceState) -> float:
    constants = state.constants
    return constants.hold_s if state.breaker.cause == "heat" else constants.lost_hold_s


def leave(state: DeviceState, now_s: float, cause: str) -> tuple[DeviceState, Actions]:
    constants = state.constants
    breaker = breakers.opened(
        state.breaker,
        now_s,
        cause,
        constants,
        base_s=constants.hold_s if cause == "heat" else constants.lost_hold_s,
        again=state.breaker.phase in ("ramping", "half_open"),
        longest=cause == "heat" and forgotten(state.thermometer, now_s, constants),
    )
    return opened(state, breaker), NOTHING


# Readings.
def read(state: DeviceState, event: Heat, now_s: float) -> DeviceState:
    known = taken(state.thermometer, event.reading, now_s)
    return state._replace(thermometer=known, began=state.began or known.sensor)


def stored(state: DeviceState, event: Heat, now_s: float) -> tuple[DeviceState, Actions]:
    return read(state, event, now_s), NOTHING


def starts_warm(state: DeviceState, event: Heat, now_s: float) -> bool:
    if state.began or not state.constants.start_open or state.limits.is_cpu:
        return False

    known = event.reading.temperature_mc
    return known is not None and known > state.limits.recover_mc


def forecast_mc(state: DeviceState, reading: Reading) -> float | None:
    if reading.temperature_mc is None:
        return None

    rise_mc = reading.slope_mc_per_s * state.constants.shed_horizon_s
    return reading.temperature_mc + max(0.0, rise_mc)


def rises(state: DeviceState, reading: Reading) -> bool:
    """Whether the forecast is above the trip: then `Heat.elsewhere` matters."""
    expected_mc = forecast_mc(state, reading)
    return expected_mc is not None and expected_mc > state.limits.trip_mc


def will_trip(state: DeviceState, event: Heat, now_s: float) -> bool:
    return (
        state.constants.shedding
        and not state.limits.is_cpu
        and event.elsewhere
        and rises(state, event.reading)
    )


def cools(state: DeviceState, event: Heat, now_s: float) -> bool:
    expected_mc = forecast_mc(state, event.reading)
    if expected_mc is None:
        return False

    if state.limits.is_cpu:
        return expected_mc < state.limits.recover_mc

    return expected_mc < state.limits.trip_mc - state.constants.shed_exit_mc


def dwelt(state: DeviceState, now_s: float) -> bool:
    return now_s >= state.shed_s + state.constants.shed_dwell_s


def shed(state: DeviceState, event: Heat, now_s: float) -> tuple[DeviceState, Actions]:
    after = read(state, event, now_s)
    breaker = after.breaker
    if breaker.phase != "shedding":
        breaker = breaker._replace(phase="shedding", since_s=now_s, cause="heat")

    return after._replace(breaker=breaker, shed=state.shed + 1, shed_s=now_s), NOTHING


def unshed(state: DeviceState, event: Heat, now_s: float) -> tuple[DeviceState, Actions]:
    after = read(state, event, now_s)._replace(shed=state.shed - 1, shed_s=now_s)
    if after.shed == 0:
        # Not `closed()`: it never was open, so that nothing of its holds changes.
        after = after._replace(breaker=after.breaker._replace(phase="closed", since_s=now_s))

    return after, NOTHING


def blind(state: DeviceState, event: Tick, now_s: float) -> tuple[DeviceState, Actions]:
    breaker = state.breaker._replace(phase="closed", since_s=now_s)
    return state._replace(breaker=breaker, shed=0), NOTHING


def cpu_too_warm(state: DeviceState, event: Heat, now_s: float) -> bool:
    temperature_mc = event.reading.temperature_mc
    return (
        state.limits.is_cpu
        and state.constants.shedding
        and temperature_mc is not None
        and temperature_mc > state.limits.trip_mc
    )


# Open: what has to be true before it is probed.
def recovers(state: DeviceState, now_s: float) -> bool:
    if now_s < state.breaker.until_s:
        return False

    warm = warmth_of(state, now_s)
    if state.breaker.cause != "heat":
        return warm is not Warmth.ABOVE

    return warm in (Warmth.COOL, Warmth.NONE) and breakers.frames_good(
        state.breaker, state.good_frames, state.frame_s, now_s, state.constants
    )


def half_open(state: DeviceState, now_s: float) -> tuple[DeviceState, Actions]:
    after = state._replace(
        breaker=breakers.half_opened(state.breaker, now_s), refuge_heats=False
    )
    return after, NOTHING


def framed(state: DeviceState, event: RefugeFrame, now_s: float) -> DeviceState:
    good = state.good_frames + 1 if event.good else 0
    return state._replace(good_frames=good, frame_s=now_s)


def stays_warm(state: DeviceState, now_s: float) -> bool:
    known = state.thermometer
    if (
        state.refuge_heats
        or state.breaker.cause != "heat"
        or known.temperature_mc is None
        or state.opened_mc is None
        or now_s < state.breaker.since_s + state.constants.refuge_s
        or warmth_of(state, now_s) is Warmth.NONE
    ):
        return False

    return known.temperature_mc > state.opened_mc - state.constants.refuge_cooler_mc


def heats(state: DeviceState, now_s: float) -> tuple[DeviceState, Actions]:
    return state._replace(refuge_heats=True), (RefugeHeats(),)


def unread(state: DeviceState, now_s: float) -> DeviceState:
    """Temperatures and streaks of before say nothing: until it is read it counts as warm."""
    fresh = Thermometer()
    if state.thermometer.sensor:
        fresh = Thermometer(taken_s=now_s, kind="lost", sensor=True)

    return state._replace(thermometer=fresh, good_frames=0)


def returned(state: DeviceState, event: Returned, now_s: float) -> tuple[DeviceState, Actions]:
    breaker = breakers.half_opened(state.breaker, now_s, "returned")
    return unread(state, now_s)._replace(breaker=breaker, shed=0), NOTHING


def too_warm(state: DeviceState, now_s: float) -> bool:
    return warmth_of(state, now_s) is Warmth.ABOVE


def reopened(state: DeviceState, now_s: float) -> tuple[DeviceState, Actions]:
    # Not a bad probe: the hold stays as long as it was.
    breaker = state.breaker
    after = breakers.opened(
        breaker._replace(closed_s=NEVER),
        now_s,
        "heat",
        state.constants,
        base_s=state.constants.hold_s,
    )
    return opened(state, after._replace(closed_s=breaker.closed_s)), NOTHING
