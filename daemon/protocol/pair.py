"""The pair level: slowness, wrong numbers, unsupported, its own failures, and the INT4 trial.

It counts slow frames; the heat that they stand for belongs to the device, which a `TripDevice`
action asks to open. `step(state, event, now_s)` is pure; times are monotonic seconds.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from switchgear.daemon.protocol import pair_rules as rules
from switchgear.daemon.protocol.failures import NO_FAILURES
from switchgear.daemon.protocol.pair_state import (
    Aging,
    BeginTrial,
    EndTrial,
    Failure,
    Frame,
    PairState,
    Rest,
    Slow,
    TrialHeat,
    put,
    settled,
)
from switchgear.daemon.protocol.probing import probing_rows
from switchgear.daemon.protocol.table import (
    NOTHING,
    SAME,
    Actions,
    RefugeFrame,
    Returned,
    Row,
    Table,
)

_LIVE: Final = ("closed", "ramping")
_ANY: Final = ("closed", "ramping", "half_open", "open")
_ALL: Final = (*_ANY, "quarantined")
_BROKEN: Final = ("crash", "wrong", "unsupported")


def _hold_s(state: PairState) -> float:
    constants = state.constants
    return constants.hold_s if state.breaker.cause == "slow" else constants.failure_hold_s


TABLE: Final[Table[PairState]] = Table(
    "pair",
    [
        Row(
            _LIVE,
            Frame,
            "first use",
            lambda s, e, now_s: e.first_use,
            SAME,
            "a first frame's time is not counted",
            rules.first_use,
        ),
        Row(
            _LIVE,
            Frame,
            "a trial, slow, the second in a row",
            rules.second_slow,
            SAME,
            "the trial failed: slow frames",
            lambda s, e, now_s: rules.fail_trial(s, now_s, "two slow frames in a row"),
        ),
        Row(
            _LIVE,
            Frame,
            "a trial, slow, the first in a row",
            rules.slow_in_trial,
            SAME,
            "a slow frame in a trial",
            rules.slow_trial,
        ),
        Row(
            _LIVE,
            Frame,
            "slow, above trip, enough in a row",
            lambda s, e, now_s: (
                e.above
                and rules.slow(s, e)
                and rules.slow_streak(s, e, now_s) >= s.constants.trip_frames
            ),
            SAME,
            "slow frames while it is warm: the device is to open",
            rules.trips,
        ),
        Row(
            _LIVE,
            Frame,
            "slow, above trip",
            lambda s, e, now_s: e.above and rules.slow(s, e),
            SAME,
            "a slow frame is counted",
            rules.slower,
        ),
        Row(
            _LIVE,
            Frame,
            "otherwise",
            None,
            SAME,
            "the streak ends",
            rules.counted,
        ),
        Row(
            _LIVE,
            Aging,
            "above trip, its age makes the slow frames enough",
            lambda s, e, now_s: (
                e.above
                and rules.aged(s, e) > s.aged
                and rules.aged_streak(s, e, now_s) >= s.constants.trip_frames
            ),
            SAME,
            "a frame in flight is slow while it is warm: the device is to open",
            rules.age_trips,
        ),
        Row(
            _LIVE,
            Aging,
            "above trip, its age makes it one more slow frame",
            lambda s, e, now_s: e.above and rules.aged(s, e) > s.aged,
            SAME,
            "a frame in flight is counted",
            rules.ages,
        ),
        Row(
            _ANY,
            Failure,
            "a crash, wrong numbers, or unsupported",
            lambda s, e, now_s: e.kind in _BROKEN,
            "quarantined",
            "it does not work here",
            rules.quarantine,
        ),
        Row(
            ("ramping",),
            Failure,
            "an error or a hang",
            None,
            "open",
            "a frame failed while it ramped up",
            rules.failed_open,
        ),
        Row(
            ("closed",),
            Failure,
            "an error or a hang, enough in a row or in the window",
            rules.fails_often,
            "open",
            "its frames fail",
            rules.failed_open,
        ),
        Row(
            ("closed",),
            Failure,
            "an error or a hang",
            None,
            SAME,
            "the failure is counted",
            lambda s, e, now_s: (settled(rules.fails(s, e, now_s)), NOTHING),
        ),
        Row(
            _LIVE,
            Slow,
            "",
            None,
            "open",
            "slow frames by a client's own limits",
            lambda s, e, now_s: (rules.leave(s, now_s, "slow"), NOTHING),
        ),
        Row(
            ("open",),
            RefugeFrame,
            "",
            None,
            SAME,
            "the frame is counted",
            rules.framed,
        ),
        Row(
            ("open", "quarantined"),
            Rest,
            "the hold is over; for slowness also cool, the frames good or waived",
            rules.rested,
            "half_open",
            "the hold is over",
            lambda s, e, now_s: rules.half_open(s, now_s),
        ),
        Row(
            ("closed", "ramping"),
            BeginTrial,
            "no trial under way, or one of an earlier hold",
            lambda s, e, now_s: (
                s.trial.phase == "none"
                or (s.trial.phase == "failed" and now_s >= s.trial.until_s)
            ),
            SAME,
            "a trial begins",
            rules.begin,
        ),
        Row(
            _ALL,
            EndTrial,
            "there is a trial",
            lambda s, e, now_s: s.trial.phase != "none",
            SAME,
            "the trial ends with the opening",
            lambda s, e, now_s: (rules.end_trial(s), NOTHING),
        ),
        Row(
            _LIVE,
            TrialHeat,
            "a trial, at or above the hard limit",
            rules.over_hard,
            SAME,
            "the trial failed: too hot",
            lambda s, e, now_s: rules.fail_trial(s, now_s, "the hard limit is reached"),
        ),
        Row(
            _LIVE,
            TrialHeat,
            "its time is over, the temperature has not fallen",
            rules.not_falling,
            SAME,
            "the trial failed: it does not cool",
            lambda s, e, now_s: rules.fail_trial(s, now_s, "the temperature does not fall"),
        ),
        Row(
            _LIVE,
            TrialHeat,
            "its time is over",
            rules.trial_over,
            SAME,
            "the trial is passed",
            rules.pass_trial,
        ),
        Row(
            _ALL,
            Returned,
            "",
            None,
            SAME,
            "what was counted before says nothing",
            lambda s, e, now_s: (
                settled(s._replace(streak=0, aged=0, failures=NO_FAILURES)),
                NOTHING,
            ),
        ),
        *probing_rows(put, _hold_s),
    ],
)


def step(state: PairState, event: NamedTuple, now_s: float) -> tuple[PairState, Actions]:
    """The state after an event of `pair_state` (or `Tick`, `ProbeDone`, `Returned`) and what to
    do; the same state where nothing changes.

    A frame that is fast enough, of a pair that counts nothing, takes the short way: by the
    table it would change nothing either.
    """
    if state.quiet and type(event) is Frame and event.run_ms <= state.slow_ms:
        return state, NOTHING

    return TABLE.step(state, event, now_s)
