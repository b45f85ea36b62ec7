"""Which part each backend runs on, and by what its heat is told."""

from __future__ import annotations

import pytest

from switchgear.daemon.switchboard.topology import heat_of, parts_of, topology_of
from switchgear.fingerprints.zones_model import TripPoint, Zone

GPU = {"device": "Mali", "device_type": "integrated", "device_uuid": "ab" * 16}
CARD = {"device": "Radeon", "device_type": "discrete", "pci_address": "0000:03:00.0"}


def names(identities: dict[str, dict[str, str]], **chosen: str) -> dict[str, str]:
    return {backend: part.name for backend, part in parts_of(identities, chosen).items()}


def test_one_gpu_through_two_apis_is_one_part() -> None:
    found = names({"cpu": {}, "vulkan": GPU, "opencl": GPU, "npu": {"device": "x"}})
    assert found == {"cpu": "cpu", "vulkan": "gpu", "opencl": "gpu", "npu": "npu"}


def test_an_api_that_tells_no_address_is_taken_for_the_gpu_that_is_there() -> None:
    assert names({"vulkan": GPU, "opencl": {"device": "Mali-G715"}})["opencl"] == "gpu"


def test_two_gpus_are_told_apart() -> None:
    assert names({"vulkan": CARD, "opencl": {**CARD, "pci_address": "0000:04:00.0"}}) == {
        "cpu": "cpu",
        "vulkan": "gpu",
        "opencl": "gpu2",
    }


def test_a_software_driver_runs_on_the_cpu() -> None:
    software = {"device": "llvmpipe", "device_type": "cpu"}
    assert names({"vulkan": software})["vulkan"] == "cpu"


def test_the_operator_goes_first() -> None:
    software = {"device": "llvmpipe", "device_type": "cpu"}
    parts = parts_of({"vulkan": software}, {"vulkan": "gpu2"})
    assert (parts["vulkan"].name, parts["vulkan"].kind) == ("gpu2", "gpu")


def zone(name: str, role: str, passive_mc: int | None = None) -> Zone:
    trips = () if passive_mc is None else (TripPoint("passive", passive_mc, passive_mc),)
    return Zone(name, name, role, trips=trips)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("passive_mc", "operator_c", "trip_mc", "hard_mc", "source"),
    [
        (None, {}, 65_000, 80_000, "default"),
        (95_000, {}, 95_000, 90_000, "kernel_passive_trip"),
        (95_000, {"gpu": 70.0}, 70_000, 90_000, "operator"),
    ],
)
def test_limits(
    passive_mc: int | None,
    operator_c: dict[str, float],
    trip_mc: int,
    hard_mc: int,
    source: str,
) -> None:
    parts = parts_of({"vulkan": GPU}, {})
    zones = (zone("gpu-thermal", "gpu", passive_mc), zone("cpu-thermal", "cpu"))
    heat = heat_of(parts["vulkan"], parts["vulkan"].apis, zones, operator_c)
    assert heat.sensors.zones == ("gpu-thermal",)
    assert (heat.trip_mc, heat.recover_mc) == (trip_mc, trip_mc - 7_000)
    assert (heat.hard_limit_mc, heat.source) == (hard_mc, source)


def test_the_topology_has_each_part_once() -> None:
    parts = parts_of({"vulkan": GPU, "opencl": GPU, "npu": {}}, {})
    topology = topology_of(parts, {})
    assert set(topology.devices) == {"cpu", "gpu", "npu"}
    assert topology.devices["cpu"].is_cpu
    assert topology.backends["opencl"] == "gpu"
