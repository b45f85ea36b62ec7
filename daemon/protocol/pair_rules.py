"""Conditions and effects of the rows of `pair`, each a pure function."""

from __future__ import annotations

from statistics import median

from switchgear.daemon.protocol import breaker as breakers
from switchgear.daemon.protocol.breaker import NEVER
from switchgear.daemon.protocol.failures import NO_FAILURES, failed, too_many, went_well
from switchgear.daemon.protocol.pair_state import (
    NO_TRIAL,
    Aging,
    BeginTrial,
    Failure,
    Faulted,
    Frame,
    PairState,
    Rest,
    Trial,
    TrialChanged,
    TrialHeat,
    TrialPhase,
    TripDevice,
    learnt,
    put,
    settled,
)
from switchgear.daemon.protocol.table import NOTHING, Actions, RefugeFrame


# Frames.
def streak(state: PairState, now_s: float) -> int:
    fresh = now_s - state.streak_s <= state.constants.streak_expiry_s
    return state.streak if fresh else 0


def slow(state: PairState, event: Frame) -> bool:
    return event.run_ms > state.slow_ms


def slow_streak(state: PairState, event: Frame, now_s: float) -> int:
    # Its age may have counted already.
    return streak(state, now_s) + (0 if state.aged else 1)


def well(state: PairState, now_s: float) -> PairState:
    """A frame ended well: that is all that failures and the frame in flight want to know."""
    failures = state.failures
    if failures is NO_FAILURES:
        return state._replace(aged=0) if state.aged else state

    return state._replace(failures=went_well(failures, now_s, state.constants), aged=0)


def first_use(state: PairState, event: Frame, now_s: float) -> tuple[PairState, Actions]:
    return settled(well(state, now_s)), NOTHING


def trips(state: PairState, event: Frame, now_s: float) -> tuple[PairState, Actions]:
    after = well(state, now_s)._replace(streak=0)
    return settled(after), (TripDevice(event.run_ms, state.slow_ms),)


def slower(state: PairState, event: Frame, now_s: float) -> tuple[PairState, Actions]:
    streak = slow_streak(state, event, now_s)
    after = well(state, now_s)._replace(streak=streak, streak_s=now_s, quiet=False)
    return after, NOTHING


def counted(state: PairState, event: Frame, now_s: float) -> tuple[PairState, Actions]:
    after = well(state, now_s)
    if after.streak:
        after = after._replace(streak=0)

    if after.trial.slow:
        after = after._replace(trial=after.trial._replace(slow=0))

    if event.learns and not learnt(after):
        after = learn(after, event.run_ms)

    return settled(after), NOTHING


def learn(state: PairState, run_ms: float) -> PairState:
    constants = state.constants
    samples = (*state.samples, run_ms)
    if len(samples) < constants.learn_frames:
        return state._replace(samples=samples)

    usual_ms = median(samples)
    slow_ms = state.given_slow_ms
    if slow_ms is None:
        slow_ms = max(constants.slow_factor * usual_ms, usual_ms + constants.noise_ms)

    return state._replace(samples=(), median_ms=usual_ms, slow_ms=slow_ms)


def aged(state: PairState, event: Aging) -> int:
    """For how many slow frames the age of the frame in flight stands."""
    return int(event.age_ms / state.slow_ms) if event.age_ms > state.slow_ms else 0


def aged_streak(state: PairState, event: Aging, now_s: float) -> int:
    return streak(state, now_s) + aged(state, event) - state.aged


def ages(state: PairState, event: Aging, now_s: float) -> tuple[PairState, Actions]:
    after = state._replace(
        streak=aged_streak(state, event, now_s),
        streak_s=now_s,
        aged=aged(state, event),
    )
    return settled(after), NOTHING


def age_trips(state: PairState, event: Aging, now_s: float) -> tuple[PairState, Actions]:
    after = state._replace(streak=0, aged=aged(state, event))
    return settled(after), (TripDevice(event.age_ms, state.slow_ms),)


# Failures.
def fails(state: PairState, event: Failure, now_s: float) -> PairState:
    failures = failed(state.failures, now_s, state.model, state.constants)
    return state._replace(failures=failures, aged=0)


def quarantine(state: PairState, event: Failure, now_s: float) -> tuple[PairState, Actions]:
    breaker = breakers.quarantined(state.breaker, now_s, event.kind, state.constants)
    after = state._replace(
        breaker=breaker, streak=0, aged=0, failures=NO_FAILURES, trial=NO_TRIAL
    )
    return settled(after), (Faulted(event.kind),)


