"""Breakers and temperatures in metrics and traces: the real protocol, a daemon's sensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from daemon_process import DaemonProcess
from protocol_helpers import Bench, pair
from sysfs_tree import add_zone

from switchgear.daemon.telemetry.exposition import parse
from switchgear.daemon.telemetry.recorder import Recorder
from switchgear.daemon.telemetry.switchboard_source import MAX_PAIRS, SwitchboardSource
from switchgear.fingerprints.zones_model import Zone

if TYPE_CHECKING:
    from pathlib import Path

    from switchgear.daemon.telemetry.families import Family

PARTS = {"cpu": "cpu", "vulkan": "gpu", "opencl": "gpu", "npu": "npu"}


class World:
    """A source on a real protocol; sensors and models are given. User 1 may see model `m`."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.recorder = Recorder()
        self.zones = [
            SimpleNamespace(
                zone=Zone("gpu-thermal", "gpu-thermal", "gpu"),
                temperature_mc=61_500,
                age_ms=20.0,
            )
        ]
        board = SimpleNamespace(
            protocol=self.bench.protocol,
            parts={backend: SimpleNamespace(name=name) for backend, name in PARTS.items()},
            heats={
                "gpu": SimpleNamespace(
                    sensors=SimpleNamespace(zones=("gpu-thermal",)), trip_mc=65_000
                )
            },
            watch=SimpleNamespace(states=lambda now_s: self.zones),
        )
        model = SimpleNamespace(digest="m")
        service: Any = SimpleNamespace(
            router=SimpleNamespace(board=board),
            is_operator=lambda uid: uid == 0,
            models=SimpleNamespace(all_for=lambda uid: [model] if uid in (0, 1) else []),
        )
        self.source = SwitchboardSource(service, self.recorder)

    def hear(self) -> None:
        for event in self.bench.events():
            self.source.heard(event)

    def families(self, viewer: int | None = None) -> dict[str, Family]:
        return {family.name: family for family in self.source.families(viewer)}


def test_nothing_is_told_before_the_switchboard_is_up() -> None:
    service: Any = SimpleNamespace(router=SimpleNamespace(board=None))
    source = SwitchboardSource(service, Recorder())
    assert list(source.families(None)) == []
    assert list(source.counters()) == []


def test_a_trip_and_its_recovery_are_counted() -> None:
    world = World()
    world.bench.trip()
    world.hear()
    found = world.families()
    state = found["switchgear_breaker_state"].samples
    assert state[("device", "gpu", "open")] == 1
    assert state[("device", "gpu", "closed")] == 0
    assert state[("backend", "vulkan", "closed")] == 1
    assert found["switchgear_breaker_trips_total"].samples == {("device", "gpu", "heat"): 1}
    assert found["switchgear_breaker_probes_total"].samples == {}
    world.bench.heat(gpu=40.0)
    world.bench.run_until("closed")
    world.hear()
    found = world.families()
    assert found["switchgear_breaker_state"].samples[("device", "gpu", "closed")] == 1
    assert found["switchgear_breaker_trips_total"].samples == {("device", "gpu", "heat"): 1}
    assert found["switchgear_breaker_probes_total"].samples == {("device", "gpu", "good"): 1}


def test_a_bad_probe_is_counted_as_such() -> None:
    world = World()
    world.bench.good_probes = False
    world.bench.trip()
    world.bench.heat(gpu=40.0)
    world.bench.run(600)
    world.hear()
    found = world.families()
    ((series, bad),) = found["switchgear_breaker_probes_total"].samples.items()
    assert series == ("device", "gpu", "bad")
    assert isinstance(bad, int)
    # Each one opens it again.
    trips = found["switchgear_breaker_trips_total"].samples.values()
    assert sum(value for value in trips if isinstance(value, int)) == 1 + bad
    assert found["switchgear_breaker_state"].samples[("device", "gpu", "open")] == 1


