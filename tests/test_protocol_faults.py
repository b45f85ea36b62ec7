"""Failures, the last place, and degrade."""

from __future__ import annotations

import pytest
from protocol_helpers import GPU, VULKAN, Bench, int4, pair

from switchgear.daemon.protocol.constants import Constants
from switchgear.daemon.protocol.reading import Reading
from switchgear.daemon.protocol.topology import PairKey, Target

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


# Failures.
@pytest.mark.parametrize("kind", ["error", "hang"])
def test_three_failures_in_a_row_open_the_pair_cold(kind: str) -> None:
    it = bench(models=("m", "other"))
    fail(it, ON_GPU, kind, 2)
    assert it.allowed(ON_GPU)
    fail(it, ON_GPU, kind)
    assert not it.allowed(ON_GPU)
    assert it.allowed(pair("vulkan", "other")), "it is one model's matter"
    assert it.allowed(ON_OPENCL)


def test_a_good_frame_ends_the_row() -> None:
    it = bench()
    for _ in range(3):
        fail(it, ON_GPU, count=2)
        it.frames(ON_GPU, 20)

    assert it.allowed(ON_GPU)


@pytest.mark.parametrize("good_first", [5, 8, 9, 10, 11, 20])
def test_half_of_at_least_twenty_in_the_window(good_first: int) -> None:
    """Two failures, one good frame, over and over: never three in a row."""
    it = bench()
    good, bad = 0, 0
    fail(it, ON_GPU)
    bad += 1
    it.frames(ON_GPU, 20, good_first, period_s=0.05)
    good += good_first
    while pair_phase(it, ON_GPU) == "closed":
        assert good + bad < 100
        assert not (good + bad >= 20 and bad >= good), "it should have opened by now"
        for _ in range(2):
            if pair_phase(it, ON_GPU) == "closed":
                fail(it, ON_GPU)
                bad += 1

        if pair_phase(it, ON_GPU) == "closed":
            it.frames(ON_GPU, 20, period_s=0.05)
            good += 1

    assert good + bad >= 20
    assert bad >= good
    assert not (good + bad - 1 >= 20 and bad - 1 >= good), "it opened too late"


def test_below_twenty_a_share_is_chance() -> None:
    it = bench()
    for _ in range(9):
        fail(it, ON_GPU)
        it.frames(ON_GPU, 20, period_s=0.1)

    assert it.allowed(ON_GPU)
    for _ in range(2):
        fail(it, ON_GPU)
        it.frames(ON_GPU, 20, period_s=0.1)

    assert not it.allowed(ON_GPU)


def test_the_window_moves_on() -> None:
    it = bench()
    for _ in range(40):
        fail(it, ON_GPU)
        it.frames(ON_GPU, 20, period_s=4.0)

    assert it.allowed(ON_GPU), "half of them fail, of 15 in the window"


def test_callers_mistakes_never_count() -> None:
    it = bench()
    for _ in range(100):
        it.protocol.caller_error(ON_GPU, it.now_s)

    assert it.allowed(ON_GPU)
    assert it.events() == []


def test_failures_are_kept_apart_from_slowness() -> None:
    it = bench()
    it.heat(gpu=70.0)
    fail(it, ON_GPU, count=2)
    it.frames(ON_GPU, 500, 2)
    fail(it, ON_GPU, count=2)
    assert it.phase("gpu") == "closed"
    assert pair_phase(it, ON_GPU) == "closed"


def test_a_crash_quarantines_the_pair_and_asks_the_canary() -> None:
    it = bench(models=("m", "other"))
    fail(it, ON_GPU, "crash")
    assert pair_phase(it, ON_GPU) == "quarantined"
    assert it.allowed(pair("vulkan", "other"))
    (probe,) = it.protocol.tick(it.now_s)
    assert probe.target == VULKAN
    it.protocol.probe_result(probe.target, probe.lease, True, it.now_s)
    assert it.allowed(pair("vulkan", "other"))
    assert it.protocol.tick(it.now_s + 5) == []


