"""What holds after any sequence of events, with several models, devices and clients."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from protocol_helpers import BACKENDS, Bench, int4, pair

from switchgear.daemon.protocol.answers import Event
from switchgear.daemon.protocol.breaker import jitter
from switchgear.daemon.protocol.constants import Constants
from switchgear.daemon.protocol.topology import PairKey, SessionLimits

MODELS = ("m", "other")
DEVICES = ("gpu", "npu", "cpu")
KEYS = [pair(backend, model) for model in MODELS for backend in BACKENDS]

temperatures = st.one_of(
    st.none(), st.sampled_from([40.0, 57.9, 58.0, 62.0, 65.0, 65.1, 79.0, 81.0, 95.0])
)
keys = st.sampled_from([*KEYS, int4()])
run_times = st.sampled_from([5.0, 29.0, 60.0, 119.0, 199.0, 201.0, 250.0, 1800.0])
heats = st.tuples(st.just("heat"), st.sampled_from(DEVICES), temperatures)
frames = st.tuples(st.just("frames"), keys, run_times, st.integers(1, 12))
waits = st.tuples(st.just("wait"), st.sampled_from([0.5, 3.0, 12.0, 40.0, 140.0, 700.0]))
agings = st.tuples(st.just("aging"), keys, st.sampled_from([150.0, 450.0, 5000.0]))
unsupported = st.tuples(st.just("unsupported"), st.sampled_from(MODELS))
sleeps = st.tuples(st.just("sleep"))
answers = st.tuples(st.just("probes"), st.sampled_from([True, False, None]), st.booleans())
sessions = st.tuples(st.just("session"), keys, run_times, st.integers(1, 5))
firsts = st.tuples(st.just("first"), keys, st.integers(1, 6))
failures = st.tuples(
    st.just("failure"),
    keys,
    st.sampled_from(["error", "hang", "crash", "wrong", "device_lost"]),
)

heat_events = st.one_of(heats, heats, frames, frames, waits, agings, firsts, answers, sessions)
all_events = st.one_of(heat_events, unsupported, sleeps, failures)
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
many = settings(max_examples=40, deadline=None, suppress_health_check=QUIET)
few = settings(many, max_examples=8)
# The slow ones.
lots = settings(many, max_examples=1000)


def apply(it: Bench, event: Any) -> None:
    kind, *rest = event
    protocol = it.protocol
    if kind == "heat":
        it.heat(**{rest[0]: rest[1]})
    elif kind == "frames":
        it.frames(rest[0], rest[1], rest[2])
    elif kind == "first":
        it.frames(rest[0], 1800.0, rest[1], first_use=True)
    elif kind == "session":
        limits = SessionLimits(1, slow_ms=20, recover_ms=15)
        it.frames(rest[0], rest[1], rest[2], limits=limits)
    elif kind == "wait":
        it.run(rest[0], step_s=max(0.5, rest[0] / 40))
    elif kind == "aging":
        protocol.aging(rest[0], rest[1], it.now_s)
    elif kind == "unsupported":
        protocol.failure(pair("npu", rest[0]), "unsupported", "nnapi", 4, it.now_s)
    elif kind == "sleep":
        protocol.resumed(it.now_s)
    elif kind == "probes":
        it.good_probes, it.answers = rest
    else:
        protocol.failure(rest[0], rest[1], "vulkan", -1, it.now_s)


def machine(constants: Constants | None = None) -> Bench:
    it = Bench(models=MODELS, constants=constants)
    it.protocol.add_pair(int4())
    for device in DEVICES:
        it.heat(**{device: 40.0})

    return it


def shares(it: Bench, model: str) -> float:
    known = [key for key in (*KEYS, int4()) if key.model == model]
    return sum(it.protocol.admit(key, it.now_s).share for key in known)


@many
@given(st.lists(heat_events, max_size=40))
def test_heat_and_slowness_always_leave_a_place_for_every_frame(events: list[Any]) -> None:
    it = machine()
    for event in events:
        apply(it, event)
        for model in MODELS:
            assert shares(it, model) >= 1.0, event


@many
@given(st.lists(heat_events, max_size=40), st.sampled_from(["vulkan", "npu"]))
def test_also_where_there_is_one_device(events: list[Any], backend: str) -> None:
    it = Bench(backends=(backend,))
    key = pair(backend)
    for event in events:
        if event[0] == "heat":
            event = ("heat", BACKENDS[backend], event[2])

        apply(it, event)
        assert it.protocol.admit(key, it.now_s).share == 1.0, event


@many
@given(st.lists(all_events, max_size=40))
def test_only_what_is_closed_for_heat_or_slowness_is_in_reserve(events: list[Any]) -> None:
    it = machine()
    for event in events:
        apply(it, event)
        for key in (*KEYS, int4()):
            answer = it.protocol.admit(key, it.now_s)
            device = BACKENDS[key.backend]
            levels = (
                it.protocol.device_state(device).breaker,
                it.protocol.backend_state(key.backend).breaker,
                it.protocol.pair_state(key).breaker,
            )
            causes = {
                b.cause for b in levels if b.phase in ("open", "half_open", "quarantined")
            }
            probed = any(b.phase == "half_open" for b in levels)
            heat_alone = not answer.allowed and causes <= {"heat", "slow"}
            assert answer.reserve is (heat_alone and not probed), event


@few
@given(st.lists(all_events, max_size=40))
def test_nothing_is_stuck(events: list[Any]) -> None:
    comes_back(events)


@pytest.mark.slow
@settings(many, max_examples=300)
@given(st.lists(all_events, max_size=80))
def test_nothing_is_stuck_after_longer_lives(events: list[Any]) -> None:
    comes_back(events)


@pytest.mark.slow
@lots
@given(st.lists(heat_events, max_size=80))
def test_heat_leaves_a_place_in_longer_lives(events: list[Any]) -> None:
    it = machine()
    for event in events:
        apply(it, event)
        for model in MODELS:
            assert shares(it, model) >= 1.0, event


def comes_back(events: list[Any]) -> None:
    """Whatever happened: cool, with good probes, all is closed within hours; in a day, all."""
    it = machine()
    for event in events:
        apply(it, event)

    it.good_probes, it.answers = True, True
    for device in DEVICES:
        it.heat(**{device: 40.0})

    it.run(3 * 1800 + 600, step_s=9.0)
    for device in DEVICES:
        assert it.phase(device) == "closed"

    for backend in BACKENDS:
        assert it.protocol.backend_state(backend).breaker.phase == "closed"

    for key in (*KEYS, int4()):
        assert it.protocol.pair_state(key).breaker.phase in ("closed", "quarantined")

    it.run(86_400, step_s=900.0)
    it.run(120, step_s=5.0)
    for key in (*KEYS, int4()):
        assert it.protocol.pair_state(key).breaker.phase == "closed"
        assert it.protocol.admit(key, it.now_s).share == 1.0


@many
@given(st.lists(st.one_of(heats, firsts, waits), max_size=40))
def test_first_frames_never_trip(events: list[Any]) -> None:
    it = machine(Constants(start_open=False))
    for event in events:
        apply(it, event)

    assert [event for event in it.events() if event.after == "open"] == []


def proofs(events: list[Event], target: object) -> list[tuple[str, str]]:
    return [
        (event.before, event.after)
        for event in events
        if event.kind == "transition" and event.target == target
    ]


@many
@given(st.lists(all_events, max_size=50))
def test_open_closes_only_by_probes_and_ramp_and_never_hot(events: list[Any]) -> None:
    it = machine()
    for event in events:
        apply(it, event)

    told = it.events()
    allowed = {
        "open": {"half_open"},
        "half_open": {"open", "ramping", "quarantined"},
        "ramping": {"open", "closed", "half_open", "quarantined"},
        "closed": {"open", "shedding", "half_open", "quarantined"},
        "shedding": {"closed", "open", "half_open"},
        "quarantined": {"half_open"},
    }
    for event in told:
        if event.kind != "transition":
            continue

        assert event.after in allowed[event.before], event
        if event.target.level == "device" and event.before in ("half_open", "open"):
            mc = event.temperature_mc
            if event.after == "ramping" and mc is not None and event.temperature_kind != "lost":
                assert mc <= 65_000, event

            if event.after == "half_open" and event.cause == "heat" and mc is not None:
                assert mc < 58_000 or event.temperature_kind == "lost", event


@many
@given(st.lists(all_events, max_size=50))
def test_no_device_ramps_without_three_good_probes(events: list[Any]) -> None:
    it = machine()
    started: dict[object, int] = {}
    for event in events:
        before = len(it.probes)
        apply(it, event)
        for probe in it.probes[before:]:
            started[probe.target] = started.get(probe.target, 0) + 1

        for told in it.events():
            if told.kind == "transition" and told.after == "ramping":
                assert started.get(told.target, 0) >= 3, told
                started[told.target] = 0


@many
@given(st.lists(all_events, max_size=60))
def test_holds_are_bounded_and_grow_only_by_one(events: list[Any]) -> None:
    it = machine()
    for event in events:
        apply(it, event)

    levels: dict[object, float] = {}
    for told in it.events():
        if told.kind == "transition" and told.after == "open":
            gone = told.target.level == "device" and told.cause in ("lost", "returned")
            constants = it.protocol.constants
            shortest_s = constants.lost_hold_s if gone else constants.hold_s
            assert shortest_s - 0.001 <= told.hold_s <= constants.hold_max_s + 0.001, told
            times = told.hold_s / shortest_s
            # A sensor lost for long: the longest hold at once, less its jitter.
            longest = told.hold_s > 1700 and told.temperature_kind == "lost"
            assert longest or times <= 2 * levels.get(told.target, 1.0) * 1.1 / 0.9 + 0.1, told
            levels[told.target] = times


@many
@given(st.lists(all_events, max_size=40))
def test_every_api_of_a_device_moves_together(events: list[Any]) -> None:
    """Two APIs of one device with nothing against themselves get one answer."""
    it = machine()
    for event in events:
        apply(it, event)
        for model in MODELS:
            sound = [
                it.protocol.admit(pair(backend, model), it.now_s).allowed
                for backend in ("vulkan", "opencl")
                if it.protocol.backend_state(backend).breaker.phase == "closed"
                and it.protocol.pair_state(pair(backend, model)).breaker.phase == "closed"
            ]
            assert len(set(sound)) <= 1, event


@many
@given(st.lists(st.tuples(keys, run_times, st.integers(1, 8)), max_size=30))
def test_a_clients_limits_never_move_anothers_pairs(steps: list[Any]) -> None:
    """The same frames with and without one client's limits leave the same for all others."""
    plain, limited = machine(), machine()
    limits = SessionLimits(1, slow_ms=1, recover_ms=0.5)
    for key, run_ms, count in steps:
        for it, own in ((plain, None), (limited, limits)):
            it.heat(gpu=66.0)
            it.frames(key, run_ms, count, limits=own)
            it.run(2)

        for key in (*KEYS, int4()):
            assert plain.protocol.admit(key, plain.now_s) == limited.protocol.admit(
                key, limited.now_s
            )


