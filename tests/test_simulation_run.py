"""Runs in virtual time: nothing is lost, the same seed is the same run, ours holds its bars."""

from __future__ import annotations

import dataclasses
from xml.etree import ElementTree as ET

import pytest

from switchgear.daemon.routing.ring import replay
from switchgear.daemon.simulation import catalogue
from switchgear.daemon.simulation.comparison import simulate, standing, summaries
from switchgear.daemon.simulation.metrics import (
    Result,
    most_within,
    percentile,
    swing_pct,
    window_rates,
)
from switchgear.daemon.simulation.ours import Ours
from switchgear.daemon.simulation.picture import picture
from switchgear.daemon.simulation.random_devices import random_devices
from switchgear.daemon.simulation.run import Simulation
from switchgear.daemon.simulation.scenario import SCENARIOS, Scenario, read_scenario
from switchgear.ipc.errors import BadRequest

PHONE = read_scenario("phone")


def shortened(scenario: Scenario, seconds: float, fps: float | None = None) -> Scenario:
    load = scenario.load if fps is None else dataclasses.replace(scenario.load, fps=fps)
    return dataclasses.replace(scenario, duration_s=seconds, load=load)


def test_rates_are_counted_in_windows_after_the_first_minute() -> None:
    ends = [59.9, 60.0, 65.0, 69.9, 70.0, 79.9, 80.0]

    assert window_rates(ends, 85.0) == [0.3, 0.2]
    assert window_rates(ends, 60.0) == []


def test_the_swing_is_half_the_middle_range_over_the_mean() -> None:
    # 41 rates: the 2.5th percentile is the second, the 97.5th the second last.
    rates = [0.0, 20.0, *[30.0] * 37, 40.0, 99.0]

    mean = sum(rates) / 41
    assert swing_pct(rates) == pytest.approx(100.0 * 10.0 / mean)
    assert swing_pct([30.0, 30.0]) == 0.0


def test_percentiles_lie_between_the_nearest_values() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50.0) == 2.5
    assert percentile([7.0], 97.5) == 7.0
    assert percentile([], 50.0) != percentile([], 50.0)


def test_the_most_switches_within_a_minute() -> None:
    assert most_within([], 60.0) == 0
    assert most_within([0.0, 59.9, 60.0, 119.0], 60.0) == 3
    assert most_within([0.0, 60.0, 120.0], 60.0) == 1


def test_the_same_seed_is_the_same_run_and_another_is_not() -> None:
    short = shortened(PHONE, 20.0)

    first, _ = simulate(short, "ours", 1)
    again, _ = simulate(short, "ours", 1)
    other, _ = simulate(short, "ours", 2)

    assert dataclasses.asdict(first) == dataclasses.asdict(again)
    assert first.median_ms != other.median_ms


@pytest.mark.parametrize("policy", catalogue.NAMES)
def test_each_policy_answers_what_is_offered(policy: str) -> None:
    result, trace = simulate(shortened(PHONE, 20.0), policy, 1)

    assert result.offered == pytest.approx(600, abs=1)
    assert result.lost == 0
    # Two may be under way when the run ends.
    assert 0 <= result.offered - result.answered - result.superseded <= 2
    assert len(trace.seconds) == 20
    assert result.energy_j > 0.0


def test_always_the_gpu_heats_until_it_is_throttled() -> None:
    result, trace = simulate(shortened(PHONE, 600.0, fps=0.0), "always-gpu", 1)

    clocks = {clocks[trace.blocks.index("gpu")] for _, _, clocks in trace.seconds}
    assert min(clocks) < 0.5
    assert result.swing_pct >= 35.0


def test_ours_keeps_the_rate_of_the_phone() -> None:
    result, _ = simulate(shortened(PHONE, 120.0), "ours", 1)

    assert result.swing_pct <= 3.0
    assert result.in_time == result.answered == result.offered - result.superseded - 1
    assert result.lost == 0
    assert result.worst_switches_per_min <= 1


def test_ours_for_performance_leaves_the_gpu_before_it_is_throttled() -> None:
    result, trace = simulate(shortened(PHONE, 200.0, fps=0.0), "ours:max_performance", 1)
    fixed, _ = simulate(shortened(PHONE, 200.0, fps=0.0), "always-npu", 1)

    assert set(result.shares) == {"vulkan", "npu"}
    assert result.mean_fps >= fixed.mean_fps
    assert result.switches == 1
    assert {clocks[trace.blocks.index("gpu")] for _, _, clocks in trace.seconds} == {1.0}


def test_the_decisions_of_a_run_are_replayed_to_the_same_choices() -> None:
    simulation = Simulation(shortened(PHONE, 60.0, fps=0.0), 1)
    ours = Ours(simulation, 1, "max_performance")
    trace = simulation.run(ours)

    assert len(ours.ring) > 1000
    for entry in ours.ring:
        assert replay(entry) == entry.verdict

    answered = list(ours.ring)[: len(trace.backends)]
    chosen = [entry.inputs.rows[entry.verdict.chosen].key for entry in answered]
    assert chosen == trace.backends[: len(chosen)]


def faulty(kind: str, per_hour: float = 120.0) -> Scenario:
    return dataclasses.replace(shortened(PHONE, 80.0), faults_per_h={kind: per_hour})


