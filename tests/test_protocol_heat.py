"""Heat in the default protocol: trip, hold, recover and shedding, with each number's bounds."""

from __future__ import annotations

from itertools import pairwise

import pytest
from protocol_helpers import GPU, Bench, pair

from switchgear.daemon.protocol.constants import Constants
from switchgear.daemon.protocol.reading import Reading

VULKAN = pair("vulkan")
OPENCL = pair("opencl")
NPU = pair("npu")
CPU = pair("cpu")
STILL = Constants(shedding=False)


def bench(**changes: object) -> Bench:
    made = Bench(constants=STILL, **changes)  # type: ignore[arg-type]
    made.heat(gpu=40.0, npu=40.0, cpu=40.0)
    return made


@pytest.mark.parametrize(
    ("celsius", "run_ms", "frames", "leaves"),
    [
        (65.001, 200.1, 3, True),
        (65.0, 500, 3, False),
        (65.001, 200.0, 3, False),
        (90.0, 500, 2, False),
    ],
)
def test_trip(celsius: float, run_ms: float, frames: int, leaves: bool) -> None:
    it = bench()
    it.heat(gpu=celsius)
    it.frames(VULKAN, run_ms, frames)
    assert it.allowed(VULKAN) is not leaves
    assert it.allowed(OPENCL) is not leaves, "heat moves every API of a device"
    assert it.allowed(NPU)
    assert it.allowed(CPU)


def test_each_of_the_three_frames_must_find_it_hot() -> None:
    it = bench()
    it.heat(gpu=66.0)
    it.frames(VULKAN, 500, 2)
    it.heat(gpu=64.0)
    it.frames(VULKAN, 500)
    it.heat(gpu=66.0)
    it.frames(VULKAN, 500, 2)
    assert it.phase("gpu") == "closed"
    it.frames(VULKAN, 500)
    assert it.phase("gpu") == "open"


@pytest.mark.parametrize(("gap_s", "leaves"), [(10.0, True), (10.1, False)])
def test_a_streak_expires(gap_s: float, leaves: bool) -> None:
    it = bench()
    it.heat(gpu=66.0)
    it.frames(VULKAN, 500, 2)
    it.now_s += gap_s
    it.heat(gpu=66.0)
    it.frames(VULKAN, 500, period_s=0.0)
    assert (it.phase("gpu") == "open") is leaves


def test_two_models_alternate() -> None:
    """210 ms of one and 5 ms of another are two streaks: the slow one trips at its third."""
    it = bench(models=("m", "fast"))
    it.heat(gpu=80.0)
    for _ in range(2):
        it.frames(VULKAN, 210)
        it.frames(pair("vulkan", "fast"), 5)

    assert it.phase("gpu") == "closed"
    it.frames(VULKAN, 210)
    assert it.phase("gpu") == "open"
    assert not it.allowed(pair("vulkan", "fast"))


def test_a_model_whose_healthy_time_is_210_ms() -> None:
    it = bench()
    it.learn(VULKAN, 210)
    assert it.protocol.pair_state(VULKAN).slow_ms == pytest.approx(315)
    it.heat(gpu=80.0)
    it.frames(VULKAN, 315, 20)
    assert it.phase("gpu") == "closed"
    it.frames(VULKAN, 315.1, 3)
    assert it.phase("gpu") == "open"


def test_limits_follow_a_fast_model() -> None:
    """A 20 ms model that throttles to 31 ms is slow long before 200 ms."""
    it = bench()
    it.frames(VULKAN, 20, 99)
    assert it.protocol.pair_state(VULKAN).slow_ms == 200
    it.frames(VULKAN, 20)
    assert it.protocol.pair_state(VULKAN).slow_ms == pytest.approx(30)
    it.trip(VULKAN, 66, 31)
    assert it.phase("gpu") == "open"


def test_hot_frames_and_first_frames_teach_nothing() -> None:
    it = bench()
    it.heat(gpu=80.0)
    it.frames(VULKAN, 100, 200)
    it.heat(gpu=40.0)
    it.frames(VULKAN, 1800, 100, first_use=True)
    assert it.protocol.pair_state(VULKAN).samples == ()


def test_the_models_own_limits() -> None:
    it = bench()
    own = pair("vulkan", "own")
    it.protocol.add_pair(own, slow_ms=50, recover_ms=40)
    it.protocol.add_pair(pair("cpu", "own"))
    it.learn(own, 100)
    assert it.protocol.pair_state(own).slow_ms == 50
    it.trip(own, 66, 50.1)
    assert it.phase("gpu") == "open"


