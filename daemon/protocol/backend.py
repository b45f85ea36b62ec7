"""The backend level: faults of one API's driver on a device.

One model that fails is that model's matter; its pair is left. The backend is left when pairs of
two models fail, or when its canary (a kernel with a known answer) fails too.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

from switchgear.daemon.protocol import breaker as breakers
from switchgear.daemon.protocol.breaker import Breaker
from switchgear.daemon.protocol.constants import Constants
from switchgear.daemon.protocol.failures import (
    NO_FAILURES,
    Failures,
    failed,
    too_many,
    went_well,
)
from switchgear.daemon.protocol.probing import probing_rows, start_probe
from switchgear.daemon.protocol.table import (
    NOTHING,
    SAME,
    Actions,
    ProbeDone,
    Returned,
    Row,
    Table,
    Tick,
)

FaultKind: TypeAlias = Literal["error", "hang", "crash"]


class BackendState(NamedTuple):
    """One backend. `crashed` is the model that crashed it last, at `crashed_s`.

    `canary`: a probe of the closed backend is wanted or under way.
    """

    constants: Constants
    breaker: Breaker = Breaker()
    failures: Failures = NO_FAILURES
    crashed: str = ""
    crashed_s: float = breakers.NEVER
    canary: bool = False


class Fault(NamedTuple):
    """A frame of a model ended in the driver's failure."""

    kind: FaultKind
    model: str


class Served(NamedTuple):
    """A frame went well; only told while failures are counted."""


class Suspect(NamedTuple):
    """A pair was left for failures: is it the model or the backend?"""


def share_of(state: BackendState) -> float:
    """The share of the frames that the backend may be given, 0 to 1."""
    if state.breaker.phase == "closed":
        return 1.0

    if state.breaker.phase == "ramping":
        return state.constants.ramp_shares[state.breaker.ramp]

    return 0.0


def _put(state: BackendState, breaker: Breaker) -> BackendState:
    return state._replace(breaker=breaker)


def _counted(state: BackendState, event: Fault, now_s: float) -> BackendState:
    failures = failed(state.failures, now_s, event.model, state.constants)
    if event.kind != "crash":
        return state._replace(failures=failures)

    return state._replace(failures=failures, crashed=event.model, crashed_s=now_s)


def _two_models(state: BackendState, event: Fault, now_s: float) -> bool:
    after = _counted(state, event, now_s).failures
    return len(after.models) > 1 and too_many(after, state.constants)


def _crash_of_another(state: BackendState, event: Fault, now_s: float) -> bool:
    return (
        event.kind == "crash"
        and state.crashed not in ("", event.model)
        and now_s - state.crashed_s <= state.constants.crash_memory_s
    )


def _open(state: BackendState, now_s: float, cause: str) -> tuple[BackendState, Actions]:
    constants = state.constants
    breaker = breakers.opened(
        state.breaker,
        now_s,
        cause,
        constants,
        base_s=constants.failure_hold_s,
        again=state.breaker.phase != "closed",
    )
    return state._replace(breaker=breaker, failures=NO_FAILURES, canary=False), NOTHING


def _mine(state: BackendState, event: ProbeDone) -> bool:
    return event.lease != 0 and event.lease == state.breaker.lease


def _canary_done(
    state: BackendState, event: ProbeDone, now_s: float
) -> tuple[BackendState, Actions]:
    breaker = breakers.probe_returned(state.breaker, now_s, good=False)
    # Given up: it is wanted still.
    return state._replace(breaker=breaker, canary=event.good is None), NOTHING


def _half_open(
    state: BackendState, now_s: float, cause: str = ""
) -> tuple[BackendState, Actions]:
    after = state._replace(
        breaker=breakers.half_opened(state.breaker, now_s, cause),
        failures=NO_FAILURES,
        canary=False,
    )
    return after, NOTHING


TABLE: Final[Table[BackendState]] = Table(
    "backend",
    [
        Row(
            ("closed",),
            Fault,
            "a crash, and another model crashed it in the last 10 minutes",
            _crash_of_another,
            "open",
            "two models crashed it",
            lambda s, e, now_s: _open(_counted(s, e, now_s), now_s, "crash"),
        ),
        Row(
            ("closed",),
            Fault,
            "enough in a row or in the window, of two models",
            _two_models,
            "open",
            "frames of two models fail",
            lambda s, e, now_s: _open(s, now_s, "failure"),
        ),
        Row(
            ("closed",),
            Fault,
            "otherwise",
            None,
            SAME,
            "the failure is counted",
            lambda s, e, now_s: (_counted(s, e, now_s), NOTHING),
        ),
        Row(
            ("ramping",),
            Fault,
            "",
            None,
            "open",
            "a frame failed while it ramped up",
            lambda s, e, now_s: _open(_counted(s, e, now_s), now_s, "failure"),
        ),
        Row(
            ("closed",),
            Served,
            "",
            None,
            SAME,
            "the streak ends",
            lambda s, e, now_s: (
                s._replace(failures=went_well(s.failures, now_s, s.constants)),
                NOTHING,
            ),
        ),
        Row(
            ("closed",),
            Suspect,
            "",
            None,
            SAME,
            "a canary is wanted",
            lambda s, e, now_s: (s._replace(canary=True), NOTHING),
        ),
        Row(
            ("closed",),
            Tick,
            "the canary's lease is over",
            lambda s, e, now_s: breakers.lease_over(s.breaker, now_s),
            "open",
            "its canary did not answer in time",
            lambda s, e, now_s: _open(s, now_s, "failure"),
        ),
        Row(
            ("closed",),
            Tick,
            "a canary is wanted and none is under way",
            lambda s, e, now_s: (
                s.canary and breakers.probe_due(s.breaker, now_s, s.constants, busy=False)
            ),
            SAME,
            "a canary starts",
            lambda s, e, now_s: start_probe(s, now_s, _put),
        ),
        Row(
            ("closed",),
            ProbeDone,
            "its lease, bad",
            lambda s, e, now_s: _mine(s, e) and e.good is False,
            "open",
            "its canary failed too",
            lambda s, e, now_s: _open(s, now_s, "failure"),
        ),
        Row(
            ("closed",),
            ProbeDone,
            "its lease, good or given up",
            lambda s, e, now_s: _mine(s, e),
            SAME,
            "the canary answered",
            _canary_done,
        ),
        Row(
            ("open",),
            Tick,
            "the hold is over",
            lambda s, e, now_s: now_s >= s.breaker.until_s,
            "half_open",
            "the hold is over",
            lambda s, e, now_s: _half_open(s, now_s),
        ),
        Row(
            ("closed", "ramping"),
            Returned,
            "",
            None,
            "half_open",
            "it came back and has not answered since",
            lambda s, e, now_s: _half_open(s, now_s, "returned"),
        ),
        *probing_rows(_put, lambda s: s.constants.failure_hold_s),
    ],
)


def step(state: BackendState, event: NamedTuple, now_s: float) -> tuple[BackendState, Actions]:
    """The state after an event (`Fault`, `Served`, `Suspect`, `Tick`, `ProbeDone`, `Returned`)
    and what to do; the same state where nothing changes."""
    return TABLE.step(state, event, now_s)
