"""Scenario files: read, checked, and drawn at random."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from switchgear.daemon.simulation.random_devices import is_random, random_devices
from switchgear.daemon.simulation.scenario import (
    SCENARIOS,
    find,
    known_scenarios,
    read_scenario,
    read_table,
    scenario_of,
)
from switchgear.ipc.errors import BadConfiguration

PHONE = tomllib.loads((SCENARIOS / "phone.toml").read_text())
RANDOM = SCENARIOS / "random.toml"


def test_every_scenario_that_comes_along_is_sound() -> None:
    names = [name for name in known_scenarios() if not is_random(read_table(find(name)))]

    assert names == ["board", "fanless", "hot_car", "laptop", "phone"]
    for name in names:
        assert read_scenario(name).name == name


def test_the_phone_has_the_numbers_of_its_file() -> None:
    phone = read_scenario("phone")

    assert phone.nodes["gpu"].r_k_w == 3.0
    assert (phone.nodes["gpu"].to, phone.nodes["skin"].to) == ("die", "ambient")
    assert phone.backends["npu"].frame_ms == 31.0
    assert phone.governor.clocks[-1] == 0.3
    assert phone.load.fps == 30.0
    assert not phone.faults_per_h


def changed(path: str, value: object) -> dict[str, Any]:
    """The phone with one value set, or taken away with None."""
    table = copy.deepcopy(PHONE)
    *above, last = path.split("/")
    part: dict[str, Any] = table
    for name in above:
        part = part.setdefault(name, {})

    if value is None:
        del part[last]
    else:
        part[last] = value

    return table


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("ambient_c", None, "phone.ambient_c"),
        ("ambient_c", "warm", "phone.ambient_c"),
        ("ambient_c", True, "phone.ambient_c"),
        ("ambient_c", float("nan"), "phone.ambient_c"),
        ("colour", "red", "unknown key 'colour'"),
        ("nodes/gpu/c", 0.0, "phone.nodes.gpu.c"),
        ("nodes/gpu/mass", 3.0, "unknown key 'mass'"),
        ("nodes/gpu/r_to_skin", 3.0, "one r_to_NODE"),
        ("nodes/gpu", 3.0, "not a table"),
        ("nodes/skin/r_to_ambient", None, "one r_to_NODE"),
        ("nodes/die", {"c": 1.0, "r_to_gpu": 1.0}, "the way to ambient"),
        ("sensors/gpu/node", "moon", "no node 'moon'"),
        ("sensors/gpu/node", 7, "a name"),
        ("governor/clocks", [0.9, 0.8], "from 1.0 downward"),
        ("governor/clocks", [1.0, 1.0], "from 1.0 downward"),
        ("governor/clocks", [], "a list of numbers"),
        ("backends/cpu", None, "has a cpu backend"),
        ("backends/warp", PHONE["backends"]["cpu"], "unknown name 'warp'"),
        ("backends/cpu/jitter", -0.1, "phone.backends.cpu.jitter"),
        ("idle_w/moon", 1.0, "no node 'moon'"),
        ("background/moon", {"busy_w": 1, "on_s": 1, "off_s": 1}, "no node 'moon'"),
        ("limits/recover_c", 65.0, "recover_c is below trip_c"),
        ("faults/flood", 1.0, "unknown name 'flood'"),
        ("load/fps", -1.0, "phone.load.fps"),
        ("load/slots", 0, "phone.load.slots"),
    ],
)
def test_what_does_not_hold_together_is_refused_with_its_place(
    path: str, value: object, said: str
) -> None:
    with pytest.raises(BadConfiguration, match=said):
        scenario_of(changed(path, value), "phone")


def test_a_file_that_is_not_there_or_no_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="phone"):
        read_scenario("moon")

    broken = tmp_path / "broken.toml"
    broken.write_text("[nodes")
    with pytest.raises(BadConfiguration, match="broken"):
        read_scenario(str(broken))


def test_a_scenario_may_be_a_file_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text((SCENARIOS / "phone.toml").read_text())

    assert read_scenario(str(own)).name == "own"


def test_random_devices_are_the_same_for_the_same_seed() -> None:
    devices = random_devices(RANDOM, count=20)

    assert devices == random_devices(RANDOM, count=20)
    assert devices[:5] == random_devices(RANDOM, count=5)
    assert devices != random_devices(RANDOM, seed=1, count=20)
    assert len({device.ambient_c for device in devices}) == 20


def test_random_devices_stay_within_their_ranges() -> None:
    phone = read_scenario("phone")
    devices = random_devices(RANDOM)

    assert len(devices) == 200
    for device in devices:
        assert 5.0 <= device.ambient_c <= 40.0
        assert 65.0 <= device.governor.block_limit_c <= 95.0
        assert device.faults_per_h["vulkan_device_lost"] == 1.0
        for name, node in device.nodes.items():
            assert 0.5 <= node.c_j_k / phone.nodes[name].c_j_k <= 3.0
            assert 0.6 <= node.r_k_w / phone.nodes[name].r_k_w <= 1.6

        for name, backend in device.backends.items():
            assert 0.4 <= backend.frame_ms / phone.backends[name].frame_ms <= 2.5
            assert backend.jitter == phone.backends[name].jitter

        assert ("opencl" in device.backends) == ("opencl_int4" in device.backends)

    without_npu = sum("npu" not in device.backends for device in devices)
    # 0.35 of 200, three deviations either way.
    assert 50 <= without_npu <= 90


@pytest.mark.parametrize(
    "text",
    [
        "count = 3",
        "colour = 1\ncount = 3\nseed = 1",
        'seed = 1\ncount = 1\n[factor]\n"nodes.*.c" = 3\n[uniform]\n[absent]\n[faults]',
        "seed = 1\ncount = 1\n[factor]\n[uniform]\nmoon_c = [1, 2]\n[absent]\n[faults]",
    ],
)
def test_a_file_of_random_devices_that_is_wrong_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(text)

    with pytest.raises(BadConfiguration, match="odd"):
        random_devices(path)