def test_first_frames_never_trip() -> None:
    it = bench()
    it.heat(gpu=90.0)
    it.frames(VULKAN, 1820, 50, first_use=True)
    it.frames(VULKAN, 500, 2)
    it.frames(VULKAN, 1820, 5, first_use=True)
    assert it.phase("gpu") == "closed"


@pytest.mark.parametrize(("age_ms", "leaves"), [(600, True), (599, False)])
def test_a_frame_in_flight_counts_by_its_age(age_ms: float, leaves: bool) -> None:
    """A driver that hangs completes none."""
    it = bench()
    it.heat(gpu=66.0)
    for age in range(0, int(age_ms), 50):
        it.protocol.aging(VULKAN, age, it.now_s)

    it.protocol.aging(VULKAN, age_ms, it.now_s)
    assert (it.phase("gpu") == "open") is leaves


def test_a_frame_that_aged_does_not_count_twice() -> None:
    it = bench()
    it.heat(gpu=66.0)
    it.frames(VULKAN, 250)
    it.protocol.aging(VULKAN, 250, it.now_s)
    it.frames(VULKAN, 300)
    assert it.protocol.pair_state(VULKAN).streak == 2
    it.frames(VULKAN, 250)
    assert it.phase("gpu") == "open"


def test_age_says_nothing_while_it_is_cool() -> None:
    it = bench()
    it.protocol.aging(VULKAN, 60_000, it.now_s)
    assert it.phase("gpu") == "closed"


# Recover.
def tripped(**changes: object) -> Bench:
    it = bench(**changes)
    it.trip(VULKAN, 70.0)
    return it


def test_recover_takes_hold_cool_and_ten_good_frames() -> None:
    it = tripped()
    it.heat(gpu=57.9)
    hold_s = it.protocol.device_state("gpu").breaker.hold_s
    assert 120 <= hold_s <= 132
    it.frames(NPU, 100, 40, period_s=1.0)
    assert it.phase("gpu") == "open", "the hold is not over"
    it.frames(NPU, 100, 100, period_s=1.0)
    assert it.phase("gpu") == "half_open"
    assert it.protocol.admit(VULKAN, it.now_s).probe
    it.run(2.5)
    assert it.phase("gpu") == "ramping"
    assert [probe.lease for probe in it.probes] == [1, 2, 3]
    shares = []
    for _ in range(3):
        shares.append(it.protocol.admit(VULKAN, it.now_s).share)
        it.run(10)

    assert shares == [1 / 8, 1 / 2, 1.0]
    assert it.phase("gpu") == "closed"


@pytest.mark.parametrize(("celsius", "recovers"), [(57.999, True), (58.0, False)])
def test_it_must_be_cool(celsius: float, recovers: bool) -> None:
    it = tripped()
    it.heat(gpu=celsius)
    it.frames(NPU, 100, 200, period_s=1.0)
    assert (it.phase("gpu") == "half_open") is recovers


def test_a_fall_back_at_150_ms_beside_a_cool_gpu() -> None:
    """Not under 120 ms, but at its own pace."""
    it = tripped()
    it.heat(gpu=40.0)
    it.frames(CPU, 150, 200, period_s=1.0)
    assert it.phase("gpu") == "half_open"


@pytest.mark.parametrize(("run_ms", "good"), [(120.0, True), (120.1, False)])
def test_the_refuge_must_run_at_its_pace(run_ms: float, good: bool) -> None:
    """1.2 times its median of 100 ms."""
    it = bench()
    it.learn(NPU, 100)
    it.trip(VULKAN, 70.0)
    it.heat(gpu=40.0)
    it.frames(NPU, run_ms, 140, period_s=1.0)
    assert (it.phase("gpu") == "half_open") is good


def test_a_refuge_that_is_never_good_is_forgiven_after_three_holds() -> None:
    it = bench()
    it.learn(NPU, 100)
    it.trip(VULKAN, 70.0)
    it.heat(gpu=40.0)
    hold_s = it.protocol.device_state("gpu").breaker.hold_s
    it.frames(NPU, 300, int(3 * hold_s) - 1, period_s=1.0)
    assert it.phase("gpu") == "open"
    it.frames(NPU, 300, 3, period_s=1.0)
    it.run(0.5)
    assert it.phase("gpu") == "half_open"


def test_without_traffic_one_hold_is_enough() -> None:
    it = tripped()
    it.heat(gpu=40.0)
    it.run(119)
    assert it.phase("gpu") == "open"
    it.run(14)
    assert it.phase("gpu") == "half_open"