def test_a_pair_is_told_once_it_moved_and_to_who_may_see_its_model() -> None:
    world = World()
    assert not [
        key for key in world.families()["switchgear_breaker_state"].samples if key[0] == "pair"
    ]
    for _ in range(3):
        world.bench.now_s += 0.1
        world.bench.protocol.failure(pair("vulkan"), "error", "vulkan", -4, world.bench.now_s)

    world.hear()
    name = str(pair("vulkan"))
    for viewer, sees in ((None, True), (0, True), (1, True), (2, False)):
        states = world.families(viewer)["switchgear_breaker_state"].samples
        assert (("pair", name, "open") in states) is sees, viewer

    assert world.families()["switchgear_breaker_state"].samples[("pair", name, "open")] == 1


def test_pairs_are_bounded() -> None:
    world = World()
    for number in range(MAX_PAIRS + 5):
        key = pair("vulkan", "m", f"fp{number}")
        world.bench.protocol.add_pair(key)
        for _ in range(3):
            world.bench.now_s += 0.1
            world.bench.protocol.failure(key, "wrong", "switchgear", 0, world.bench.now_s)

    world.hear()
    states = world.families()["switchgear_breaker_state"].samples
    assert len({key[1] for key in states if key[0] == "pair"}) == MAX_PAIRS


def test_zones_have_their_device_and_its_headroom() -> None:
    world = World()
    world.zones.append(
        SimpleNamespace(zone=Zone("skin", "skin", "skin"), temperature_mc=33_000, age_ms=5.0)
    )
    world.zones.append(
        SimpleNamespace(zone=Zone("npu", "npu", "npu"), temperature_mc=None, age_ms=0.0)
    )
    found = world.families()
    assert found["switchgear_temperature_celsius"].samples == {
        ("gpu-thermal", "gpu"): 61.5,
        ("skin", ""): 33.0,
    }
    assert found["switchgear_headroom_celsius"].samples == {("gpu-thermal", "gpu"): 3.5}
    assert found["switchgear_temperature_age_seconds"].samples[("skin", "")] == 0.005
    assert set(found["switchgear_backend_device"].samples) == set(PARTS.items())
    assert list(world.source.counters()) == [
        ("zone gpu-thermal", "C", 61.5),
        ("zone skin", "C", 33.0),
    ]


def test_a_trace_has_the_protocols_events_and_a_user_those_of_the_own_models() -> None:
    world = World()
    everybody, owner, other = (world.recorder.watch(uid) for uid in (None, 1, 2))
    for _ in range(3):
        world.bench.now_s += 0.1
        world.bench.protocol.failure(pair("vulkan"), "error", "vulkan", -4, world.bench.now_s)

    world.bench.trip()
    world.hear()

    def tracks(watcher: Any) -> set[str]:
        return {event["name"].split(":")[0] for event in watcher.take()["events"]}

    assert tracks(everybody) == tracks(owner) >= {"device gpu", f"pair {pair('vulkan')}"}
    assert tracks(other) == {"device gpu"}


@pytest.mark.engine
def test_a_daemons_sensors(tmp_path: Path) -> None:
    add_zone(tmp_path, 0, "cpu-thermal", 45_250, trips=[("passive", 85_000, 2_000)])
    (tmp_path / "class").mkdir(exist_ok=True)
    config = f'[cpu]\nthreads = 1\n[thermal]\nsysfs_root = "{tmp_path}"\n'
    environment = {"SWITCHGEAR_PREPARE__ENABLED": "false"}
    with DaemonProcess(config=config, environment=environment) as daemon:
        found: dict[str, Family] = {}
        while "switchgear_temperature_celsius" not in found:
            text = daemon.call("GetMetrics")["parameters"]["text"]
            found = {family.name: family for family in parse(text)}

        assert found["switchgear_temperature_celsius"].samples == {
            ("cpu-thermal", "cpu"): 45.25
        }
        (headroom,) = found["switchgear_headroom_celsius"].samples.values()
        assert headroom == 85 - 45.25
        assert found["switchgear_breaker_state"].samples[("device", "cpu", "closed")] == 1
        assert found["switchgear_backend_device"].samples[("cpu", "cpu")] == 1
