"""The daemon's side of the sensors, with the real reader in its own process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sysfs_tree import add_zone

from switchgear.daemon.protocol.reading import NO_SENSOR, Reading
from switchgear.daemon.thermal import watch as watch_module
from switchgear.daemon.thermal.reader_packets import Found, Samples, unpack
from switchgear.daemon.thermal.watch import DeviceSensors, ThermalWatch

GPU = DeviceSensors(("gpu-thermal",), 58_000)


class Seen:
    """What the watch told, and a way to wait for it."""

    def __init__(self) -> None:
        self.readings: list[tuple[str, Reading]] = []
        self.resumed: list[float] = []
        self.changed = asyncio.Event()

    def reading(self, device: str, reading: Reading, now_s: float) -> None:
        self.readings.append((device, reading))
        self.changed.set()

    def found(self) -> None:
        self.changed.set()

    def slept(self, now_s: float) -> None:
        self.resumed.append(now_s)

    async def until(self, wanted: Callable[[], bool]) -> None:
        while not wanted():
            await self.changed.wait()
            self.changed.clear()


@asynccontextmanager
async def watching(root: Path) -> AsyncIterator[tuple[ThermalWatch, Seen]]:
    seen = Seen()
    watch = ThermalWatch(
        root, on_reading=seen.reading, on_resumed=seen.slept, on_found=seen.found
    )
    watch.follow({"gpu": GPU})
    watch.start()
    try:
        yield watch, seen
    finally:
        await watch.stop()


def run(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), 18))


def test_readings_arrive(tmp_path: Path) -> None:
    add_zone(tmp_path, 0, "gpu-thermal", 57_000)
    add_zone(tmp_path, 1, "cpu-thermal", 40_000)

    async def test() -> None:
        async with watching(tmp_path) as (watch, seen):
            assert watch.reading("gpu") == NO_SENSOR
            await seen.until(lambda: len(seen.readings) >= 20)
            device, reading = seen.readings[-1]
            assert (device, reading[:2]) == ("gpu", (57_000, "measured"))
            assert reading.age_ms < 1000
            assert watch.reading("cpu") == NO_SENSOR, "nobody follows it"
            assert watch.headroom_s("gpu", 57_000) == 0
            states = {state.zone.zone_id: state for state in watch.states()}
            assert states["cpu-thermal"].temperature_mc == 40_000

    run(test)


def test_a_sensor_that_vanishes_is_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = add_zone(tmp_path, 0, "gpu-thermal", 57_000)

    async def test() -> None:
        async with watching(tmp_path) as (watch, seen):
            await seen.until(lambda: len(seen.readings) >= 3)
            (folder / "temp").unlink()
            await seen.until(lambda: watch.reading("gpu").kind == "held")
            assert watch.reading("gpu").temperature_mc == 57_000
            (state,) = watch.states()
            assert (state.kind, state.reason) == ("held", "ENOENT: No such file or directory")

    with caplog.at_level(logging.WARNING):
        run(test)

    lines = [text for text in caplog.messages if "gpu-thermal" in text]
    assert len(lines) == 1, "a change is told once"


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_reader_that_dies_or_hangs_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(watch_module, "SILENT_S", 1.0)
    monkeypatch.setattr(watch_module, "RESTART_S", 0.05)
    folder = add_zone(tmp_path, 0, "gpu-thermal", 57_000)

    async def test() -> None:
        async with watching(tmp_path) as (watch, seen):
            watch._restart_s = 0.05
            await seen.until(lambda: bool(seen.readings))
            assert watch._child is not None
            os.kill(watch._child.pid, signal.SIGKILL if how == "dies" else signal.SIGSTOP)
            (folder / "temp").write_text("50000\n")
            count = len(seen.readings)
            await seen.until(lambda: watch.restarts == 1 and len(seen.readings) > count + 3)
            assert watch.reading("gpu").kind == "measured"

    run(test)


def test_a_reader_that_speaks_nonsense_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_zone(tmp_path, 0, "gpu-thermal", 57_000)

    def broken(packet: bytes) -> Samples | Found:
        monkeypatch.setattr(watch_module, "unpack", unpack)
        raise ValueError("nonsense")

    async def test() -> None:
        async with watching(tmp_path) as (watch, seen):
            watch._restart_s = 0.05
            await seen.until(lambda: bool(seen.readings))
            monkeypatch.setattr(watch_module, "unpack", broken)
            await seen.until(lambda: watch.restarts == 1)

    run(test)


def test_sleep_drops_what_was_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks part in a packet, as they do after a suspend."""
    add_zone(tmp_path, 0, "gpu-thermal", 57_000)
    ahead_ns = 0

    def slept(packet: bytes) -> Samples | Found:
        told = unpack(packet)
        if isinstance(told, Samples):
            return told._replace(boottime_ns=told.boottime_ns + ahead_ns)

        return told

    async def test() -> None:
        nonlocal ahead_ns
        monkeypatch.setattr(watch_module, "unpack", slept)
        async with watching(tmp_path) as (watch, seen):
            await seen.until(lambda: bool(seen.readings))
            assert seen.resumed == []
            ahead_ns = 3_600_000_000_000
            await seen.until(lambda: bool(seen.resumed))
            await seen.until(lambda: watch.reading("gpu").kind == "measured")
            assert len(seen.resumed) == 1

    run(test)


def test_devices_can_change(tmp_path: Path) -> None:
    add_zone(tmp_path, 0, "gpu-thermal", 57_000)
    add_zone(tmp_path, 1, "npu-thermal", 50_000)

    async def test() -> None:
        async with watching(tmp_path) as (watch, seen):
            await seen.until(lambda: bool(seen.readings))
            watch.follow({"gpu": GPU, "npu": DeviceSensors(("npu-thermal",), 58_000)})
            assert watch.reading("gpu").kind == "measured", "what is known is kept"
            await seen.until(lambda: any(device == "npu" for device, _ in seen.readings))

    run(test)


def test_no_sensors_at_all(tmp_path: Path) -> None:
    async def test() -> None:
        async with watching(tmp_path) as (watch, _):
            await watch.found.wait()
            assert watch.zones == ()
            assert watch.reading("gpu") == NO_SENSOR

    run(test)


def test_a_stop_leaves_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        descriptors = len(os.listdir("/proc/self/fd"))
        async with watching(tmp_path) as (watch, _):
            await watch.found.wait()
            child = watch._child
            assert child is not None

        assert not child.running
        assert len(os.listdir("/proc/self/fd")) == descriptors

    run(test)