def test_a_die_that_its_refuge_keeps_warm() -> None:
    """62 °C for ever: the GPU gets a part of the frames, and energy decides."""
    it = bench()
    it.trip(VULKAN, 66.0)
    it.heat(gpu=63.001)
    it.run(119)
    assert not it.allowed(VULKAN)
    it.run(2)
    answer = it.protocol.admit(VULKAN, it.now_s)
    assert (answer.allowed, answer.share, answer.least_energy) == (True, 0.25, True)
    assert it.protocol.admit(NPU, it.now_s).least_energy
    assert it.phase("gpu") == "open"
    it.heat(gpu=50.0)
    it.run(200)
    assert it.phase("gpu") == "closed"
    assert not it.protocol.admit(NPU, it.now_s).least_energy


def test_what_is_closed_for_heat_stays_in_reserve_until_it_is_probed() -> None:
    it = bench()
    assert not it.protocol.admit(VULKAN, it.now_s).reserve
    it.trip(VULKAN)
    answer = it.protocol.admit(VULKAN, it.now_s)
    assert (answer.allowed, answer.share, answer.reserve) == (False, 0.0, True)
    assert not it.protocol.admit(NPU, it.now_s).reserve
    it.heat(gpu=40.0)
    while it.phase("gpu") == "open":
        assert it.protocol.admit(VULKAN, it.now_s).reserve
        it.run(0.5)

    assert it.phase("gpu") == "half_open"
    assert not it.protocol.admit(VULKAN, it.now_s).reserve


def test_what_failed_is_not_in_reserve() -> None:
    it = bench()
    for _ in range(3):
        it.protocol.failure(VULKAN, "error", "vulkan", -1, it.now_s)

    answer = it.protocol.admit(VULKAN, it.now_s)
    assert (answer.allowed, answer.reserve) == (False, False)
    it.trip(OPENCL)
    assert not it.protocol.admit(VULKAN, it.now_s).reserve, "hot, and failed"
    assert it.protocol.admit(OPENCL, it.now_s).reserve


def test_a_die_that_cools_by_three_degrees_is_left_alone() -> None:
    it = bench()
    it.trip(VULKAN, 66.0)
    it.heat(gpu=63.0)
    it.run(200)
    assert not it.allowed(VULKAN)


def test_a_bad_probe_doubles_the_hold_up_to_half_an_hour() -> None:
    it = tripped()
    it.heat(gpu=40.0)
    it.good_probes = False
    holds = [it.protocol.device_state("gpu").breaker.hold_s]
    for _ in range(7):
        it.run(holds[-1] + 3, step_s=1.0)
        holds.append(it.protocol.device_state("gpu").breaker.hold_s)

    for index, hold_s in enumerate(holds):
        exact_s = min(120 * 2**index, 1800)
        assert max(120, 0.9 * exact_s) <= hold_s <= min(1.1 * exact_s, 1800)

    assert len({round(hold_s / 120, 3) for hold_s in holds[:4]}) == 4


def test_a_probe_that_does_not_answer_is_a_bad_one() -> None:
    it = tripped()
    it.heat(gpu=40.0)
    it.answers = False
    it.run_until("half_open")
    it.run(0.5)
    (probe,) = it.probes
    it.run(2.5)
    assert it.phase("gpu") == "open"
    assert it.protocol.device_state("gpu").breaker.hold_level == 1
    it.protocol.probe_result(probe.target, probe.lease, True, it.now_s)
    assert it.phase("gpu") == "open", "its lease is over"


def test_a_probe_given_up_is_neither_good_nor_bad() -> None:
    it = tripped()
    it.heat(gpu=40.0)
    it.good_probes = None
    it.run(200)
    assert it.phase("gpu") == "half_open"
    assert len(it.probes) > 10
    assert it.protocol.device_state("gpu").breaker.hold_level == 0
    it.good_probes = True
    it.run(5)
    assert it.phase("gpu") == "ramping"


def test_probes_wait_for_an_idle_device_but_not_for_ever() -> None:
    it = tripped()
    it.heat(gpu=40.0)
    it.frames(NPU, 100, 140, period_s=1.0)
    assert it.phase("gpu") == "half_open"
    start_s = it.protocol.device_state("gpu").breaker.since_s
    it.now_s = start_s + 9.9
    assert it.protocol.tick(it.now_s, busy=["gpu"]) == []
    it.now_s = start_s + 10.1
    assert len(it.protocol.tick(it.now_s, busy=["gpu"])) == 1


