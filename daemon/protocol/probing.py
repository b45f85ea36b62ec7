"""The rows that every level has: probes with a lease, the ramp, and a hold that halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from switchgear.daemon.protocol import breaker as breakers
from switchgear.daemon.protocol.table import (
    NOTHING,
    SAME,
    Actions,
    ProbeDone,
    Row,
    StartProbe,
    Tick,
)

if TYPE_CHECKING:
    from switchgear.daemon.protocol.breaker import Breaker
    from switchgear.daemon.protocol.constants import Constants


class Probed(Protocol):
    """A state of any level that is probed."""

    @property
    def breaker(self) -> Breaker: ...

    @property
    def constants(self) -> Constants: ...


S = TypeVar("S", bound=Probed)
Put = Callable[[S, "Breaker"], S]


def start_probe(state: S, now_s: float, put: Put[S]) -> tuple[S, Actions]:
    """Leases one probe."""
    started = breakers.probe_started(state.breaker, now_s, state.constants)
    return put(state, started), (StartProbe(started.lease, started.lease_until_s),)


def probing_rows(
    put: Put[S],
    hold_s: Callable[[S], float],
    *,
    too_warm: Callable[[S, float], bool] | None = None,
) -> list[Row[S]]:
    """`put` replaces a state's breaker, `hold_s` is its shortest hold.

    `too_warm` keeps a level from being trusted again in spite of good probes.
    """

    def again(state: S, event: Any, now_s: float) -> tuple[S, Actions]:
        after = breakers.opened(
            state.breaker,
            now_s,
            state.breaker.cause,
            state.constants,
            base_s=hold_s(state),
            again=True,
        )
        return put(state, after), NOTHING

    def warm(state: S, event: ProbeDone, now_s: float) -> tuple[S, Actions]:
        # It worked, and it may not be used: the next hold is not longer for it.
        unchanged = state.breaker._replace(closed_s=breakers.NEVER)
        after = breakers.opened(
            unchanged, now_s, state.breaker.cause, state.constants, base_s=hold_s(state)
        )
        return put(state, after._replace(closed_s=state.breaker.closed_s)), NOTHING

    def returned(state: S, event: ProbeDone, now_s: float) -> tuple[S, Actions]:
        good = event.good is True
        return put(state, breakers.probe_returned(state.breaker, now_s, good=good)), NOTHING

    def proven(state: S, event: ProbeDone, now_s: float) -> tuple[S, Actions]:
        return put(state, breakers.proven(state.breaker, now_s, state.constants)), NOTHING

    def mine(state: S, event: ProbeDone) -> bool:
        return event.lease != 0 and event.lease == state.breaker.lease

    def is_last(state: S, event: ProbeDone, now_s: float) -> bool:
        return mine(state, event) and breakers.last_probe(state.breaker, state.constants)

    def is_too_warm(state: S, event: ProbeDone, now_s: float) -> bool:
        return too_warm is not None and mine(state, event) and too_warm(state, now_s)

    def has_ramp(state: S) -> bool:
        return bool(state.constants.ramp_shares)

    # Only a device can be too warm, and only a device sheds.
    warm_rows: list[Row[S]] = []
    if too_warm is not None:
        warm_rows = [
            Row(
                ("half_open",),
                ProbeDone,
                "its lease, good, too warm",
                is_too_warm,
                "open",
                "the probes are good, but it is too warm again",
                warm,
            )
        ]

    return [
        Row(
            ("half_open",),
            Tick,
            "the probe's lease is over",
            lambda s, e, now_s: breakers.lease_over(s.breaker, now_s),
            "open",
            "a probe did not answer in time",
            again,
        ),
        Row(
            ("half_open",),
            Tick,
            "no probe under way, the gap over, the device idle or waited for",
            lambda s, e, now_s: breakers.probe_due(s.breaker, now_s, s.constants, busy=e.busy),
            SAME,
            "a probe starts",
            lambda s, e, now_s: start_probe(s, now_s, put),
        ),
        Row(
            ("half_open",),
            ProbeDone,
            "its lease, bad",
            lambda s, e, now_s: mine(s, e) and e.good is False,
            "open",
            "a probe was bad",
            again,
        ),
        Row(
            ("half_open",),
            ProbeDone,
            "its lease, given up",
            lambda s, e, now_s: mine(s, e) and e.good is None,
            SAME,
            "the probe is given back",
            returned,
        ),
        *warm_rows,
        Row(
            ("half_open",),
            ProbeDone,
            "its lease, good, the last one, there is a ramp",
            lambda s, e, now_s: is_last(s, e, now_s) and has_ramp(s),
            "ramping",
            "enough good probes",
            proven,
        ),
        Row(
            ("half_open",),
            ProbeDone,
            "its lease, good, the last one, there is no ramp",
            is_last,
            "closed",
            "a good probe",
            proven,
        ),
        Row(
            ("half_open",),
            ProbeDone,
            "its lease, good, not the last one",
            lambda s, e, now_s: mine(s, e),
            SAME,
            "a good probe",
            returned,
        ),
        Row(
            ("ramping",),
            Tick,
            "the last step is over",
            lambda s, e, now_s: (
                breakers.ramp_over(s.breaker, now_s, s.constants)
                and breakers.last_ramp(s.breaker, s.constants)
            ),
            "closed",
            "all live frames went well",
            lambda s, e, now_s: (put(s, breakers.closed(s.breaker, now_s)), NOTHING),
        ),
        Row(
            ("ramping",),
            Tick,
            "a step is over, not the last one",
            lambda s, e, now_s: breakers.ramp_over(s.breaker, now_s, s.constants),
            SAME,
            "more live frames",
            lambda s, e, now_s: (put(s, breakers.ramped(s.breaker, now_s)), NOTHING),
        ),
        Row(
            ("closed",) if too_warm is None else ("closed", "shedding"),
            Tick,
            "a hold level is left and 10 minutes are over",
            lambda s, e, now_s: breakers.stable(s.breaker, now_s, s.constants),
            SAME,
            "stable: the next hold is half as long",
            lambda s, e, now_s: (put(s, breakers.halved(s.breaker, now_s)), NOTHING),
        ),
    ]
