"""The thermal network against solutions on paper, and the device around it."""

from __future__ import annotations

import dataclasses
import math

import pytest

from switchgear.daemon.simulation.device import TICK_S, Device
from switchgear.daemon.simulation.scenario import Node, Scenario, read_scenario
from switchgear.daemon.simulation.thermal import Network

PHONE = read_scenario("phone")


def test_one_node_follows_the_exponential() -> None:
    network = Network({"block": Node(12.0, "ambient", 4.0)}, 25.0, 0.1)
    for _ in range(480):
        network.step([2.0])

    # Time constant 48 s, 48 s passed, 8 K in the end.
    assert network.temperatures_c[0] == pytest.approx(25.0 + 8.0 * (1.0 - math.exp(-1.0)))


def test_two_nodes_follow_their_two_exponentials() -> None:
    c1, r1, c2, r2, power = 2.0, 3.0, 10.0, 5.0, 1.5
    nodes = {"block": Node(c1, "case", r1), "case": Node(c2, "ambient", r2)}
    network = Network(nodes, 0.0, 0.5)
    for _ in range(80):
        network.step([power, 0.0])

    # dx/dt = A x + b, solved by the eigenvalues of the 2x2 matrix.
    a, b = -1.0 / (r1 * c1), 1.0 / (r1 * c1)
    c, d = 1.0 / (r1 * c2), -1.0 / (r1 * c2) - 1.0 / (r2 * c2)
    middle, apart = (a + d) / 2.0, math.sqrt((a - d) ** 2 / 4.0 + b * c)
    fast, slow = middle - apart, middle + apart
    end = (power * (r1 + r2), power * r2)
    # The block's way to its end is m exp(fast t) + n exp(slow t), with m + n = -end and the
    # first slope power / c1.
    m = (power / c1 + slow * end[0]) / (fast - slow)
    n = -end[0] - m
    t = 40.0
    block = end[0] + m * math.exp(fast * t) + n * math.exp(slow * t)
    case = (
        end[1] + ((fast - a) * m * math.exp(fast * t) + (slow - a) * n * math.exp(slow * t)) / b
    )
    assert network.temperatures_c == pytest.approx([block, case], rel=1e-9)


def test_the_step_length_does_not_change_the_result() -> None:
    powers = [3.0, 1.0, 0.5, 0.0, 0.0]
    coarse = Network(PHONE.nodes, 25.0, 60.0)
    fine = Network(PHONE.nodes, 25.0, 0.1)
    coarse.step(powers)
    for _ in range(600):
        fine.step(powers)

    assert fine.temperatures_c == pytest.approx(coarse.temperatures_c, abs=1e-6)


def test_all_heat_goes_out_through_the_skin_in_the_end() -> None:
    network = Network(PHONE.nodes, 25.0, 1e6)
    network.step([5.9, 0.02, 0.35, 0.0, 0.0])

    by_name = dict(zip(network.names, network.temperatures_c, strict=True))
    assert by_name["skin"] == pytest.approx(25.0 + 4.8 * 6.27)
    assert by_name["die"] == pytest.approx(by_name["skin"] + 4.0 * 6.27)
    assert by_name["gpu"] == pytest.approx(by_name["die"] + 3.0 * 5.9)


def run(device: Device, seconds: float, gpu_w: float, start_s: float = 0.0) -> float:
    """Heats the GPU block all the time; the time afterwards."""
    ticks = round(seconds / TICK_S)
    for tick in range(1, ticks + 1):
        device.tick(start_s + tick * TICK_S, {"gpu": gpu_w * TICK_S}, {"gpu": TICK_S})

    return start_s + ticks * TICK_S


def quiet(scenario: Scenario) -> Scenario:
    sensors = {
        name: dataclasses.replace(sensor, noise_c=0.0, quantum_c=0.0)
        for name, sensor in scenario.sensors.items()
    }
    return dataclasses.replace(scenario, sensors=sensors, background={})


def test_the_governor_steps_down_over_the_limit_and_up_below_the_hysteresis() -> None:
    device = Device(quiet(PHONE), seed=1)
    now_s = 0.0
    seen = []
    for _ in range(300):
        now_s = run(device, 2.0, 9.0, now_s)
        seen.append((device.temperatures_c["gpu"], device.clocks["gpu"]))

    assert device.clocks["gpu"] < 1.0
    first = next(at for at, (_, clock) in enumerate(seen) if clock < 1.0)
    assert seen[first][1] == 0.85
    assert seen[first - 1][0] <= 85.0 < seen[first][0]

    for _ in range(600):
        now_s = run(device, 2.0, 0.0, now_s)

    assert device.clocks["gpu"] == 1.0


def test_a_slower_clock_takes_longer_and_less_power() -> None:
    scenario = dataclasses.replace(PHONE, backends=dict(PHONE.backends))
    device = Device(scenario, seed=1)
    full = (device.frame_ms("vulkan"), device.busy_w("vulkan"))
    again = Device(scenario, seed=1)
    again.clocks["gpu"] = 0.5

    assert again.frame_ms("vulkan") == pytest.approx(2.0 * full[0])
    assert again.busy_w("vulkan") == pytest.approx(full[1] * 0.5**2.4)


def test_a_sensor_lags_behind_its_node() -> None:
    device = Device(quiet(PHONE), seed=1)
    run(device, 3.0, 9.0)

    reading_c = device.readings["gpu"]
    assert reading_c is not None
    assert 25.0 < reading_c < device.temperatures_c["gpu"]


def test_a_sensor_reads_in_its_steps() -> None:
    device = Device(PHONE, seed=1)
    run(device, 1.0, 3.0)

    reading_c = device.readings["gpu"]
    assert reading_c is not None
    assert reading_c * 10.0 == pytest.approx(round(reading_c * 10.0), abs=1e-6)


def test_a_lost_sensor_reads_nothing_and_comes_back() -> None:
    device = Device(quiet(PHONE), seed=1)
    device.lose_sensor("gpu", 0.0)
    now_s = run(device, 1.0, 0.0)
    assert device.readings["gpu"] is None
    assert device.readings["npu"] is not None

    run(device, 600.0, 0.0, now_s)
    assert device.readings["gpu"] is not None


def test_the_background_heats_while_it_is_on() -> None:
    loaded = dataclasses.replace(quiet(PHONE), background=PHONE.background)
    busy, idle = Device(loaded, seed=1), Device(quiet(PHONE), seed=1)
    for device in (busy, idle):
        run(device, 19.0, 0.0)

    assert busy.temperatures_c["cpu"] > idle.temperatures_c["cpu"] + 2.0
    # Its energy is another app's.
    assert busy.energy_j == pytest.approx(idle.energy_j)