def leave(state: PairState, now_s: float, cause: str) -> PairState:
    constants = state.constants
    breaker = breakers.opened(
        state.breaker,
        now_s,
        cause,
        constants,
        base_s=constants.hold_s if cause == "slow" else constants.failure_hold_s,
        again=state.breaker.phase != "closed",
    )
    after = state._replace(
        breaker=breaker,
        streak=0,
        aged=0,
        failures=NO_FAILURES,
        trial=NO_TRIAL,
        good_frames=0,
        frame_s=NEVER,
    )
    return settled(after)


def fails_often(state: PairState, event: Failure, now_s: float) -> bool:
    return too_many(fails(state, event, now_s).failures, state.constants)


def failed_open(state: PairState, event: Failure, now_s: float) -> tuple[PairState, Actions]:
    return leave(state, now_s, "failure"), (Faulted(event.kind),)


# Open.
def rested(state: PairState, event: Rest, now_s: float) -> bool:
    if now_s < state.breaker.until_s:
        return False

    if state.breaker.cause != "slow":
        return True

    return event.cool and breakers.frames_good(
        state.breaker, state.good_frames, state.frame_s, now_s, state.constants
    )


def half_open(state: PairState, now_s: float) -> tuple[PairState, Actions]:
    return put(state, breakers.half_opened(state.breaker, now_s)), NOTHING


def framed(state: PairState, event: RefugeFrame, now_s: float) -> tuple[PairState, Actions]:
    good = state.good_frames + 1 if event.good else 0
    return state._replace(good_frames=good, frame_s=now_s), NOTHING


# The trial.
def tried(state: PairState, trial: Trial, why: str) -> tuple[PairState, Actions]:
    return settled(state._replace(trial=trial)), (TrialChanged(trial.phase, why),)


def begin(state: PairState, event: BeginTrial, now_s: float) -> tuple[PairState, Actions]:
    until_s = now_s + state.constants.trial_s
    phase: TrialPhase = "running" if state.constants.trial else "passed"
    trial = Trial(phase, until_s, event.temperature_mc, event.hold_until_s)
    return tried(state, trial, "the model's other places are gone")


def fail_trial(state: PairState, now_s: float, why: str) -> tuple[PairState, Actions]:
    """For the rest of the device's hold it is not tried again."""
    until_s = max(now_s, state.trial.hold_until_s)
    return tried(state, Trial("failed", until_s, hold_until_s=until_s), why)


def pass_trial(state: PairState, event: TrialHeat, now_s: float) -> tuple[PairState, Actions]:
    passed = state.trial._replace(phase="passed")
    return tried(state, passed, "the temperature falls although it is loaded")


def end_trial(state: PairState) -> PairState:
    return settled(state._replace(trial=NO_TRIAL))


def on_trial(state: PairState) -> bool:
    return (
        state.trial is not NO_TRIAL
        and state.constants.trial
        and state.trial.phase in ("running", "passed")
    )


def slow_in_trial(state: PairState, event: Frame, now_s: float) -> bool:
    return on_trial(state) and slow(state, event)


def second_slow(state: PairState, event: Frame, now_s: float) -> bool:
    enough = state.trial.slow + 1 >= state.constants.trial_frames
    return slow_in_trial(state, event, now_s) and enough


def slow_trial(state: PairState, event: Frame, now_s: float) -> tuple[PairState, Actions]:
    trial = state.trial._replace(slow=state.trial.slow + 1)
    return settled(well(state, now_s)._replace(trial=trial)), NOTHING


def over_hard(state: PairState, event: TrialHeat, now_s: float) -> bool:
    return (
        on_trial(state)
        and event.temperature_mc is not None
        and event.temperature_mc >= event.hard_mc
    )


def not_falling(state: PairState, event: TrialHeat, now_s: float) -> bool:
    trial = state.trial
    if trial.phase != "running" or now_s < trial.until_s:
        return False

    if event.temperature_mc is None or trial.start_mc is None:
        return False

    return event.temperature_mc >= trial.start_mc


def trial_over(state: PairState, event: TrialHeat, now_s: float) -> bool:
    return state.trial.phase == "running" and now_s >= state.trial.until_s


def trial_forgiven(state: PairState, event: TrialHeat, now_s: float) -> bool:
    return state.trial.phase == "failed" and now_s >= state.trial.until_s