@pytest.mark.parametrize("answers", [True, False])
def test_a_canary_that_fails_or_is_silent_opens_the_backend(answers: bool) -> None:
    it = bench(models=("m", "other"))
    fail(it, ON_GPU, "crash")
    it.good_probes, it.answers = False, answers
    it.run(3)
    assert it.protocol.backend_state("vulkan").breaker.phase == "open"
    assert not it.allowed(pair("vulkan", "other"))
    assert it.allowed(ON_OPENCL), "the other API is another driver"
    it.good_probes, it.answers = True, True
    it.run(180)
    assert it.allowed(pair("vulkan", "other"))
    assert not it.allowed(ON_GPU), "the crash's pair stays"


def test_crashes_of_two_models_open_the_backend() -> None:
    it = bench(models=("m", "other", "third"))
    fail(it, ON_GPU, "crash")
    fail(it, pair("vulkan", "other"), "crash")
    assert it.protocol.backend_state("vulkan").breaker.phase == "open"
    assert not it.allowed(pair("vulkan", "third"))


def test_one_model_that_crashes_again_does_not() -> None:
    it = bench()
    bigger = PairKey("m", "vulkan", "fp16", "1x512")
    it.protocol.add_pair(bigger)
    fail(it, ON_GPU, "crash")
    fail(it, bigger, "crash")
    assert it.protocol.backend_state("vulkan").breaker.phase == "closed"


def test_a_quarantine_ends_after_a_day_through_probes() -> None:
    it = bench()
    fail(it, ON_NPU, "wrong")
    it.run(86_300, step_s=100)
    assert not it.allowed(ON_NPU)
    it.run(200, step_s=1.0)
    assert it.allowed(ON_NPU)
    assert any(probe.target == Target("pair", ON_NPU) for probe in it.probes)


def test_a_new_driver_ends_a_quarantine_through_probes() -> None:
    it = bench()
    fail(it, ON_NPU, "wrong")
    it.protocol.release(ON_NPU, it.now_s)
    assert not it.allowed(ON_NPU)
    it.run(10)
    assert it.protocol.admit(ON_NPU, it.now_s).share == 1 / 8


def test_a_lost_device_takes_every_api_and_is_probed_again() -> None:
    it = bench()
    fail(it, ON_GPU, "device_lost")
    assert not it.allowed(ON_GPU)
    assert not it.allowed(ON_OPENCL)
    assert it.protocol.people_state(GPU) == "tripped"
    it.run_until("closed")
    assert it.allowed(ON_OPENCL)


def test_a_lost_device_of_software_is_its_backends_fault() -> None:
    it = Bench(backends=("vulkan", "cpu"), constants=STILL)
    it.protocol.add_pair(ON_CPU)
    fail(it, ON_CPU, "device_lost", 3)
    assert pair_phase(it, ON_CPU) == "open"
    assert it.protocol.device_state("cpu").breaker.phase == "closed"


# The last place.
def test_heat_never_takes_the_last_place() -> None:
    it = Bench(backends=("vulkan",), constants=STILL)
    it.heat(gpu=40.0)
    it.trip(ON_GPU, 90.0)
    assert it.phase("gpu") == "closed"
    assert it.protocol.admit(ON_GPU, it.now_s).share == 1.0


def test_the_place_that_was_left_is_used_again_when_it_is_the_last() -> None:
    it = Bench(backends=("vulkan", "npu"), constants=STILL)
    it.heat(npu=40.0)
    it.trip(ON_GPU, 90.0)
    assert not it.allowed(ON_GPU)
    fail(it, ON_NPU, "crash")
    answer = it.protocol.admit(ON_GPU, it.now_s)
    assert answer.allowed
    assert "no other place" in answer.reason


def test_crashes_take_the_last_place() -> None:
    it = Bench(backends=("vulkan",), constants=STILL)
    fail(it, ON_GPU, "crash")
    assert not it.allowed(ON_GPU)
    assert it.protocol.retry_after_s("m", "", it.now_s) >= 1


def test_the_cpu_is_never_left_for_heat_but_sheds() -> None:
    it = Bench()
    it.heat(cpu=65.001, gpu=40.0, npu=40.0)
    it.frames(ON_CPU, 900, 10)
    answer = it.protocol.admit(ON_CPU, it.now_s)
    assert (answer.share, answer.shed_low) == (1.0, True)
    it.heat(cpu=58.0)
    it.run(20)
    assert it.protocol.admit(ON_CPU, it.now_s).shed_low, "58 is not below 58"
    it.heat(cpu=57.9)
    it.run(1)
    assert not it.protocol.admit(ON_CPU, it.now_s).shed_low