@many
@given(st.lists(all_events, max_size=40))
def test_the_same_events_give_the_same_states(events: list[Any]) -> None:
    one, two = machine(), machine()
    for event in events:
        apply(one, event)
        apply(two, event)

    assert one.events() == two.events()
    assert one.protocol.snapshot(one.now_s) == two.protocol.snapshot(two.now_s)


@given(st.integers(0, 2**64), st.integers(0, 10_000))
def test_jitter_is_within_one(seed: int, count: int) -> None:
    assert -1.0 <= jitter(seed, count) < 1.0
    assert jitter(seed, count) == jitter(seed, count)


def test_jitter_spreads() -> None:
    """Devices that trip together part: ten seeds, ten holds, on both sides."""
    values = [jitter(seed, 1) for seed in range(1000)]
    assert len(set(values)) == 1000
    assert abs(sum(values) / 1000) < 0.1
    assert min(values) < -0.9
    assert max(values) > 0.9


def test_events_are_bounded() -> None:
    it = Bench()
    for number in range(3000):
        key = PairKey(f"model{number}", "npu", "int8")
        it.protocol.add_pair(key)
        it.protocol.failure(key, "wrong", "", 0, it.now_s)
        it.protocol.release(key, it.now_s)
        it.protocol.remove_pair(key)

    assert len(it.events()) == 4096


@pytest.mark.parametrize("wrong", [{"trip_frames": 0}, {"hold_max_s": 10.0}])
def test_constants_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Constants(**wrong)
