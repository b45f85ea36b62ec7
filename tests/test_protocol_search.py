"""Every state of each level that any sequence of events can reach, with small constants.

Times are taken relative to now and cut where they no longer matter, so that the states are
finite; the search then visits all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest

from switchgear.daemon.protocol import backend, device, pair
from switchgear.daemon.protocol.backend import BackendState, Fault, Served, Suspect
from switchgear.daemon.protocol.breaker import NEVER, Breaker
from switchgear.daemon.protocol.constants import Constants
from switchgear.daemon.protocol.device_rules import (
    DeviceState,
    Heat,
    Limits,
    Lost,
    Trip,
    warmth_of,
)
from switchgear.daemon.protocol.failures import NO_FAILURES, Failures
from switchgear.daemon.protocol.pair_state import (
    NO_TRIAL,
    Aging,
    BeginTrial,
    EndTrial,
    Failure,
    Frame,
    PairState,
    Rest,
    Slow,
    Trial,
    TrialHeat,
    new_pair,
)
from switchgear.daemon.protocol.reading import Reading, Warmth
from switchgear.daemon.protocol.table import (
    NOTHING,
    ProbeDone,
    RefugeFrame,
    Returned,
    Tick,
    Transition,
)

SMALL = Constants(
    trip_frames=2,
    learn_frames=2,
    streak_expiry_s=1,
    failures=2,
    failure_window_s=3,
    failure_minimum=3,
    failure_hold_s=1,
    lost_hold_s=1,
    quarantine_s=2,
    crash_memory_s=1,
    recover_frames=2,
    recover_known_frames=1,
    waive_holds=2,
    refuge_s=1,
    hold_s=1,
    hold_max_s=2,
    jitter=0,
    retrip_s=2,
    stable_s=2,
    good_probes=2,
    lease_s=1,
    probe_gap_s=1,
    probe_busy_s=1,
    ramp_shares=(0.5, 1.0),
    ramp_step_s=1,
    shed_shares=(0.5, 0.25),
    shed_dwell_s=1,
    trial_s=1,
    trial_frames=2,
    sensor_hold_s=1,
    sensor_warm_s=1,
)
# Longer ago than anything above asks for.
LONG_S = 5.0
MOST_STATES = 12_000
EXPECTED = {
    "open": {"half_open", "quarantined"},
    "half_open": {"open", "ramping", "quarantined"},
    "ramping": {"open", "closed", "half_open", "quarantined"},
    "closed": {"open", "shedding", "half_open", "quarantined"},
    "shedding": {"closed", "open", "half_open"},
    "quarantined": {"half_open"},
}
Step = Callable[[Any, Any, float], tuple[Any, Any]]


class Passes(NamedTuple):
    """A second passes and nobody says so."""


def canonical(breaker: Breaker, now_s: float) -> Breaker:
    """Without what a phase never asks for; `until_s` keeps its distance from `since_s`."""
    if breaker.since_s < now_s - LONG_S and breaker.until_s > NEVER:
        hold_s = breaker.hold_s
        since_s = now_s - LONG_S
        breaker = breaker._replace(since_s=since_s, until_s=since_s + hold_s)

    if breaker.phase in ("closed", "shedding"):
        breaker = breaker._replace(since_s=NEVER, until_s=NEVER, cause="")
        if not breaker.hold_level:
            breaker = breaker._replace(stable_s=NEVER)
    else:
        breaker = breaker._replace(closed_s=NEVER, stable_s=NEVER)

    if breaker.phase in ("open", "quarantined"):
        breaker = breaker._replace(lease_until_s=NEVER)
    elif breaker.phase in ("half_open", "ramping"):
        breaker = breaker._replace(until_s=NEVER)

    lease = min(breaker.lease, 1)
    return breaker._replace(opens=0, probes=min(breaker.probes, 1), lease=lease, seed=0)


def relative(value: Any, now_s: float) -> Any:
    """The same state at time 0, without what has no bearing on what follows."""
    if isinstance(value, DeviceState):
        known = value.thermometer
        kept = known._replace(kind="measured", slope_mc_per_s=0.0)
        value = value._replace(thermometer=kept)
        if value.breaker.phase != "open":
            value = value._replace(opened_mc=None, good_frames=0, frame_s=NEVER)

        if value.breaker.phase != "shedding":
            value = value._replace(shed_s=NEVER)

        value = value._replace(good_frames=min(value.good_frames, 2))

    if isinstance(value, PairState):
        if value.breaker.phase != "open":
            value = value._replace(good_frames=0, frame_s=NEVER)

        value = value._replace(good_frames=min(value.good_frames, 2))
        if not value.streak:
            value = value._replace(streak_s=NEVER)

    # By these very objects the code knows that nothing is counted.
    if isinstance(value, Trial) and value.phase == "none":
        return NO_TRIAL

    if isinstance(value, Failures) and not value.streak:
        return NO_FAILURES

    if isinstance(value, Breaker):
        value = canonical(value, now_s)

    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields: list[Any] = []
        for name, field in zip(value._fields, value, strict=True):
            if name.endswith("_s") and not name.endswith("per_s") and isinstance(field, float):
                fields.append(max(-LONG_S, min(field - now_s, LONG_S)))
            elif isinstance(field, tuple):
                fields.append(relative(field, now_s))
            else:
                fields.append(field)

        return type(value)(*fields)

    if isinstance(value, tuple):
        return tuple(relative(field, now_s) for field in value)

    return value


def search(start: Any, events: Iterable[Any], step: Step) -> dict[Any, list[tuple[Any, Any]]]:
    """All states reachable from `start`, each with the events and states that follow.

    `Tick` takes a second; everything else takes no time.
    """
    events = tuple(events)
    first = relative(start, 0.0)
    found: dict[Any, list[tuple[Any, Any]]] = {}
    waiting = deque([first])
    while waiting:
        state = waiting.popleft()
        if state in found:
            continue

        found[state] = []
        for event in events:
            now_s = 1.0 if isinstance(event, Tick | Rest | Passes) else 0.0
            after, actions = step(state, event, now_s)
            for action in actions:
                if isinstance(action, Transition):
                    assert action.after in EXPECTED[action.before], (state, event)

            if isinstance(event, ProbeDone) and event.lease != state.breaker.lease:
                assert after == state, "nobody asked for this probe"

            if isinstance(event, ProbeDone) and not state.breaker.lease:
                assert after == state, "no probe is under way"

            known = relative(after, now_s)
            found[state].append((event, known))
            if known not in found:
                waiting.append(known)

        assert len(found) < MOST_STATES, "the states are not finite"

    return found


def all_get_home(
    found: dict[Any, list[tuple[Any, Any]]], is_home: Callable[[Any], bool]
) -> None:
    """From every state some sequence of events leads home: nothing is stuck."""
    before: dict[Any, set[Any]] = {}
    for state, follows in found.items():
        for _, after in follows:
            before.setdefault(after, set()).add(state)

    reached = {state for state in found if is_home(state)}
    waiting = deque(reached)
    while waiting:
        for state in before.get(waiting.popleft(), ()):
            if state not in reached:
                reached.add(state)
                waiting.append(state)

    assert set(found) == reached


def phases(found: Iterable[Any]) -> set[str]:
    return {state.breaker.phase for state in found}


PROBES = (ProbeDone(1, True), ProbeDone(1, False), ProbeDone(1, None), ProbeDone(0, True))


def heats(*celsius: int) -> list[Heat]:
    return [Heat(Reading(value * 1000), True) for value in celsius]


SLOWLY = pytest.mark.slow


@pytest.mark.parametrize(
    "more",
    [
        [Lost("x")],
        pytest.param([RefugeFrame(True), RefugeFrame(False)], marks=SLOWLY),
    ],
)
def test_every_state_of_a_device(more: list[Any]) -> None:
    start = DeviceState(Limits(65_000, 58_000, 80_000), SMALL)
    common = [*heats(40, 70), Trip(True), Tick(), *PROBES]
    events = [*common, *more]
    found = search(start, events, device.step)
    assert phases(found) == {"closed", "shedding", "open", "half_open", "ramping"}
    all_get_home(found, lambda state: state.breaker.phase == "closed" and not state.shed)
    for state, follows in found.items():
        breaker = state.breaker
        assert 0 <= breaker.hold_level <= 1
        assert breaker.phase == "open" or not state.refuge_heats
        for event, after in follows:
            moved = (breaker.phase, after.breaker.phase)
            if moved == ("half_open", "ramping"):
                assert isinstance(event, ProbeDone)
                assert breaker.good_probes == 1
                assert warmth_of(state, 0.0) is not Warmth.ABOVE

            if moved == ("open", "half_open"):
                assert breaker.until_s <= 1.0, "the hold is over"

            assert moved != ("open", "closed")


@SLOWLY
def test_a_device_comes_back_whatever_was() -> None:
    """From every state, an ordinary cool life closes it: no luck is needed."""
    limits = Limits(65_000, 58_000, 80_000)
    events = [*heats(40, 70), Trip(True), Tick(), Returned("x"), *PROBES]
    found = search(DeviceState(limits, SMALL), events, device.step)
    for start in found:
        state = start
        for _ in range(60):
            state, _ = device.step(state, heats(40)[0], 0.0)
            state, _ = device.step(state, Tick(), 1.0)
            state = relative(state, 1.0)
            if state.breaker.lease:
                state, _ = device.step(state, ProbeDone(1, True), 0.0)

            if state.breaker.phase == "closed":
                break

        assert state.breaker.phase == "closed", start


def test_every_state_of_a_cpu() -> None:
    """It sheds and is never anything else."""
    limits = Limits(65_000, 58_000, 80_000, is_cpu=True)
    events = [*heats(40, 60, 70), Trip(True), Lost("x"), Returned("x"), Tick(), *PROBES]
    found = search(DeviceState(limits, SMALL), events, device.step)
    assert phases(found) == {"closed", "shedding"}
    all_get_home(found, lambda state: state.breaker.phase == "closed")


def test_every_state_of_a_backend() -> None:
    events = [
        Fault("error", "a"),
        Fault("crash", "b"),
        Served(),
        Suspect(),
        Tick(),
        *PROBES,
    ]
    found = search(BackendState(SMALL), events, bounded(backend.step))
    assert phases(found) == {"closed", "open", "half_open", "ramping"}
    all_get_home(found, lambda state: state.breaker.phase == "closed" and not state.canary)


def bounded(step: Step) -> Step:
    """Cuts the streak above every limit, and leaves out the window, which others test."""

    def cut(state: Any, event: Any, now_s: float) -> tuple[Any, Any]:
        after, actions = step(state, event, now_s)
        failures = after.failures
        if failures is not NO_FAILURES:
            streak = min(failures.streak, 3)
            kept = Failures(streak, failures.models) if streak else NO_FAILURES
            after = after._replace(failures=kept)

        return after, actions

    return cut


SLOW = Frame(250.0, above=True, learns=False)
FAST = Frame(10.0, above=True, learns=False)


@pytest.mark.parametrize(
    "more",
    [
        [FAST, Aging(450.0, True), Returned("x")],
        pytest.param([Frame(10.0, above=False, learns=True), RefugeFrame(True)], marks=SLOWLY),
    ],
)
def test_every_state_of_a_pair(more: list[Any]) -> None:
    """Without its failures, which have a search of their own below."""
    events = [SLOW, Slow(), Failure("wrong", ""), Rest(True), Tick(), *PROBES, *more]
    start = new_pair(SMALL, "m")
    found = search(start, events, trial_bounded)
    assert phases(found) == {"closed", "open", "half_open", "ramping", "quarantined"}
    all_get_home(found, lambda state: state.breaker.phase == "closed")
    for state in found:
        assert state.streak < 2
        assert len(state.samples) < 2
        frame = Frame(state.slow_ms, above=True, learns=False)
        if state.quiet:
            # The short way of `step` and the table say the same.
            assert pair.TABLE.step(state, frame, 0.0) == (state, NOTHING)


def test_every_state_of_a_trial() -> None:
    events = [
        SLOW,
        FAST,
        BeginTrial(70_000, 2.0),
        EndTrial(),
        TrialHeat(69_000, 80_000),
        TrialHeat(75_000, 80_000),
        TrialHeat(81_000, 80_000),
        Passes(),
    ]
    start = new_pair(SMALL, "m", slow_ms=200, recover_ms=190)
    found = search(start, events, trial_bounded)
    trials = {state.trial.phase for state in found}
    assert trials == {"none", "running", "passed", "failed"}
    all_get_home(found, lambda state: state.quiet)
    for state, follows in found.items():
        for event, after in follows:
            moved = (state.trial.phase, after.trial.phase)
            if moved == ("failed", "running"):
                assert isinstance(event, BeginTrial)
                assert state.trial.until_s <= 0, "not before the next hold"

            assert moved not in {("none", "passed"), ("none", "failed"), ("failed", "passed")}


def trial_bounded(state: Any, event: Any, now_s: float) -> tuple[Any, Any]:
    if isinstance(event, Passes):
        return state, NOTHING

    after, actions = pair.step(state, event, now_s)
    return after._replace(aged=min(after.aged, 3)), actions


def test_every_state_of_a_pairs_failures() -> None:
    events = [
        Frame(10.0, above=False, learns=True),
        Failure("error", ""),
        Failure("crash", ""),
        Rest(True),
        Tick(),
        *PROBES,
    ]
    found = search(new_pair(SMALL, "m", slow_ms=100, recover_ms=90), events, bounded(pair.step))
    assert phases(found) == {"closed", "open", "half_open", "ramping", "quarantined"}
    all_get_home(found, lambda state: state.breaker.phase == "closed")
    assert max(state.failures.streak for state in found) == 1
