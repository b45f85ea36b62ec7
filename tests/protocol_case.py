"""What a case of the transition tables is made of: states of each level, and an event."""

from __future__ import annotations

from typing import Any, NamedTuple

from switchgear.daemon.protocol import backend, device, pair
from switchgear.daemon.protocol.backend import BackendState
from switchgear.daemon.protocol.breaker import Breaker, Phase
from switchgear.daemon.protocol.constants import Constants, report
from switchgear.daemon.protocol.device_rules import (
    DeviceState,
    Heat,
    Limits,
)
from switchgear.daemon.protocol.pair_state import (
    Frame,
    PairState,
)
from switchgear.daemon.protocol.reading import Reading, Thermometer
from switchgear.daemon.protocol.table import (
    Table,
)

NOW = 10_000.0
DEFAULT = Constants()
REPORT = report()
LIMITS = Limits(65_000, 58_000, 80_000)
CPU = LIMITS._replace(is_cpu=True)
TABLES: dict[str, Table[Any]] = {
    "device": device.TABLE,
    "backend": backend.TABLE,
    "pair": pair.TABLE,
}


class Case(NamedTuple):
    """A state of `level` and an event that take the row with `guard`; `to` is the phase after.

    `actions` are the types of the actions besides the transition.
    """

    level: str
    guard: str
    state: Any
    event: NamedTuple
    to: str
    actions: tuple[type, ...] = ()
    now_s: float = NOW


def breaker(phase: Phase, **changes: Any) -> Breaker:
    """A breaker that came to its phase a second ago, and whose hold is over."""
    base = Breaker(7, phase, since_s=NOW - 1, until_s=NOW - 1, cause="heat")
    return base._replace(**changes)


def measured(celsius: float, **changes: Any) -> Thermometer:
    known = Thermometer(round(celsius * 1000), NOW, "measured", 0.0, sensor=True)
    return known._replace(**changes)


def dev(phase: Phase, celsius: float = 50.0, **changes: Any) -> DeviceState:
    base = DeviceState(
        LIMITS, DEFAULT, breaker(phase), measured(celsius), began=True, opened_mc=70_000
    )
    return base._replace(**changes)


def back(phase: Phase, **changes: Any) -> BackendState:
    return BackendState(DEFAULT, breaker(phase, cause="failure"))._replace(**changes)


def a_pair(phase: Phase, **changes: Any) -> PairState:
    base = PairState(DEFAULT, "m", 200.0, breaker=breaker(phase, cause="failure"))
    return base._replace(**changes)


def heat(celsius: float, *, slope: float = 0.0, elsewhere: bool = True) -> Heat:
    return Heat(Reading(round(celsius * 1000), "measured", 0.0, slope), elsewhere)


def slow(ms: float = 250.0) -> Frame:
    return Frame(ms, above=True, learns=False)
