"""How long a run takes, how long a lane is waited for, what an inference costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_helpers import measured

from switchgear.daemon.routing.estimates import (
    JUMP_FRAMES,
    RELAX_S,
    STALE_S,
    EnergyEstimate,
    LaneLoad,
    ServiceEstimate,
)
from switchgear.daemon.routing.trend import Trend


def test_a_prior_counts_until_the_first_run() -> None:
    estimate = ServiceEstimate(80.0, "rule of thumb")
    assert (estimate.source, estimate.expected_ms(0.0)) == ("prior", 80.0)

    estimate.observe(20.0, 1.0)

    assert (estimate.source, estimate.expected_ms(1.0)) == ("measured", 20.0)


def test_a_prior_is_above_zero() -> None:
    with pytest.raises(ValueError, match="above 0"):
        ServiceEstimate(0.0)


def test_a_hiccup_hardly_moves_the_estimate() -> None:
    estimate = measured(30.0)

    estimate.observe(3000.0, 1.0)

    assert estimate.median_ms == pytest.approx(30.0, rel=0.02)


def test_three_hiccups_in_a_row_are_the_new_pace() -> None:
    estimate = measured(30.0)
    for _ in range(JUMP_FRAMES):
        estimate.observe(90.0, 1.0)

    assert estimate.median_ms == 90.0


def test_hiccups_on_both_sides_are_no_new_pace() -> None:
    estimate = measured(30.0)
    for run_ms in (90.0, 1.0, 90.0, 1.0, 90.0, 1.0):
        estimate.observe(run_ms, 1.0)

    assert estimate.median_ms == pytest.approx(30.0, rel=0.05)


def test_a_step_of_the_clock_is_followed_within_a_second_of_frames() -> None:
    estimate = measured(28.0)
    for _ in range(30):
        estimate.observe(28.0 / 0.85, 1.0)

    assert estimate.median_ms == pytest.approx(28.0 / 0.85, rel=0.03)
    assert estimate.cool_ms == pytest.approx(28.0, rel=0.02)


def test_a_slowed_pair_that_rests_goes_back_to_its_cool_time() -> None:
    estimate = measured(30.0)
    for _ in range(100):
        estimate.observe(90.0, 10.0)

    slow_ms = estimate.median_ms
    assert estimate.expected_ms(10.0 + STALE_S) == slow_ms
    halfway_ms = estimate.expected_ms(10.0 + STALE_S + RELAX_S)
    assert estimate.cool_ms < halfway_ms < slow_ms
    assert estimate.expected_ms(1e4) == pytest.approx(estimate.cool_ms, rel=1e-3)


@given(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=200))
def test_an_estimate_stays_within_what_was_seen(runs: list[float]) -> None:
    estimate = ServiceEstimate(1.0)
    for number, run_ms in enumerate(runs):
        estimate.observe(run_ms, float(number))

    low, high = min(runs), max(runs)
    assert low * (1 - 1e-9) <= estimate.median_ms <= high * (1 + 1e-9)
    assert low * (1 - 1e-9) <= estimate.cool_ms <= high * (1 + 1e-9)
    assert estimate.spread_ms >= 0.0
    for later_s in (0.0, 40.0, 1e5):
        expected_ms = estimate.expected_ms(len(runs) + later_s)
        assert min(estimate.cool_ms, estimate.median_ms) * (1 - 1e-9) <= expected_ms
        assert expected_ms <= estimate.median_ms * (1 + 1e-9)


@given(st.integers(0, 2**32), st.floats(0.01, 0.15))
def test_an_estimate_of_noisy_runs_is_near_their_median(seed: int, jitter: float) -> None:
    draw = random.Random(seed)
    estimate = ServiceEstimate(500.0)
    for number in range(300):
        estimate.observe(40.0 * draw.lognormvariate(0.0, jitter), float(number))

    # The mean of 16 runs: four deviations of it, and the skew.
    assert estimate.median_ms == pytest.approx(40.0, rel=4.0 * jitter / 4.0 + jitter**2)


def test_a_lane_is_waited_for_by_what_runs_and_what_stands_before() -> None:
    load = LaneLoad()
    assert load.wait_ms(5.0) == 0.0

    load.queued(30.0)
    load.queued(10.0)
    load.left(30.0)
    load.started(30.0, 5.0)

    assert load.wait_ms(5.0) == 40.0
    assert load.wait_ms(5.020) == pytest.approx(20.0)

    load.ended()
    load.left(10.0)
    assert load.wait_ms(5.03) == 0.0


def test_a_run_over_its_time_looks_worse_from_moment_to_moment() -> None:
    load = LaneLoad()
    load.started(30.0, 0.0)

    assert load.wait_ms(0.100) == pytest.approx(70.0)
    assert load.wait_ms(1.000) == pytest.approx(970.0)


@given(st.lists(st.floats(0.001, 1e3), max_size=50))
def test_an_emptied_queue_is_not_waited_for(expected: list[float]) -> None:
    load = LaneLoad()
    for expected_ms in expected:
        load.queued(expected_ms)

    for expected_ms in expected:
        load.left(expected_ms)

    assert 0.0 <= load.wait_ms(1.0) < 1e-6


def test_energy_is_modelled_until_it_is_measured() -> None:
    energy = EnergyEstimate(4.0)
    assert (energy.source, energy.per_inference_mj(20.0)) == ("modelled", 80.0)

    energy.observe(100.0)
    energy.observe(116.0)

    assert (energy.source, energy.per_inference_mj(20.0)) == ("measured", 101.0)


def test_the_slope_of_a_ramp_is_found_under_noise() -> None:
    draw = random.Random(3)
    trend = Trend()
    slopes = []
    for tick in range(600):
        now_s = tick * 0.1
        trend.read(40.0 + 0.2 * now_s + draw.gauss(0.0, 0.4), now_s)
        slopes.append(trend.slope_c_per_s)

    assert slopes[-1] == pytest.approx(0.2, abs=0.04)
    assert trend.temperature_c == pytest.approx(40.0 + 0.2 * 59.9, abs=0.6)


def test_a_trend_that_forgot_starts_anew() -> None:
    trend = Trend()
    trend.read(80.0, 0.0)
    trend.forget()
    assert trend.slope_c_per_s == 0.0

    trend.read(30.0, 100.0)

    assert (trend.temperature_c, trend.slope_c_per_s) == (30.0, 0.0)
