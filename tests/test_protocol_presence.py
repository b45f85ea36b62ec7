"""Sensors that fail, sleep, presence, the operator, dry runs, sessions and events."""

from __future__ import annotations

import pytest
from protocol_helpers import GPU, NPU, VULKAN, Bench, pair

from switchgear.daemon.protocol.constants import Constants
from switchgear.daemon.protocol.reading import NO_SENSOR, Reading
from switchgear.daemon.protocol.topology import PairKey, SessionLimits, Target

ON_GPU = pair("vulkan")
ON_OPENCL = pair("opencl")
ON_NPU = pair("npu")
ON_CPU = pair("cpu")
STILL = Constants(shedding=False)


def bench(**changes: object) -> Bench:
    made = Bench(constants=STILL, **changes)  # type: ignore[arg-type]
    made.heat(gpu=40.0, npu=40.0, cpu=40.0)
    return made


def fail(it: Bench, key: PairKey, kind: str = "error", count: int = 1) -> None:
    for _ in range(count):
        it.now_s += 0.1
        it.protocol.failure(key, kind, "vulkan", -1, it.now_s)  # type: ignore[arg-type]


def pair_phase(it: Bench, key: PairKey) -> str:
    return it.protocol.pair_state(key).breaker.phase


# Sensors.
def test_without_a_sensor_latency_decides() -> None:
    it = Bench(constants=STILL)
    it.protocol.reading("gpu", NO_SENSOR, it.now_s)
    it.frames(ON_GPU, 500, 3)
    assert it.phase("gpu") == "open"
    it.run_until("closed")


@pytest.mark.parametrize(
    ("silent_s", "celsius", "trips"),
    [(9.9, 40.0, False), (10.1, 40.0, True), (309.0, 40.0, True), (9.9, 70.0, True)],
)
def test_a_lost_sensor_is_held_then_too_warm(
    silent_s: float, celsius: float, trips: bool
) -> None:
    it = bench()
    it.heat(gpu=celsius)
    it.temperatures_c.clear()
    it.now_s += silent_s
    it.protocol.reading("gpu", Reading(None, "lost", silent_s * 1000), it.now_s)
    it.frames(ON_GPU, 500, 3, period_s=0.0)
    assert (it.phase("gpu") == "open") is trips


def test_a_lost_sensor_never_recovers_as_cold_and_has_the_longest_hold() -> None:
    it = bench()
    it.heat(gpu=40.0)
    it.temperatures_c["gpu"] = None
    it.run(320)
    it.frames(ON_GPU, 500, 3)
    assert it.phase("gpu") == "open"
    assert it.protocol.device_state("gpu").breaker.hold_s == pytest.approx(1800)


def test_a_sensor_lost_while_open_keeps_it_open_for_five_minutes() -> None:
    it = bench()
    it.trip(ON_GPU)
    it.temperatures_c["gpu"] = None
    it.run(305)
    assert it.phase("gpu") == "open"
    assert it.allowed(ON_CPU)
    it.run(10)
    assert it.phase("gpu") != "open"


def test_a_reader_that_says_nothing_is_a_lost_sensor() -> None:
    """No call at all: the age of the last reading tells."""
    it = bench()
    it.heat(gpu=40.0)
    it.temperatures_c.clear()
    it.now_s += 11
    it.frames(ON_GPU, 500, 3)
    assert it.phase("gpu") == "open"


def test_shedding_without_a_sensor_ends() -> None:
    it = Bench()
    it.heat(gpu=40.0)
    it.heat(gpu=66.0)
    assert it.phase("gpu") == "shedding"
    it.temperatures_c["gpu"] = None
    it.run(312)
    assert it.phase("gpu") == "closed"


# Presence, sleep, the operator, dry run, sessions.
def test_after_sleep_each_device_answers_before_it_serves() -> None:
    it = bench()
    it.frames(ON_GPU, 500, 2)
    it.protocol.resumed(it.now_s)
    assert not it.allowed(ON_GPU)
    assert not it.allowed(ON_NPU)
    assert it.allowed(ON_CPU)
    it.run(10)
    assert it.protocol.admit(ON_GPU, it.now_s).share == 1 / 8
    assert {probe.target for probe in it.probes} == {GPU, NPU}


