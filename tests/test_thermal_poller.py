"""The poller: rates, sensors that vanish, fail or hang, and the packets it is told by."""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sysfs_tree import add_hwmon, add_zone

from switchgear.daemon.thermal import poller as poller_module
from switchgear.daemon.thermal import zones
from switchgear.daemon.thermal.poller import Poller, eventfd_wake, interval_s
from switchgear.daemon.thermal.psutil_source import PsutilSource
from switchgear.daemon.thermal.reader_packets import (
    FAILED,
    HANGS,
    IMPLAUSIBLE,
    MAX_PACKET_BYTES,
    OK,
    Found,
    Sample,
    Samples,
    pack_orders,
    pack_samples,
    pack_zones,
    unpack,
    unpack_orders,
)
from switchgear.fingerprints.zones_model import Zone


class Driven:
    """A poller over a tree, driven by its own wake-ups; `read` is the lowest boundary."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, Any] = {}
        self.real = zones._read
        self.wake_fd, wake = eventfd_wake()
        monkeypatch.setattr(zones, "_read", self._read)
        self.poller = Poller(lambda: zones.find_sensors(root), zones.read_sensor, wake)

    def _read(self, path: str | Path) -> str:
        """What `os.read` of an attribute gives: from the tree, or as a test says."""
        answer = self.answers.get(Path(path).parent.name + "/" + Path(path).name)
        if isinstance(answer, OSError):
            raise answer

        if isinstance(answer, threading.Event):
            answer.wait()

        return self.real(path)

    def until(self, wanted: Any, limit: int = 2000) -> list[Sample]:
        """Works until `wanted(samples)` is true of all samples since."""
        seen: list[Sample] = []
        for _ in range(limit):
            _, samples = self.poller.work()
            seen += samples
            if wanted(seen):
                return seen

            select.select([self.wake_fd], [], [], min(0.05, self.poller.wait_s()))
            if select.select([self.wake_fd], [], [], 0)[0]:
                os.eventfd_read(self.wake_fd)

        raise AssertionError(f"never: {seen[-5:]}")

    def close(self) -> None:
        for answer in self.answers.values():
            if isinstance(answer, threading.Event):
                answer.set()

        for worker in self.poller.close():
            worker.join()

        os.close(self.wake_fd)

    def names(self) -> list[str]:
        found = self.poller.sensors
        return [zone.zone_id for zone in found.zones] if found is not None else []

    def found(self) -> list[str]:
        self.until(lambda _: self.poller.sensors is not None)
        return self.names()


@pytest.fixture
def driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:
    add_zone(tmp_path, 0, "gpu-thermal", 50_000)
    add_zone(tmp_path, 1, "cpu-thermal", 40_000)
    made = Driven(tmp_path, monkeypatch)
    yield made
    made.close()


BOTH = {"gpu-thermal": 58_000, "cpu-thermal": 58_000}


def values(samples: list[Sample], number: int) -> list[int]:
    return [
        sample.temperature_mc
        for sample in samples
        if sample.number == number and sample.status == OK
    ]


@pytest.mark.parametrize(
    ("temperature_mc", "limit_mc", "wait_s"),
    [
        (48_000, 58_000, 0.025),
        (47_999, 58_000, 0.1),
        (38_000, 58_000, 0.1),
        (37_999, 58_000, 0.25),
        (95_000, 58_000, 0.025),
        (40_000, None, 2.0),
        (None, 58_000, 1.0),
    ],
)
def test_rates(temperature_mc: int | None, limit_mc: int | None, wait_s: float) -> None:
    assert interval_s(temperature_mc, limit_mc) == wait_s
    assert poller_module.NEAR_S <= 0.033


def test_it_reads_what_is_there(driven: Driven) -> None:
    assert driven.found() == ["gpu-thermal", "cpu-thermal"]
    samples = driven.until(lambda seen: values(seen, 0) and values(seen, 1))
    assert (values(samples, 0)[0], values(samples, 1)[0]) == (50_000, 40_000)


def test_near_a_limit_it_reads_often(driven: Driven) -> None:
    driven.found()
    driven.poller.use({"gpu-thermal": 58_000}, find=False)
    samples = driven.until(lambda seen: len(values(seen, 0)) >= 10)
    # Nobody is decided by the other, which keeps its own pace however long this took.
    taken_ns = [s.taken_ns for s in samples if s.number == 1 and s.status == OK]
    pace_ns = poller_module.IDLE_S * 1e9
    assert all(later - before >= pace_ns for before, later in pairwise(taken_ns))


def test_a_sensor_that_hangs_holds_up_nobody(driven: Driven) -> None:
    driven.found()
    driven.until(lambda seen: values(seen, 0) and values(seen, 1))
    gate = threading.Event()
    driven.answers["thermal_zone0/temp"] = gate
    driven.poller.use({"gpu-thermal": 50_000, "cpu-thermal": 40_000}, find=False)
    samples = driven.until(
        lambda seen: (
            any(s.status == HANGS and s.number == 0 for s in seen)
            and len(values(seen, 1)) >= 20
        )
    )
    # The other one may count as hanging for a moment too, where its thread stood still.
    assert [s.number for s in samples if s.status == HANGS].count(0) == 1
    gate.set()
    del driven.answers["thermal_zone0/temp"]
    driven.until(lambda seen: len(values(seen, 0)) >= 3)


@pytest.mark.parametrize(
    "name", ["EIO", "ENODATA", "EAGAIN", "EINVAL", "ETIMEDOUT", "EACCES", "EPERM", "EBUSY"]
)
def test_each_error_is_told_by_its_number(driven: Driven, name: str) -> None:
    code: int = getattr(errno, name)
    driven.found()
    driven.poller.use(BOTH, find=False)
    driven.answers["thermal_zone0/temp"] = OSError(code, os.strerror(code))
    samples = driven.until(lambda seen: any(s.status == FAILED for s in seen))
    failed = next(sample for sample in samples if sample.status == FAILED)
    assert (failed.number, failed.errno) == (0, code)
    driven.until(lambda seen: len(values(seen, 1)) >= 1)


def test_a_lie_is_no_temperature(driven: Driven, tmp_path: Path) -> None:
    driven.found()
    driven.poller.use(BOTH, find=False)
    zone = tmp_path / "devices/virtual/thermal/thermal_zone0/temp"
    zone.write_text("-273000\n")
    driven.until(lambda seen: any(s.status == IMPLAUSIBLE and s.number == 0 for s in seen))


def test_a_fifo_without_a_writer_holds_up_nobody(driven: Driven, tmp_path: Path) -> None:
    driven.found()
    driven.poller.use(BOTH, find=False)
    temperature = tmp_path / "devices/virtual/thermal/thermal_zone0/temp"
    temperature.unlink()
    os.mkfifo(temperature)
    driven.until(lambda seen: any(s.status == IMPLAUSIBLE and s.number == 0 for s in seen))
    driven.until(lambda seen: len(values(seen, 1)) >= 1)


def test_a_zone_that_changes_its_number_is_found_again(
    driven: Driven, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller_module, "FAILING_S", 0.02)
    monkeypatch.setattr(poller_module, "FIND_AGAIN_S", 0.05)
    driven.poller._again_s = 0.05
    driven.found()
    for number, kind, temperature in ((0, "cpu-thermal", 41_000), (1, "gpu-thermal", 71_000)):
        folder = tmp_path / f"devices/virtual/thermal/thermal_zone{number}"
        (folder / "type").write_text(f"{kind}\n")
        (folder / "temp").write_text(f"{temperature}\n")

    driven.poller.use(BOTH, find=False)
    driven.until(lambda _: driven.names() == ["cpu-thermal", "gpu-thermal"])
    samples = driven.until(lambda seen: values(seen, 1))
    assert values(samples, 1)[-1] == 71_000


def test_a_zone_that_vanishes_and_comes_back(
    driven: Driven, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller_module, "FAILING_S", 0.02)
    monkeypatch.setattr(poller_module, "FIND_AGAIN_S", 0.05)
    monkeypatch.setattr(poller_module, "FIND_AGAIN_MAX_S", 0.05)
    driven.poller._again_s = 0.05
    driven.found()
    link = tmp_path / "class/thermal/thermal_zone0"
    target = os.readlink(link)
    link.unlink()
    driven.poller.use({"gpu-thermal": 58_000}, find=False)
    driven.until(lambda _: driven.names() == ["cpu-thermal"])
    link.symlink_to(target)
    driven.poller.use({"gpu-thermal": 58_000}, find=True)
    driven.until(lambda _: driven.names() == ["gpu-thermal", "cpu-thermal"])


def test_looking_for_sensors_may_hang_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller_module, "FIND_LIMIT_S", 0.05)
    monkeypatch.setattr(poller_module, "FIND_AGAIN_S", 0.05)
    add_zone(tmp_path, 0, "gpu-thermal", 50_000)
    driven = Driven(tmp_path, monkeypatch)
    gate = threading.Event()
    driven.answers["thermal_zone0/type"] = gate
    hung = driven.poller._worker
    driven.until(lambda _: driven.poller._worker is not hung)
    # The next one may take its time.
    monkeypatch.setattr(poller_module, "FIND_LIMIT_S", 10.0)
    del driven.answers["thermal_zone0/type"]
    gate.set()
    assert driven.found() == ["gpu-thermal"]
    driven.close()


def test_a_look_that_is_under_way_is_not_the_one_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller_module, "FIND_LIMIT_S", 60.0)
    add_zone(tmp_path, 0, "gpu-thermal", 50_000)
    driven = Driven(tmp_path, monkeypatch)
    gate, begun = threading.Event(), threading.Event()

    def find() -> Any:
        found = zones.find_sensors(tmp_path)
        begun.set()
        gate.wait()
        return found

    driven.poller._worker._find = find
    driven.poller.work()
    begun.wait()
    add_zone(tmp_path, 1, "cpu-thermal", 40_000)
    driven.poller.use({}, find=True)
    gate.set()
    driven.until(lambda _: driven.names() == ["gpu-thermal", "cpu-thermal"])
    driven.close()


# psutil.
class Entry:
    def __init__(self, label: str, current: object) -> None:
        self.label = label
        self.current = current


def test_psutil_adds_what_sysfs_does_not_have(tmp_path: Path) -> None:
    add_hwmon(tmp_path, 0, {"name": "k10temp", "temp1_input": 50_000, "temp1_label": "Tctl"})
    told = {
        "k10temp": [Entry("Tctl", 50.0)],
        "amdgpu": [Entry("edge", 61.5), Entry("edge", 62.0), Entry("", None)],
    }
    source = PsutilSource(lambda: told)
    found = source.add(zones.find_sensors(tmp_path))
    assert [zone.zone_id for zone in found.zones] == [
        "k10temp/Tctl",
        "amdgpu/edge",
        "amdgpu/edge#2",
    ]
    assert found.zones[1].role == "gpu"
    first, second = found.sensors[:2]
    assert source.read(first) is None, "sysfs reads its own"
    reading = source.read(second)
    assert reading is not None
    assert reading.temperature_mc == 61_500
    told.clear()
    gone = source.read(second)
    assert gone is not None
    assert gone.errno == errno.ENOENT


@pytest.mark.parametrize("error", [OSError("gone"), AttributeError("not on this system")])
def test_psutil_that_fails_adds_nothing(tmp_path: Path, error: Exception) -> None:
    def fail() -> Any:
        raise error

    assert PsutilSource(fail).add(zones.find_sensors(tmp_path)).sensors == ()


# Packets.
@given(
    st.lists(
        st.tuples(
            st.integers(0, 65_535),
            st.integers(0, 3),
            st.integers(0, 255),
            st.integers(-(2**31), 2**31 - 1),
            st.integers(0, 2**63),
        ),
        max_size=20,
    )
)
def test_samples_come_back(fields: list[tuple[int, int, int, int, int]]) -> None:
    samples = tuple(Sample(*each) for each in fields)
    assert unpack(pack_samples(3, 10, 20, samples)) == Samples(3, 10, 20, samples)


def test_zones_come_back(tmp_path: Path) -> None:
    add_zone(tmp_path, 0, "gpu-thermal", 1, trips=[("passive", 75_000, 2_000)])
    found = zones.find_sensors(tmp_path)
    assert unpack(pack_zones(7, found.zones, ["x"])) == Found(7, found.zones, ("x",))


def test_a_list_that_is_too_long_loses_its_trips() -> None:
    zone = Zone("g", "gpu-thermal", "gpu", cooling=tuple(f"fan{n}" for n in range(60)))
    many = [replace(zone, zone_id=f"g#{number}") for number in range(1500)]
    packet = pack_zones(1, many, [])
    assert len(packet) <= MAX_PACKET_BYTES
    found = unpack(packet)
    assert isinstance(found, Found)
    assert len(found.zones) == 1024


@given(st.binary(max_size=200))
def test_nonsense_is_refused(packet: bytes) -> None:
    for read in (unpack, unpack_orders):
        try:
            read(packet)
        except ValueError:
            pass


def test_orders_come_back() -> None:
    assert unpack_orders(pack_orders({"g": 58_000}, find=True)) == ({"g": 58_000}, True)
