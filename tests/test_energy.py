"""Energy per inference: what counts as measured, what does not, and what it costs when idle.

The arithmetic runs in virtual time, with meters that a test reads for the thread; the thread
itself and a daemon run on a fake sysfs.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
from daemon_process import DaemonProcess
from power_tree import RANGE_UJ, add_powercap
from replaced_file import replace_file

from switchgear.backends.generate.identity import identity
from switchgear.client import connect
from switchgear.daemon.protocol.topology import PairKey
from switchgear.daemon.routing.estimates import EnergyEstimate, ServiceEstimate
from switchgear.daemon.switchboard import energy as energy_module
from switchgear.daemon.switchboard.energy import (
    MAX_FAILURES,
    SILENT_S,
    EnergyWatch,
    energy_per_run_mj,
)
from switchgear.daemon.switchboard.place import Place
from switchgear.daemon.switchboard.power_meters import PACKAGE, SYSTEM, Meter, Taken
from switchgear.daemon.switchboard.topology import Part

TICK_S = 0.05
IDLE_W = 2.0
POWERCAP = Meter("powercap", PACKAGE, (Path("powercap/rapl:0/energy_uj"),), (RANGE_UJ,))
RAIL = Meter("hwmon", PACKAGE, (Path("hwmon/hwmon0/power1_input"),))
BATTERY = Meter("battery", SYSTEM, (Path("power_supply/BAT0"),))
PARTS = {"cpu": Part("cpu", "cpu"), "vulkan": Part("gpu", "gpu")}


@pytest.mark.parametrize(
    ("energy_uj", "idle_uw", "passed_s", "runs", "energy_mj"),
    [
        (6e6, 2e6, 1.0, 10, 400.0),
        (6e6, 2e6, 2.0, 10, 200.0),
        # Not known, not more than idling takes, nothing ran.
        (None, 2e6, 1.0, 10, None),
        (6e6, None, 1.0, 10, None),
        (6e6, 6e6, 1.0, 10, None),
        (6e6, 7e6, 1.0, 10, None),
        (6e6, 2e6, 1.0, 0, None),
    ],
)
def test_energy_per_run(
    energy_uj: float | None,
    idle_uw: float | None,
    passed_s: float,
    runs: int,
    energy_mj: float | None,
) -> None:
    assert energy_per_run_mj(energy_uj, idle_uw, passed_s, runs) == energy_mj


def place(backend: str = "cpu", device: str = "cpu", model: str = "m") -> Place:
    key = PairKey(model, backend, "auto")
    return Place(key, device, device, ServiceEstimate(10.0), EnergyEstimate(4.0))


class Rig:
    """A watch in virtual time. `answers` is False while the thread hangs; `silent` meters have
    nothing to say, `broken` ones fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *meters: Meter) -> None:
        monkeypatch.setattr(energy_module, "Sampler", lambda *_: self)
        self.disturbed = False
        self.now_s = 100.0
        self.asks = 0
        self.answers = True
        self.silent = False
        self.broken = False
        self._asked: tuple[Meter, ...] = ()
        self._power_w = IDLE_W
        self._energy_uj = 0.0
        self.watch = EnergyWatch(Path("/sys"), lambda: self.disturbed)
        self.watch.start(PARTS)
        self.watch._found(list(meters), [])

    # What the watch calls.

    def start(self) -> None:
        pass

    def ask(self, meters: tuple[Meter, ...]) -> None:
        assert not self._asked, "asked again before the answer"
        self.asks += 1
        self._asked = meters

    def _read(self) -> Taken | str | None:
        if self.silent:
            return None

        if self.broken:
            return "No such device"

        return Taken(self.now_s, (int(self._energy_uj) % RANGE_UJ,), self._power_w * 1e6)

    # What a test calls.

    def pass_by(
        self,
        seconds: float,
        runs_per_tick: dict[Place, int] | None = None,
        *,
        power_w: float = IDLE_W,
        running: tuple[Place | None, ...] = (),
    ) -> None:
        self._power_w = power_w
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            self._energy_uj += power_w * 1e6 * TICK_S
            for one, runs in (runs_per_tick or {}).items():
                for _ in range(runs):
                    self.watch.ran(one)

            self.watch.tick(self.now_s, (*(runs_per_tick or ()), *running))
            if self._asked and self.answers:
                asked, self._asked = self._asked, ()
                self.watch._sampled({meter: self._read() for meter in asked})