@pytest.mark.parametrize("gone", ["absent", "lost"])
def test_presence(gone: str) -> None:
    it = bench()
    it.protocol.presence(GPU, gone, it.now_s)  # type: ignore[arg-type]
    assert not it.allowed(ON_GPU)
    it.protocol.presence(GPU, "present", it.now_s)
    assert not it.allowed(ON_GPU), "it has not answered since"
    it.run(10)
    assert it.allowed(ON_GPU)


def test_the_operators_word() -> None:
    it = bench()
    it.protocol.operator(VULKAN, "isolated", it.now_s)
    assert not it.allowed(ON_GPU)
    assert it.allowed(ON_OPENCL)
    it.protocol.operator(VULKAN, "auto", it.now_s)
    assert it.allowed(ON_GPU)
    it.trip(ON_GPU)
    it.protocol.operator(GPU, "forced", it.now_s)
    assert it.protocol.admit(ON_GPU, it.now_s).share == 1.0
    kinds = [event.kind for event in it.events()]
    assert kinds.count("operator") == 3
    with pytest.raises(KeyError):
        it.protocol.operator(Target("device", "none"), "auto", it.now_s)


def test_isolation_may_take_the_last_place() -> None:
    it = Bench(backends=("cpu",))
    it.protocol.operator(Target("device", "cpu"), "isolated", it.now_s)
    assert not it.allowed(ON_CPU)


def test_a_dry_run_decides_and_moves_nothing() -> None:
    it = bench(dry_run=True)
    it.trip(ON_GPU)
    assert it.phase("gpu") == "open"
    answer = it.protocol.admit(ON_GPU, it.now_s)
    assert (answer.allowed, answer.share) == (True, 1.0)
    assert answer.reason.startswith("dry run: would be 0%")
    it.heat(gpu=40.0)
    it.run_until("half_open")
    assert it.probes == []
    for _ in range(20):
        it.frames(ON_GPU, 20)
        it.run(0.5)

    assert it.probes == []
    assert it.phase("gpu") == "ramping", "live frames stand in for probes"


def test_a_clients_limits_move_its_own_pairs_alone() -> None:
    it = bench()
    own = SessionLimits(7, slow_ms=50, recover_ms=200)
    it.heat(gpu=66.0)
    it.frames(ON_GPU, 60, 3, limits=own)
    assert not it.allowed(ON_GPU, session=7)
    assert it.allowed(ON_GPU, session=8)
    assert it.allowed(ON_GPU)
    assert it.phase("gpu") == "closed"
    it.heat(gpu=50.0)
    it.frames(ON_NPU, 150, 140, period_s=1.0, limits=own)
    it.run(4)
    assert it.protocol.admit(ON_GPU, it.now_s, session=7).share == 1 / 8
    it.protocol.drop_session(7)
    assert it.protocol.admit(ON_GPU, it.now_s, session=7).share == 1.0


def test_pairs_come_and_go() -> None:
    it = bench()
    fail(it, ON_GPU, "crash")
    it.protocol.remove_pair(ON_GPU)
    it.protocol.remove_pair(ON_GPU)
    assert not it.allowed(ON_GPU)
    it.frames(ON_GPU, 500)
    fail(it, ON_GPU, "crash")
    it.protocol.aging(ON_GPU, 900, it.now_s)
    it.protocol.add_pair(ON_GPU, now_s=it.now_s)
    assert pair_phase(it, ON_GPU) == "quarantined", "it is remembered"
    it.protocol.add_pair(ON_CPU, ready=False)
    assert not it.allowed(ON_CPU)
    it.protocol.add_pair(ON_CPU, ready=True)
    assert it.allowed(ON_CPU)
    with pytest.raises(KeyError):
        it.protocol.add_pair(pair("none"))


def test_an_event_tells_what_it_was_decided_by() -> None:
    it = bench()
    it.trip(ON_GPU, 66.0, 250.0)
    (event,) = it.events()
    assert (event.kind, event.target, event.before, event.after) == (
        "transition",
        GPU,
        "closed",
        "open",
    )
    assert (event.temperature_mc, event.temperature_kind) == (66_000, "measured")
    assert (event.run_ms, event.limit_ms, event.cause) == (250.0, 200.0, "heat")
    assert "66.0 °C measured, 250.0 ms against 200.0 ms" in str(event)
