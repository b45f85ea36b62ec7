"""Filter, slope, stuck sensors, domains and sleep: numbers in, readings out."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from switchgear.daemon.protocol.reading import NO_SENSOR
from switchgear.daemon.thermal.domain import Domain
from switchgear.daemon.thermal.filter import ZoneFilter
from switchgear.daemon.thermal.forecast import Slope, forecast_mc, headroom_s
from switchgear.daemon.thermal.stuck import StuckSensors
from switchgear.daemon.thermal.suspend import SuspendWatch


# The filter.
def test_the_first_temperature_is_taken_as_it_is() -> None:
    zone = ZoneFilter()
    zone.take(47_300, 5.0)
    assert (zone.value_mc, zone.taken_s) == (47_300.0, 5.0)


def test_a_step_is_followed_within_the_time_constant() -> None:
    """After one second 63 % of the step, less what the median holds back."""
    zone = ZoneFilter()
    for number in range(4):
        zone.take(40_000, number * 0.01)

    start_s = 0.03
    for number in range(1, 102):
        zone.take(50_000, start_s + number * 0.01)

    assert zone.value_mc == pytest.approx(40_000 + 10_000 * (1 - exp(-1)), abs=100)


@pytest.mark.parametrize("spike_mc", [120_000, 1_500])
def test_one_odd_number_does_not_pass(spike_mc: int) -> None:
    zone = ZoneFilter()
    for number in range(10):
        zone.take(spike_mc if number == 5 else 50_000, number * 0.1)
        assert zone.value_mc == 50_000


def test_nor_does_one_at_the_start() -> None:
    zone = ZoneFilter()
    for number, value in enumerate((50_000, 120_000, 50_000)):
        zone.take(value, number * 0.1)

    assert zone.value_mc == 50_000


def test_a_failed_read_keeps_the_value() -> None:
    zone = ZoneFilter()
    zone.take(50_000, 0.0)
    zone.take(None, 1.0)
    assert (zone.value_mc, zone.taken_s, zone.failing) == (50_000.0, 0.0, True)
    zone.take(51_000, 2.0)
    assert not zone.failing


@pytest.mark.parametrize(("gap_s", "anew"), [(10.0, False), (10.1, True)])
def test_after_a_gap_it_starts_anew(gap_s: float, anew: bool) -> None:
    zone = ZoneFilter()
    for number in range(3):
        zone.take(80_000, number * 0.1)

    zone.take(40_000, 0.2 + gap_s)
    assert (zone.value_mc == 40_000) is anew


def test_what_comes_out_of_order_is_left_out() -> None:
    zone = ZoneFilter()
    zone.take(50_000, 2.0)
    zone.take(90_000, 1.0)
    assert zone.value_mc == 50_000


@given(st.lists(st.tuples(st.integers(-30_000, 140_000), st.floats(0.001, 30)), min_size=1))
def test_the_filter_stays_within_what_it_was_given(steps: list[tuple[int, float]]) -> None:
    zone = ZoneFilter()
    now_s, seen = 0.0, []
    for value, gap_s in steps:
        now_s += gap_s
        seen.append(value)
        zone.take(value, now_s)
        assert zone.value_mc is not None
        assert min(seen) - 1e-6 <= zone.value_mc <= max(seen) + 1e-6


# The slope.
@pytest.mark.parametrize("period_s", [0.025, 0.25, 1.0])
def test_a_slope_is_found_at_every_rate(period_s: float) -> None:
    slope = Slope()
    for number in range(int(10 / period_s)):
        slope.take(40_000 + 700 * number * period_s, number * period_s)

    assert slope.mc_per_s == pytest.approx(700, rel=0.01)


def test_too_short_a_time_has_no_slope() -> None:
    slope = Slope()
    for number in range(20):
        slope.take(40_000 + 1000 * number, number * 0.1)

    assert slope.mc_per_s == 0.0


def test_an_old_slope_is_forgotten() -> None:
    slope = Slope()
    for number in range(40):
        slope.take(40_000 + 500 * number, number * 0.25)

    for number in range(40, 80):
        slope.take(60_000, number * 0.25)

    assert slope.mc_per_s == pytest.approx(0, abs=1e-6)
    slope.forget()
    assert slope.mc_per_s == 0.0


def test_headroom() -> None:
    assert forecast_mc(50_000, 500, 20) == 60_000
    assert headroom_s(50_000, 500, 65_000) == 30
    assert headroom_s(65_000, -500, 65_000) == 0
    assert headroom_s(64_999, 0, 65_000) == float("inf")


# Stuck sensors.
def stuck_after(seconds: int, moved_mc: int) -> bool:
    """A sensor that says 40.2 °C for ever beside two that warm by `moved_mc` over the time."""
    stuck = StuckSensors()
    last = False
    for second in range(0, seconds + 1, 5):
        for name in ("a", "b"):
            stuck.take(name, 40_000 + moved_mc * second // seconds + (second // 5) % 2, second)

        last = stuck.take("dead", 40_200, second)

    return last


@pytest.mark.parametrize(
    ("seconds", "moved_mc", "stuck"),
    [(400, 8_000, True), (400, 2_000, False), (290, 20_000, False)],
)
def test_a_sensor_that_never_moves(seconds: int, moved_mc: int, stuck: bool) -> None:
    assert stuck_after(seconds, moved_mc) is stuck


def test_all_at_rest_is_not_stuck() -> None:
    stuck = StuckSensors()
    for second in range(0, 2000, 5):
        assert not any(stuck.take(name, 40_000, second) for name in ("a", "b", "c"))


def test_one_alone_cannot_be_told() -> None:
    stuck = StuckSensors()
    assert not any(stuck.take("a", 40_000, second) for second in range(0, 2000, 5))


def test_it_is_sound_as_soon_as_it_moves() -> None:
    stuck = StuckSensors()
    for second in range(0, 400, 5):
        stuck.take("a", 40_000 + 20 * second, second)
        stuck.take("dead", 40_200, second)

    assert stuck.take("dead", 40_200, 400)
    assert not stuck.take("dead", 40_300, 405)
    stuck.forget()
    assert not stuck.take("dead", 40_300, 410)


# Domains.
def test_the_hottest_that_answers_counts() -> None:
    gpu = Domain(["g0", "g1"])
    gpu.take("g0", 50_000, 1.0)
    gpu.take("g1", 60_000, 1.0)
    assert gpu.reading(1.1)[:2] == (60_000, "measured")
    gpu.take("g1", None, 2.0)
    assert gpu.reading(2.1)[:2] == (50_000, "measured")
    gpu.take("another", 99_000, 2.0)
    assert gpu.reading(2.1)[:2] == (50_000, "measured")


def test_measured_held_lost() -> None:
    gpu = Domain(["g"])
    assert gpu.reading(0.0) == NO_SENSOR
    gpu.take("g", None, 0.0)
    assert gpu.reading(0.0) == NO_SENSOR, "it never answered"
    gpu.take("g", 50_000, 10.0)
    assert gpu.reading(12.0)[:3] == (50_000, "measured", 2000.0)
    assert gpu.reading(12.1).kind == "held", "no try came"
    gpu.take("g", None, 11.0)
    assert gpu.reading(11.0)[:3] == (50_000, "held", 1000.0)
    assert gpu.reading(20.0).kind == "held"
    lost = gpu.reading(20.1)
    assert (lost.temperature_mc, lost.kind) == (None, "lost")
    assert lost.age_ms == pytest.approx(10_100)
    gpu.take("g", 40_000, 30.0)
    assert gpu.reading(30.0)[:2] == (40_000, "measured")


def test_anothers_sensor_makes_an_estimate() -> None:
    npu = Domain(["soc"], shared=True)
    npu.take("soc", 50_000, 1.0)
    assert npu.reading(1.0).kind == "estimated"


def test_without_sensors_there_is_no_reading() -> None:
    assert Domain([]).reading(5.0) == NO_SENSOR


def test_a_reading_tells_the_slope() -> None:
    gpu = Domain(["g"])
    for number in range(400):
        gpu.take("g", 40_000 + 25 * number, number * 0.025)

    assert gpu.reading(10.0).slope_mc_per_s == pytest.approx(1000, rel=0.05)
    gpu.forget()
    assert gpu.reading(10.0) == NO_SENSOR


# Sleep.
def test_sleep_is_told_by_two_clocks() -> None:
    watch = SuspendWatch()
    second = 1_000_000_000
    assert watch.slept_s(100 * second, 200 * second) == 0
    assert watch.slept_s(101 * second, 201 * second + 400_000_000) == 0
    assert watch.slept_s(102 * second, 302 * second) == pytest.approx(99.6)
    assert watch.slept_s(103 * second, 303 * second) == 0
