"""Whether the device is too warm: limits per domain, and sensors that answer or do not."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from profile_helpers import ZONES, profile
from sysfs_tree import add_zone

from switchgear.daemon.thermal import heat as heat_module
from switchgear.daemon.thermal.heat import Heat, Limit, limits
from switchgear.daemon.thermal.zones import Sensor, read_sensor
from switchgear.fingerprints.zones_model import Reading, TripPoint, Zone

CPU_ZONE = Zone("cpu-thermal", "cpu-thermal", "cpu")
GPU_ZONE = Zone(
    "gpu-thermal", "gpu-thermal", "gpu", trips=(TripPoint("passive", 75000, 75000),)
)
NONE_MEASURED = ()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a sensor that hangs is not waited for; a busy machine is."""
    monkeypatch.setattr(heat_module, "LOOK_LIMIT_S", 15.0)


async def look_anew(heat: Heat) -> None:
    """A look at the sensors as they are now: one that was asked for before may be under way,
    and is the answer to the first."""
    for _ in range(2):
        await heat.look()


def by_name(found: tuple[Limit, ...]) -> dict[str, tuple[tuple[str, ...], float]]:
    return {limit.name: (limit.zones, limit.cool_c) for limit in found}


def test_without_a_profile_each_part_has_its_own_zones() -> None:
    """7 C below the kernel's passive trip, or below 65 C."""
    found = limits(NONE_MEASURED, (CPU_ZONE, GPU_ZONE), {})
    assert by_name(found) == {
        "cpu": (("cpu-thermal",), 58.0),
        "gpu": (("gpu-thermal",), 68.0),
    }


def test_a_part_without_zones_is_not_held_to_the_zones_of_another() -> None:
    """The CPU's operator knows better than the default for a GPU that may not be there."""
    found = by_name(limits(NONE_MEASURED, (CPU_ZONE,), {"cpu": 100}))
    assert found["cpu"] == (("cpu-thermal",), 93.0)
    assert all(cool_c == 93.0 for zones, cool_c in found.values() if zones)


def test_with_a_profile_its_devices_count_and_the_operator_of_now() -> None:
    known = profile()
    (gpu,) = (device for device in known.devices if device.kind == "gpu")
    found = by_name(limits(known.devices, ZONES, {}))
    assert found["gpu"] == (gpu.domain.zones, 68.0)
    assert found["cpu"][1] == 78.0
    found = by_name(limits(known.devices, ZONES, {gpu.device_id: 90, "cpu": 70}))
    assert (found["gpu"][1], found["cpu"][1]) == (83.0, 63.0)


def test_a_measured_threshold_stays_unless_the_operator_speaks() -> None:
    known = profile()
    devices = tuple(
        device.model_copy(
            update={
                "threshold": device.threshold.model_copy(
                    update={"source": "measured", "throttle_c": 55.0, "recover_c": 48.0}
                )
            }
        )
        for device in known.devices
    )
    assert by_name(limits(devices, ZONES, {}))["gpu"][1] == 48.0
    assert by_name(limits(devices, ZONES, {"gpu": 90}))["gpu"][1] == 83.0


def test_the_hottest_zone_of_a_domain_counts(tmp_path: Path) -> None:
    add_zone(tmp_path, 0, "cpu0-thermal", 40_000)
    hot = add_zone(tmp_path, 1, "cpu1-thermal", 61_300)

    async def look() -> None:
        heat = Heat(tmp_path, {})
        assert heat.hot() == "", "nothing was read yet"
        await heat.look()
        assert heat.hot() == "the cpu is at 61.3 C, tests run below 58 C"
        (hot / "temp").write_text("-273000\n")
        await look_anew(heat)
        assert heat.hot() == ""

    asyncio.run(look())


def test_zones_that_the_kernel_has_renumbered_are_found_again(tmp_path: Path) -> None:
    zone = add_zone(tmp_path, 0, "cpu-thermal", 40_000)

    async def look() -> None:
        heat = Heat(tmp_path, {})
        await heat.look()
        (zone / "type").write_text("gpu-thermal\n")
        (zone / "temp").write_text("90000\n")
        # Not a look, which finds the sensors anew by itself: a reading under way.
        await heat._begin().wait()
        assert heat.hot().startswith("the gpu is at 90.0 C")

    asyncio.run(look())


def test_a_sensor_that_hangs_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_zone(tmp_path, 0, "cpu-thermal", 90_000)
    ends, hangs = threading.Event(), threading.Event()
    begun: list[str] = []

    def hanging(sensor: Sensor) -> Reading:
        begun.append(sensor.zone.zone_id)
        hangs.set()
        ends.wait()
        return read_sensor(sensor)

    monkeypatch.setattr(heat_module, "read_sensor", hanging)
    monkeypatch.setattr(heat_module, "LOOK_LIMIT_S", 0.05)

    async def look() -> None:
        heat = Heat(tmp_path, {})
        await heat.look()
        assert heat.hot() == ""
        assert await asyncio.to_thread(hangs.wait, 10)
        # One thread hangs, however often it is asked.
        await heat.look()
        assert begun == ["cpu-thermal"]
        ends.set()
        await heat._begin().wait()
        assert heat.hot().startswith("the cpu is at 90.0 C")

    asyncio.run(look())


def test_a_reading_of_long_ago_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_zone(tmp_path, 0, "cpu-thermal", 90_000)

    async def look() -> None:
        heat = Heat(tmp_path, {})
        await heat.look()
        assert heat.hot() != ""
        monkeypatch.setattr(heat_module, "FORGOTTEN_S", 0.0)
        assert heat.hot() == ""

    asyncio.run(look())
