"""The cases of the pair level's rows."""

from __future__ import annotations

from typing import Any

from protocol_case import NOW, Case, a_pair, slow

from switchgear.daemon.protocol.breaker import Phase
from switchgear.daemon.protocol.failures import Bucket, Failures
from switchgear.daemon.protocol.pair_state import (
    Aging,
    BeginTrial,
    EndTrial,
    Failure,
    Faulted,
    Frame,
    Rest,
    Slow,
    Trial,
    TrialChanged,
    TrialHeat,
    TripDevice,
)
from switchgear.daemon.protocol.table import (
    RefugeFrame,
    Returned,
)


def pair_cases() -> list[Case]:
    two = {"streak": 2, "streak_s": NOW - 1}
    one_slow = Trial("running", NOW + 10, 70_000, NOW + 50, slow=1)
    running = Trial("running", NOW, 70_000, NOW + 50)
    failed = Failures(2, ("m",), (Bucket(int(NOW / 5), 0, 2),))
    rest_guard = "the hold is over; for slowness also cool, the frames good or waived"
    cases = [
        Case("pair", "", a_pair("open"), RefugeFrame(True), "open"),
        Case("pair", rest_guard, a_pair("open"), Rest(True), "half_open"),
        Case("pair", rest_guard, a_pair("quarantined"), Rest(True), "half_open"),
        Case(
            "pair",
            "an error or a hang",
            a_pair("closed"),
            Failure("error", ""),
            "closed",
        ),
        Case(
            "pair",
            "an error or a hang, enough in a row or in the window",
            a_pair("closed", failures=failed),
            Failure("hang", ""),
            "open",
            (Faulted,),
        ),
        Case(
            "pair",
            "an error or a hang",
            a_pair("ramping"),
            Failure("error", ""),
            "open",
            (Faulted,),
        ),
    ]
    for phase in ("closed", "ramping"):
        cases += _live_pair_cases(phase, two, one_slow, running)

    phases: tuple[Phase, ...] = ("closed", "ramping", "half_open", "open", "quarantined")
    for phase in phases:
        cases.append(Case("pair", "", a_pair(phase), Returned("slept"), phase))
        cases.append(
            Case("pair", "there is a trial", a_pair(phase, trial=running), EndTrial(), phase)
        )
        if phase != "quarantined":
            cases.append(
                Case(
                    "pair",
                    "a crash, wrong numbers, or unsupported",
                    a_pair(phase),
                    Failure("wrong", ""),
                    "quarantined",
                    (Faulted,),
                )
            )

    return cases


def _live_pair_cases(
    phase: Phase, two: dict[str, Any], one_slow: Trial, running: Trial
) -> list[Case]:
    state = a_pair(phase)
    trial = a_pair(phase, trial=one_slow)
    first = Frame(900.0, above=True, learns=False, first_use=True)
    return [
        Case("pair", "first use", state, first, phase),
        Case(
            "pair",
            "a trial, slow, the second in a row",
            trial,
            slow(),
            phase,
            (TrialChanged,),
        ),
        Case(
            "pair",
            "a trial, slow, the first in a row",
            a_pair(phase, trial=running),
            slow(),
            phase,
        ),
        Case(
            "pair",
            "slow, above trip, enough in a row",
            a_pair(phase, **two),
            slow(200.1),
            phase,
            (TripDevice,),
        ),
        Case("pair", "slow, above trip", state, slow(200.1), phase),
        Case("pair", "otherwise", state, slow(200.0), phase),
        Case(
            "pair",
            "above trip, its age makes the slow frames enough",
            a_pair(phase, **two),
            Aging(200.1, True),
            phase,
            (TripDevice,),
        ),
        Case(
            "pair",
            "above trip, its age makes it one more slow frame",
            state,
            Aging(200.1, True),
            phase,
        ),
        Case("pair", "", state, Slow(), "open"),
        Case(
            "pair",
            "no trial under way, or one of an earlier hold",
            state,
            BeginTrial(70_000, NOW + 100),
            phase,
            (TrialChanged,),
        ),
        Case(
            "pair",
            "a trial, at or above the hard limit",
            a_pair(phase, trial=running),
            TrialHeat(80_000, 80_000),
            phase,
            (TrialChanged,),
        ),
        Case(
            "pair",
            "its time is over, the temperature has not fallen",
            a_pair(phase, trial=running),
            TrialHeat(70_000, 80_000),
            phase,
            (TrialChanged,),
        ),
        Case(
            "pair",
            "its time is over",
            a_pair(phase, trial=running),
            TrialHeat(69_999, 80_000),
            phase,
            (TrialChanged,),
        ),
    ]
