"""The device level: heat and a lost device, so that every API of a part heats and rests as one.

`step(state, event, now_s)` is pure. Temperatures are m°C, times seconds of a monotonic clock.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from switchgear.daemon.protocol import breaker as breakers
from switchgear.daemon.protocol.breaker import NEVER, Breaker
from switchgear.daemon.protocol.constants import Constants
from switchgear.daemon.protocol.probing import probing_rows
from switchgear.daemon.protocol.reading import (
    Reading,
    Thermometer,
    Warmth,
    forgotten,
    taken,
    warmth,
)
from switchgear.daemon.protocol.table import NOTHING, SAME, Actions, Returned, Row, Table, Tick


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


class RefugeFrame(NamedTuple):
    """A frame of the model that left, where it runs now, against its recover limit there."""

    good: bool


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


def _put(state: DeviceState, breaker: Breaker) -> DeviceState:
    if breaker.phase == "open" and state.breaker.phase != "open":
        return _opened(state, breaker)

    return state._replace(breaker=breaker, refuge_heats=False)


def _opened(state: DeviceState, breaker: Breaker) -> DeviceState:
    return state._replace(
        breaker=breaker,
        opened_mc=state.thermometer.temperature_mc,
        good_frames=0,
        frame_s=NEVER,
        refuge_heats=False,
        shed=0,
    )


def _hold_s(state: DeviceState) -> float:
    constants = state.constants
    return constants.hold_s if state.breaker.cause == "heat" else constants.failure_hold_s


def _open(state: DeviceState, now_s: float, cause: str) -> tuple[DeviceState, Actions]:
    constants = state.constants
    breaker = breakers.opened(
        state.breaker,
        now_s,
        cause,
        constants,
        base_s=constants.hold_s if cause == "heat" else constants.failure_hold_s,
        again=state.breaker.phase in ("ramping", "half_open"),
        longest=cause == "heat" and forgotten(state.thermometer, now_s, constants),
    )
    return _opened(state, breaker), NOTHING


# Readings.
def _read(state: DeviceState, event: Heat, now_s: float) -> DeviceState:
    known = taken(state.thermometer, event.reading, now_s)
    return state._replace(thermometer=known, began=state.began or known.sensor)


def _stored(state: DeviceState, event: Heat, now_s: float) -> tuple[DeviceState, Actions]:
    return _read(state, event, now_s), NOTHING


def _starts_warm(state: DeviceState, event: Heat, now_s: float) -> bool:
    if state.began or not state.constants.start_open or state.limits.is_cpu:
        return False

    known = event.reading.temperature_mc
    return known is not None and known > state.limits.recover_mc


def _forecast_mc(state: DeviceState, reading: Reading) -> float | None:
    if reading.temperature_mc is None:
        return None

    rise_mc = reading.slope_mc_per_s * state.constants.shed_horizon_s
    return reading.temperature_mc + max(0.0, rise_mc)


def rises(state: DeviceState, reading: Reading) -> bool:
    """Whether the forecast is above the trip: then `Heat.elsewhere` matters."""
    forecast_mc = _forecast_mc(state, reading)
    return forecast_mc is not None and forecast_mc > state.limits.trip_mc


def _will_trip(state: DeviceState, event: Heat, now_s: float) -> bool:
    return (
        state.constants.shedding
        and not state.limits.is_cpu
        and event.elsewhere
        and rises(state, event.reading)
    )


def _cools(state: DeviceState, event: Heat, now_s: float) -> bool:
    forecast_mc = _forecast_mc(state, event.reading)
    if forecast_mc is None:
        return False

    if state.limits.is_cpu:
        return forecast_mc < state.limits.recover_mc

    return forecast_mc < state.limits.trip_mc - state.constants.shed_exit_mc


def _dwelt(state: DeviceState, now_s: float) -> bool:
    return now_s >= state.shed_s + state.constants.shed_dwell_s


def _shed(state: DeviceState, event: Heat, now_s: float) -> tuple[DeviceState, Actions]:
    after = _read(state, event, now_s)
    breaker = after.breaker
    if breaker.phase != "shedding":
        breaker = breaker._replace(phase="shedding", since_s=now_s, cause="heat")

    return after._replace(breaker=breaker, shed=state.shed + 1, shed_s=now_s), NOTHING


def _unshed(state: DeviceState, event: Heat, now_s: float) -> tuple[DeviceState, Actions]:
    after = _read(state, event, now_s)._replace(shed=state.shed - 1, shed_s=now_s)
    if after.shed == 0:
        # Not `closed()`: it never was open, so that nothing of its holds changes.
        after = after._replace(breaker=after.breaker._replace(phase="closed", since_s=now_s))

    return after, NOTHING


def _blind(state: DeviceState, event: Tick, now_s: float) -> tuple[DeviceState, Actions]:
    breaker = state.breaker._replace(phase="closed", since_s=now_s)
    return state._replace(breaker=breaker, shed=0), NOTHING


def _cpu_too_warm(state: DeviceState, event: Heat, now_s: float) -> bool:
    temperature_mc = event.reading.temperature_mc
    return (
        state.limits.is_cpu
        and state.constants.shedding
        and temperature_mc is not None
        and temperature_mc > state.limits.trip_mc
    )


# Open: what has to be true before it is probed.
def _recovers(state: DeviceState, now_s: float) -> bool:
    if now_s < state.breaker.until_s:
        return False

    warm = warmth_of(state, now_s)
    if state.breaker.cause != "heat":
        return warm is not Warmth.ABOVE

    return warm in (Warmth.COOL, Warmth.NONE) and breakers.frames_good(
        state.breaker, state.good_frames, state.frame_s, now_s, state.constants
    )


def _half_open(state: DeviceState, now_s: float) -> tuple[DeviceState, Actions]:
    after = state._replace(
        breaker=breakers.half_opened(state.breaker, now_s), refuge_heats=False
    )
    return after, NOTHING


def _framed(state: DeviceState, event: RefugeFrame, now_s: float) -> DeviceState:
    good = state.good_frames + 1 if event.good else 0
    return state._replace(good_frames=good, frame_s=now_s)


def _stays_warm(state: DeviceState, now_s: float) -> bool:
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


def _heats(state: DeviceState, now_s: float) -> tuple[DeviceState, Actions]:
    return state._replace(refuge_heats=True), (RefugeHeats(),)


def _unread(state: DeviceState, now_s: float) -> DeviceState:
    """Temperatures and streaks of before say nothing: until it is read it counts as warm."""
    fresh = Thermometer()
    if state.thermometer.sensor:
        fresh = Thermometer(taken_s=now_s, kind="lost", sensor=True)

    return state._replace(thermometer=fresh, good_frames=0)


def _returned(state: DeviceState, event: Returned, now_s: float) -> tuple[DeviceState, Actions]:
    breaker = breakers.half_opened(state.breaker, now_s, "returned")
    return _unread(state, now_s)._replace(breaker=breaker, shed=0), NOTHING


def _too_warm(state: DeviceState, now_s: float) -> bool:
    return warmth_of(state, now_s) is Warmth.ABOVE


_LIVE: Final = ("closed", "shedding", "ramping")

TABLE: Final[Table[DeviceState]] = Table(
    "device",
    [
        Row(
            ("closed",),
            Heat,
            "the first temperature, above recover, no CPU",
            _starts_warm,
            "open",
            "it is warm at the start",
            lambda s, e, now_s: _open(_read(s, e, now_s), now_s, "heat"),
        ),
        Row(
            ("closed",),
            Heat,
            "the forecast is above trip, no CPU, another device can serve",
            _will_trip,
            "shedding",
            "the temperature rises towards the trip",
            _shed,
        ),
        Row(
            ("closed",),
            Heat,
            "the CPU is above its trip",
            _cpu_too_warm,
            "shedding",
            "the CPU is too warm: lower priorities wait",
            _shed,
        ),
        Row(
            ("shedding",),
            Heat,
            "the dwell is over, the forecast is above trip, a step is left",
            lambda s, e, now_s: (
                _dwelt(s, now_s)
                and _will_trip(s, e, now_s)
                and s.shed < len(s.constants.shed_shares)
            ),
            SAME,
            "the temperature still rises towards the trip",
            _shed,
        ),
        Row(
            ("shedding",),
            Heat,
            "the dwell is over, below the exit band, the first step",
            lambda s, e, now_s: _dwelt(s, now_s) and _cools(s, e, now_s) and s.shed == 1,
            "closed",
            "the temperature is below the exit band",
            _unshed,
        ),
        Row(
            ("shedding",),
            Heat,
            "the dwell is over, below the exit band, a later step",
            lambda s, e, now_s: _dwelt(s, now_s) and _cools(s, e, now_s),
            SAME,
            "the temperature is below the exit band",
            _unshed,
        ),
        Row(
            ("shedding",),
            Tick,
            "no reading for 5 minutes",
            lambda s, e, now_s: warmth_of(s, now_s) is Warmth.NONE,
            "closed",
            "without a sensor latency alone decides",
            _blind,
        ),
        Row(
            ("half_open",),
            Heat,
            "above trip",
            lambda s, e, now_s: _too_warm(_read(s, e, now_s), now_s),
            "open",
            "it is above its trip again",
            lambda s, e, now_s: _reopened(_read(s, e, now_s), now_s),
        ),
        Row(
            ("open",),
            Heat,
            "the hold over, cool, the frames good or waived",
            lambda s, e, now_s: _recovers(_read(s, e, now_s), now_s),
            "half_open",
            "cool, and the frames are good",
            lambda s, e, now_s: _half_open(_read(s, e, now_s), now_s),
        ),
        Row(
            ("open",),
            Heat,
            "120 s after the load left, not 3 °C cooler",
            lambda s, e, now_s: _stays_warm(_read(s, e, now_s), now_s),
            SAME,
            "its refuge does not let it cool",
            lambda s, e, now_s: _heats(_read(s, e, now_s), now_s),
        ),
        Row(
            ("closed", "shedding", "open", "half_open", "ramping"),
            Heat,
            "otherwise",
            None,
            SAME,
            "the reading is kept",
            _stored,
        ),
        Row(
            _LIVE,
            Trip,
            "no CPU, another device can serve",
            lambda s, e, now_s: e.elsewhere and not s.limits.is_cpu,
            "open",
            "slow frames while it was warm",
            lambda s, e, now_s: _open(s, now_s, "heat"),
        ),
        Row(
            ("closed", "shedding", "half_open", "ramping"),
            Lost,
            "no CPU",
            lambda s, e, now_s: not s.limits.is_cpu,
            "open",
            "the device is lost",
            lambda s, e, now_s: _open(s, now_s, "lost"),
        ),
        Row(
            ("open",),
            RefugeFrame,
            "with it the frames are good, the hold over, cool",
            lambda s, e, now_s: _recovers(_framed(s, e, now_s), now_s),
            "half_open",
            "cool, and the frames are good",
            lambda s, e, now_s: _half_open(_framed(s, e, now_s), now_s),
        ),
        Row(
            ("open",),
            RefugeFrame,
            "otherwise",
            None,
            SAME,
            "the frame is counted",
            lambda s, e, now_s: (_framed(s, e, now_s), NOTHING),
        ),
        Row(
            ("open",),
            Tick,
            "the hold over, cool, the frames good or waived",
            lambda s, e, now_s: _recovers(s, now_s),
            "half_open",
            "cool, and the frames are good",
            lambda s, e, now_s: _half_open(s, now_s),
        ),
        Row(
            ("open",),
            Tick,
            "120 s after the load left, not 3 °C cooler",
            lambda s, e, now_s: _stays_warm(s, now_s),
            SAME,
            "its refuge does not let it cool",
            lambda s, e, now_s: _heats(s, now_s),
        ),
        Row(
            ("open", "half_open"),
            Returned,
            "",
            None,
            SAME,
            "the temperature of before says nothing",
            lambda s, e, now_s: (_unread(s, now_s), NOTHING),
        ),
        Row(
            _LIVE,
            Returned,
            "no CPU",
            lambda s, e, now_s: not s.limits.is_cpu,
            "half_open",
            "it came back and has not answered since",
            _returned,
        ),
        *probing_rows(_put, _hold_s, too_warm=_too_warm),
    ],
)


def _reopened(state: DeviceState, now_s: float) -> tuple[DeviceState, Actions]:
    # Not a bad probe: the hold stays as long as it was.
    breaker = state.breaker
    after = breakers.opened(
        breaker._replace(closed_s=NEVER),
        now_s,
        "heat",
        state.constants,
        base_s=state.constants.hold_s,
    )
    return _opened(state, after._replace(closed_s=breaker.closed_s)), NOTHING


def step(state: DeviceState, event: NamedTuple, now_s: float) -> tuple[DeviceState, Actions]:
    """The state after an event (`Heat`, `Trip`, `Lost`, `RefugeFrame`, `Tick`, `ProbeDone`,
    `Returned`) and what to do; the same state where nothing changes."""
    return TABLE.step(state, event, now_s)