def test_a_trip_soon_after_closing_doubles_and_calm_halves() -> None:
    it = tripped()
    it.heat(gpu=40.0)
    it.run(200)
    assert it.phase("gpu") == "closed"
    it.trip(VULKAN, 70.0)
    assert it.protocol.device_state("gpu").breaker.hold_level == 1
    it.heat(gpu=40.0)
    it.run(300)
    assert it.phase("gpu") == "closed"
    it.run(598, step_s=1.0)
    it.run(40, step_s=1.0)
    assert it.protocol.device_state("gpu").breaker.hold_level == 0
    it.trip(VULKAN, 70.0)
    assert it.protocol.device_state("gpu").breaker.hold_level == 0, "10 minutes are over"


def test_at_most_one_switch_a_minute() -> None:
    """20 to 60 s of time constant, 48 °C idle and 85 °C loaded, and slow above 70 °C."""
    for tau_s in (20.0, 40.0, 60.0):
        it = Bench()
        it.learn(VULKAN, 30)
        it.learn(NPU, 40)
        celsius, place, moves = 48.0, VULKAN, []
        it.heat(gpu=celsius, npu=40.0, cpu=40.0)
        for step in range(900 * 4):
            it.now_s += 0.25
            goal = 85.0 if place == VULKAN else 48.0
            slope = (goal - celsius) / tau_s
            celsius += slope * 0.25
            reading = Reading(round(celsius * 1000), "measured", 0.0, slope * 1000)
            it.protocol.reading("gpu", reading, it.now_s)
            for probe in it.protocol.tick(it.now_s):
                it.protocol.probe_result(probe.target, probe.lease, True, it.now_s)

            answer = it.protocol.admit(VULKAN, it.now_s)
            runs_here = answer.allowed and (step % 8) < round(8 * answer.share)
            place = VULKAN if runs_here else NPU
            slow = place == VULKAN and celsius > 70
            it.protocol.frame(place, 60 if slow else 30, it.now_s)
            opened = [event for event in it.events() if event.after == "open"]
            moves += [event.now_s for event in opened]

        gaps = [later - sooner for sooner, later in pairwise(moves)]
        assert all(gap_s > 60 for gap_s in gaps)


# Shedding.
def warm(celsius: float, slope_c_per_s: float) -> Bench:
    it = Bench()
    it.heat(gpu=40.0, npu=40.0, cpu=40.0)
    told = Reading(round(celsius * 1000), "measured", 0.0, slope_c_per_s * 1000)
    it.protocol.reading("gpu", told, it.now_s)
    return it


@pytest.mark.parametrize(
    ("celsius", "slope", "sheds"),
    [
        (55.0, 0.501, True),
        (55.0, 0.5, False),
        (65.001, 0.0, True),
        (65.0, -1.0, False),
        (65.001, -1.0, True),
    ],
)
def test_the_forecast_of_20_s_sheds(celsius: float, slope: float, sheds: bool) -> None:
    it = warm(celsius, slope)
    share = it.protocol.admit(VULKAN, it.now_s).share
    assert share == (0.75 if sheds else 1.0)
    assert it.protocol.people_state(GPU) == ("shedding" if sheds else "normal")


def test_steps_dwell_and_the_exit_band() -> None:
    it = warm(66.0, 0.0)
    it.temperatures_c["gpu"] = 66.0
    shares = []
    for _ in range(6):
        shares.append(it.protocol.admit(VULKAN, it.now_s).share)
        it.run(10)

    assert shares == [3 / 4, 1 / 2, 1 / 4, 1 / 8, 1 / 8, 1 / 8]
    it.heat(gpu=62.0)
    it.run(60)
    assert it.protocol.admit(VULKAN, it.now_s).share == 1 / 8, "within the band"
    it.heat(gpu=61.9)
    shares = []
    for _ in range(4):
        shares.append(it.protocol.admit(VULKAN, it.now_s).share)
        it.run(10)

    assert shares == [1 / 4, 1 / 2, 3 / 4, 1.0]
    assert it.phase("gpu") == "closed"


def test_noise_around_the_trip_does_not_flip_it() -> None:
    """69.6 and 70.1 of the field, around ours."""
    it = Bench()
    it.heat(gpu=40.0, npu=40.0, cpu=40.0)
    for step in range(400):
        it.now_s += 0.25
        it.heat(gpu=64.8 if step % 2 else 65.3)

    changes = [event for event in it.events() if event.kind == "transition"]
    assert [event.after for event in changes] == ["shedding"]


def test_nothing_is_shed_without_another_place() -> None:
    it = Bench(backends=("vulkan",))
    it.heat(gpu=80.0)
    it.run(60)
    assert it.protocol.admit(VULKAN, it.now_s).share == 1.0