def test_two_hot_devices_share_what_neither_may_take_alone() -> None:
    it = Bench(backends=("vulkan", "npu"))
    hot = Reading(66_000)
    it.protocol.reading("gpu", hot, it.now_s)
    it.protocol.reading("npu", hot, it.now_s)
    shares = [it.protocol.admit(key, it.now_s).share for key in (ON_GPU, ON_NPU)]
    assert sum(shares) >= 1.0


# Degrade.
@pytest.mark.parametrize(
    ("domain", "code", "degrades"),
    [
        ("nnapi", 4, True),
        ("nnapi", 5, True),
        ("errno", -12, True),
        ("errno", 95, True),
        ("nnapi", 6, False),
        ("opencl", -12, False),
    ],
)
def test_what_counts_as_unsupported(domain: str, code: int, degrades: bool) -> None:
    it = bench()
    it.protocol.failure(ON_NPU, "error", domain, code, it.now_s)
    assert (pair_phase(it, ON_NPU) == "quarantined") is degrades


def test_the_codes_are_the_npus_alone() -> None:
    it = bench()
    it.protocol.failure(ON_GPU, "error", "errno", -12, it.now_s)
    assert pair_phase(it, ON_GPU) == "closed"


def degraded(celsius: float = 70.0) -> Bench:
    it = bench()
    it.protocol.add_pair(int4())
    it.learn(int4(), 30)
    it.learn(ON_CPU, 60)
    it.trip(ON_GPU, celsius)
    it.protocol.failure(ON_NPU, "unsupported", "nnapi", 4, it.now_s)
    return it


def trial(it: Bench) -> str:
    return it.protocol.pair_state(int4()).trial.phase


def test_int4_is_a_trial_on_the_hot_gpu() -> None:
    it = degraded()
    assert it.allowed(int4())
    assert not it.allowed(ON_GPU)
    assert it.protocol.people_state(Target("pair", int4())) == "degraded"


def test_the_trial_passes_when_it_cools_meanwhile() -> None:
    it = degraded()
    it.heat(gpu=69.9)
    it.run(29)
    assert trial(it) == "running"
    it.run(2)
    assert trial(it) == "passed"
    assert it.allowed(int4())
    it.heat(gpu=40.0)
    it.run_until("closed")
    assert trial(it) == "none"
    assert it.allowed(int4())


@pytest.mark.parametrize("how", ["does not cool", "too hot", "slow"])
def test_a_trial_that_fails_goes_to_the_cpu_for_this_hold(how: str) -> None:
    it = degraded()
    if how == "does not cool":
        it.run(31)
    elif how == "too hot":
        it.heat(gpu=79.999)
        assert it.allowed(int4())
        it.heat(gpu=80.0)
    else:
        it.frames(int4(), 45.1)
        it.frames(int4(), 45.0)
        it.frames(int4(), 45.1)
        assert it.allowed(int4())
        it.frames(int4(), 45.1)

    assert trial(it) == "failed"
    assert not it.allowed(int4())
    assert it.allowed(ON_CPU)
    hold_end_s = it.protocol.device_state("gpu").breaker.until_s
    it.heat(gpu=70.0)
    it.run(hold_end_s - it.now_s - 1)
    assert trial(it) == "failed"
    it.run(2)
    assert trial(it) == "running", "the next hold tries again"


def test_int4_that_is_slower_than_the_cpu_is_no_refuge() -> None:
    it = bench()
    it.protocol.add_pair(int4())
    it.learn(int4(), 60)
    it.learn(ON_CPU, 60)
    it.trip(ON_GPU)
    it.protocol.failure(ON_NPU, "unsupported", "nnapi", 4, it.now_s)
    assert not it.allowed(int4())
    assert it.allowed(ON_CPU)


def test_a_later_trip_finds_the_npu_unsupported_already() -> None:
    it = bench()
    it.protocol.add_pair(int4())
    it.protocol.failure(ON_NPU, "unsupported", "nnapi", 4, it.now_s)
    assert trial(it) == "none"
    it.trip(ON_GPU)
    assert trial(it) == "running"