@pytest.mark.parametrize("meter", [POWERCAP, RAIL, BATTERY])
def test_work_of_one_place_is_measured(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, cpu = Rig(monkeypatch, meter), place()
    assert rig.watch.source("cpu") == "modelled"
    rig.pass_by(3.0)
    # 20 ticks a second of 2 runs, 4 W above idling: 100 mJ.
    rig.pass_by(20.0, {cpu: 2}, power_w=IDLE_W + 4.0)
    assert cpu.energy.source == "measured"
    assert cpu.energy.per_inference_mj(10.0) == pytest.approx(100.0, rel=0.1)
    assert rig.watch.source("cpu/auto") == f"measured ({meter.method})"
    assert rig.watch.source("cpu") == f"measured ({meter.method})"
    assert rig.watch.source("gpu") == "modelled"


def test_a_counter_that_comes_round_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, cpu = Rig(monkeypatch, POWERCAP), place()
    rig._energy_uj = RANGE_UJ - 20e6
    rig.pass_by(3.0)
    rig.pass_by(20.0, {cpu: 2}, power_w=IDLE_W + 4.0)
    assert rig._energy_uj > RANGE_UJ
    assert cpu.energy.per_inference_mj(10.0) == pytest.approx(100.0, rel=0.05)


def test_bursts_count_with_the_pauses_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, cpu = Rig(monkeypatch, POWERCAP), place()
    rig.pass_by(3.0)
    for _ in range(20):
        rig.pass_by(0.5, {cpu: 4}, power_w=IDLE_W + 8.0)
        rig.pass_by(0.5)

    assert cpu.energy.per_inference_mj(10.0) == pytest.approx(100.0, rel=0.1)


def test_two_places_in_an_interval_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, one, other = Rig(monkeypatch, POWERCAP), place(), place("vulkan", "gpu")
    rig.pass_by(3.0)
    rig.pass_by(10.0, {one: 2, other: 1}, power_w=9.0)
    assert one.energy.source == other.energy.source == "modelled"


@pytest.mark.parametrize("other", [None, place("vulkan", "gpu"), place(model="another")])
def test_a_run_elsewhere_that_does_not_end_counts_too(
    other: Place | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, cpu = Rig(monkeypatch, POWERCAP), place()
    rig.pass_by(3.0)
    rig.pass_by(10.0, {cpu: 2}, power_w=9.0, running=(other,))
    assert cpu.energy.source == "modelled"


def test_few_runs_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, cpu = Rig(monkeypatch, POWERCAP), place()
    rig.pass_by(3.0)
    for _ in range(10):
        rig.pass_by(TICK_S, {cpu: 1}, power_w=9.0)
        rig.pass_by(1.0, power_w=9.0)

    assert cpu.energy.source == "modelled"


def test_nothing_is_learnt_while_a_model_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, cpu = Rig(monkeypatch, POWERCAP), place()
    rig.disturbed = True
    rig.pass_by(10.0, power_w=12.0)
    rig.disturbed = False
    rig.pass_by(3.0)
    rig.disturbed = True
    rig.pass_by(10.0, {cpu: 2}, power_w=20.0)
    assert cpu.energy.source == "modelled"
    rig.disturbed = False
    rig.pass_by(20.0, {cpu: 2}, power_w=IDLE_W + 4.0)
    assert cpu.energy.per_inference_mj(10.0) == pytest.approx(100.0, rel=0.05)


def test_work_before_the_idle_power_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, cpu = Rig(monkeypatch, POWERCAP), place()
    rig.pass_by(10.0, {cpu: 2}, power_w=IDLE_W + 4.0)
    assert cpu.energy.source == "modelled"
    rig.pass_by(5.0)
    rig.pass_by(10.0, {cpu: 2}, power_w=IDLE_W + 4.0)
    assert cpu.energy.source == "measured"


def test_a_part_that_came_later_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, npu = Rig(monkeypatch, BATTERY), place("npu", "npu")
    rig.pass_by(5.0)
    rig.pass_by(10.0, {npu: 2}, power_w=IDLE_W + 4.0)
    # Nobody knew of it.
    assert npu.energy.source == "modelled"
    rig.watch.add(Part("npu", "npu"))
    rig.pass_by(20.0, {npu: 2}, power_w=IDLE_W + 4.0)
    assert npu.energy.per_inference_mj(10.0) == pytest.approx(100.0, rel=0.05)
    assert rig.watch.source("npu") == "measured (battery)"


def test_an_idle_daemon_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, cpu = Rig(monkeypatch, POWERCAP, RAIL), place()
    rig.pass_by(4.0)
    assert rig.watch._interval is None
    learnt = rig.asks
    rig.pass_by(600.0)
    assert rig.asks == learnt
    rig.pass_by(5.0, {cpu: 2}, power_w=6.0)
    rig.pass_by(5.0)
    worked = rig.asks
    assert worked > learnt
    rig.pass_by(600.0)
    assert rig.asks == worked


def test_a_battery_that_charges_is_asked_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, cpu = Rig(monkeypatch, BATTERY), place()
    rig.silent = True
    rig.pass_by(300.0, {cpu: 2}, power_w=9.0)
    assert rig.asks <= 300.0 / SILENT_S + 1
    rig.silent = False
    rig.pass_by(SILENT_S + 3.0)
    rig.pass_by(20.0, {cpu: 2}, power_w=IDLE_W + 4.0)
    assert rig.watch.source("cpu/auto") == "measured (battery)"


def test_a_meter_that_fails_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig, cpu = Rig(monkeypatch, POWERCAP), place()
    rig.pass_by(3.0)
    rig.broken = True
    before = rig.asks
    rig.pass_by(3600.0, {cpu: 2}, power_w=9.0)
    assert rig.asks == before + MAX_FAILURES
    assert not rig.watch.active
    assert rig.watch.source("cpu") == "modelled (powercap rapl:0: No such device)"
    assert len(caplog.messages) == 1


def test_a_thread_that_hangs_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, cpu = Rig(monkeypatch, POWERCAP), place()
    rig.pass_by(3.0)
    rig.pass_by(2.0, {cpu: 2}, power_w=6.0)
    rig.answers = False
    asked = rig.asks
    rig.pass_by(60.0, {cpu: 2}, power_w=30.0)
    assert rig.asks <= asked + 1
    # It comes back: that minute told too little to be a measurement.
    rig.answers = True
    rig.pass_by(20.0, {cpu: 2}, power_w=IDLE_W + 4.0)
    assert cpu.energy.per_inference_mj(10.0) == pytest.approx(100.0, rel=0.1)


# The thread.


def test_a_read_that_hangs_does_not_hold_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO that nobody writes to is a driver that sleeps in its read."""
    counter = add_powercap(tmp_path, "intel-rapl:0", "package-0", 1000)

    async def test() -> None:
        watch = EnergyWatch(tmp_path, lambda: False)
        watch.start(PARTS)
        while not watch.active:  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0)

        counter.unlink()
        os.mkfifo(counter)
        watch.tick(monotonic(), ())
        turns = 0
        for _ in range(100):
            await asyncio.sleep(0)
            watch.tick(monotonic(), ())
            turns += 1

        assert turns == 100
        assert watch._waiting
        watch.stop()
        # Nothing waits for it; here it is let go, so that no thread is left behind.
        counter.write_text("2000\n")
        await asyncio.to_thread(watch._sampler._thread.join)

    asyncio.run(asyncio.wait_for(test(), 15))


# A daemon.


class Machine(threading.Thread):
    """A package that takes 1 W, and 5 W more while `busy`."""

    def __init__(self, counter: Path) -> None:
        super().__init__()
        self.busy = False
        self._counter = counter
        self._end = threading.Event()

    def run(self) -> None:
        energy_uj, last_s = 0.0, monotonic()
        while not self._end.wait(0.02):
            now_s = monotonic()
            energy_uj += (6e6 if self.busy else 1e6) * (now_s - last_s)
            last_s = now_s
            replace_file(self._counter, b"%.0f\n" % energy_uj)

    def stop(self) -> None:
        self._end.set()
        self.join()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(add_powercap(tmp_path, "intel-rapl:0", "package-0", 0))
    made.start()
    yield made
    made.stop()


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_the_daemon_measures_and_says_so(tmp_path: Path, machine: Machine) -> None:
    config = f'[thermal]\nsysfs_root = "{tmp_path}"\n[routing]\npolicy = "max_efficiency"\n'
    with DaemonProcess(config=config) as daemon, connect(daemon.socket) as client:
        model = client.load_model(identity((4,), "float32"), "copy")
        inputs = {tensor.name: np.ones(tensor.shape, np.float32) for tensor in model.inputs}
        with client.open_session(model) as session:
            while not (devices := client.status()["devices"]):
                pass

            assert devices[0]["energy"] == "modelled"
            while client.status()["devices"][0]["energy"] != "measured (powercap)":
                # Work, then a pause in which the idle power is learnt.
                work(session, inputs, machine, 2.5)
                rest_s = monotonic() + 3.5
                while monotonic() < rest_s and not devices_measured(client):
                    threading.Event().wait(0.1)

            work(session, inputs, machine, 0.1)

        (decision,) = client.explain(1)
        assert decision["text"].endswith("; energy: cpu/auto measured (powercap)")


def devices_measured(client: Any) -> bool:
    return bool(client.status()["devices"][0]["energy"] != "modelled")


def work(session: Any, inputs: dict[str, Any], machine: Machine, seconds: float) -> None:
    machine.busy = True
    end_s = monotonic() + seconds
    while monotonic() < end_s:
        session.run(inputs)

    machine.busy = False