@pytest.mark.parametrize("kind", ["npu_hang", "npu_unsupported", "sensor_lost"])
def test_faults_lose_no_frame_of_ours(kind: str) -> None:
    simulation = Simulation(faulty(kind), 3)
    ours = Ours(simulation, 3)
    trace = simulation.run(ours)

    assert trace.lost == 0
    assert len(trace.ends_s) >= 0.9 * trace.offered
    if kind != "sensor_lost":
        assert "vulkan" in set(trace.backends)


def test_a_lost_gpu_is_probed_before_it_serves_again() -> None:
    scenario = faulty("vulkan_device_lost")
    simulation = Simulation(scenario, 3)
    ours = Ours(simulation, 3, "max_performance")
    trace = simulation.run(ours)

    assert trace.lost == 0
    phases = [event.after for event in ours.protocol.events() if event.kind == "transition"]
    assert phases[:3] == ["open", "half_open", "ramping"]
    assert trace.probes >= 3


def test_a_backend_that_refuses_the_model_ends_the_fixed_policy_only() -> None:
    scenario = faulty("npu_unsupported")
    fixed, _ = simulate(scenario, "always-npu", 3)
    ours, _ = simulate(scenario, "ours", 3)

    assert fixed.lost > 100
    assert ours.lost == 0


def test_unknown_policies_and_absent_backends_are_refused() -> None:
    with pytest.raises(BadRequest, match="threshold"):
        catalogue.check("magic")

    with pytest.raises(BadRequest, match="max_efficiency"):
        catalogue.check("ours:magic")

    with pytest.raises(BadRequest, match="no policy"):
        catalogue.check("report:max_efficiency")

    fanless = read_scenario("fanless")
    assert "always-npu" not in catalogue.names_for(fanless)
    with pytest.raises(BadRequest, match="has no npu"):
        simulate(fanless, "always-npu", 1)


def row(policy: str, in_time: int, energy_mj: float) -> Result:
    return Result(
        policy=policy,
        answered=1000,
        offered=1000,
        superseded=0,
        lost=0,
        in_time=in_time,
        mean_fps=30.0,
        swing_pct=0.0,
        median_ms=30.0,
        tail_ratio=1.0,
        switches=0,
        worst_switches_per_min=0,
        probes=0,
        energy_j=energy_mj,
        energy_per_frame_mj=energy_mj,
        shares={},
    )


@pytest.mark.parametrize(
    ("ours", "best", "good"),
    [
        ((1000, 100.0), "other", True),  # as many in time, 2 % more energy
        ((1000, 103.0), "other", False),
        ((981, 90.0), "other", True),  # 2 % fewer in time
        ((979, 90.0), "other", False),
        ((1000, 97.0), "ours", True),
    ],
)
def test_the_best_has_the_most_in_time_and_then_the_least_energy(
    ours: tuple[int, float], best: str, good: bool
) -> None:
    results = {
        "ours": row("ours", *ours),
        "other": row("other", 999, 98.5),
        "late": row("late", 900, 10.0),
    }

    found = standing(results)

    assert (found.best, found.good) == (best, good)


def test_a_summary_counts_each_policy_where_it_can_run() -> None:
    devices = [
        {"ours": row("ours", 1000, 90.0), "always-gpu": row("always-gpu", 800, 120.0)},
        {"ours": row("ours", 1000, 90.0)},
    ]

    ours, gpu = summaries(devices)

    assert (ours.devices, ours.good, ours.in_time) == (2, 2, 1.0)
    assert (gpu.devices, gpu.good, gpu.in_time) == (1, 0, 0.8)


def test_a_picture_has_a_block_for_each_run() -> None:
    short = shortened(PHONE, 20.0)
    runs = [(name, simulate(short, name, 1)[1]) for name in ("always-gpu", "ours")]

    text = picture("phone <30 fps>", runs, short.duration_s)

    root = ET.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}g")) == 2
    # Four temperatures and two lines of frame times, in each block.
    assert len(root.findall(f".//{space}polyline")) == 12
    texts = [node.text for node in root.iter(f"{space}text")]
    assert {"phone <30 fps>", "ours", "always-gpu", "vulkan", "skin"} <= set(texts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
def test_the_bars_on_the_phone_for_any_seed(seed: int) -> None:
    offered, _ = simulate(PHONE, "ours", seed)
    fast, _ = simulate(shortened(PHONE, PHONE.duration_s, fps=0.0), "ours", seed)
    fixed, _ = simulate(shortened(PHONE, PHONE.duration_s, fps=0.0), "always-npu", seed)
    gpu, _ = simulate(PHONE, "always-gpu", seed)

    assert gpu.swing_pct >= 35.0
    assert offered.swing_pct <= 3.0
    assert fast.swing_pct <= 7.0
    assert fast.mean_fps >= fixed.mean_fps
    assert max(offered.lost, fast.lost) == 0
    assert max(offered.worst_switches_per_min, fast.worst_switches_per_min) <= 1


@pytest.mark.slow
def test_ours_is_as_good_as_the_best_on_random_devices() -> None:
    good = 0
    devices = random_devices(SCENARIOS / "random.toml", count=20)
    for number, device in enumerate(devices):
        short = shortened(device, 300.0)
        results = {
            name: simulate(short, name, number)[0] for name in catalogue.names_for(device)
        }
        good += standing(results).good

    assert good >= 18
