"""Sustained load on the real thing: real daemon, workers and drivers, a zone tree that heats.

    python benchmarks/sustained.py [--quick | --minutes 30] [--fps 30] [--json FILE]

The temperature of each zone follows the measured busy time of that device's worker. Above the
throttling point the device is slowed at its real boundary: a Vulkan layer that delays each
submission, a delay in the test delegate's own run. The daemon knows none of this; it reads the
zones and times its frames. Vulkan is lavapipe (or whatever the machine has), the NPU the tests'
delegate; both are given the time of a phone's, so that what is measured is the loop.

A frame is offered every 1/FPS s and counts as lost when it is not answered without an error.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

import numpy as np
from figures import ROOT, Figures

sys.path.insert(0, str(ROOT / "tests"))
import native_build
from daemon_process import DaemonProcess
from small_network import small_network

from switchgear.client import Client, Result, Session, connect

QUICK_S: Final = 45.0
MINUTES: Final = 2.0
TRIP_C: Final = 65.0
STEP_S: Final = 0.05
# The protocol learns a pair's own pace from its first 100 warm frames.
SETTLE_FRAMES: Final = 110


@dataclass(slots=True)
class Device:
    """A device that heats. `frame_ms` is what it is slowed down to when cool, by its `delay`
    file; above `throttle_c` that grows `slower` times. Temperatures in C, times in s."""

    name: str
    backend: str
    zone: Path
    delay: Path
    frame_ms: float
    slower: float
    ambient_c: float
    rise_c: float
    tau_s: float
    throttle_c: float
    base_ms: float = 0.0
    per_submit: float = 1.0
    temperature_c: float = 0.0
    busy_s: float = 0.0
    throttled: bool = False

    def begin(self) -> None:
        self.temperature_c = self.ambient_c
        self.write()

    def step(self, passed_s: float) -> None:
        """Heats by the busy time since the last step, and throttles by what that leads to."""
        busy, self.busy_s = min(1.0, self.busy_s / passed_s), 0.0
        goal_c = self.ambient_c + self.rise_c * busy
        self.temperature_c += (goal_c - self.temperature_c) * min(1.0, passed_s / self.tau_s)
        if self.temperature_c > self.throttle_c:
            self.throttled = True
        elif self.temperature_c < self.throttle_c - 3.0:
            self.throttled = False

        self.write()

    def write(self) -> None:
        wanted_ms = self.frame_ms * (self.slower if self.throttled else 1.0)
        delay_us = max(0.0, wanted_ms - self.base_ms) * 1000 / self.per_submit
        replace(self.delay, f"{delay_us:.0f}\n")
        replace(self.zone, f"{self.temperature_c * 1000:.0f}\n")


def replace(path: Path, text: str) -> None:
    """A reader sees the old file or the new one."""
    aside = path.with_suffix(".new")
    aside.write_text(text)
    aside.rename(path)


class Heater(threading.Thread):
    """Moves the devices on; `busy` adds the time of a run that was measured."""

    def __init__(self, devices: list[Device]) -> None:
        super().__init__(name="heater")
        self._devices = {device.backend: device for device in devices}
        self._lock = threading.Lock()
        self._end = threading.Event()

    def busy(self, backend: str, run_s: float) -> None:
        device = self._devices.get(backend)
        if device is not None:
            with self._lock:
                device.busy_s += run_s

    def run(self) -> None:
        last_s = monotonic()
        while not self._end.wait(STEP_S):
            now_s = monotonic()
            with self._lock:
                for device in self._devices.values():
                    device.step(now_s - last_s)

            last_s = now_s

    def stop(self) -> None:
        self._end.set()
        self.join()


@dataclass(frozen=True, slots=True)
class Frame:
    """One answered frame; `error` is empty where it is a result. Times of the clock in s."""

    due_s: float
    done_s: float
    backend: str
    reason: str
    run_ms: float
    error: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_S:g} s only")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--fps", type=float, default=30.0, help="frames offered a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", default="max_performance")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    duration_s = QUICK_S if arguments.quick else arguments.minutes * 60
    with tempfile.TemporaryDirectory() as folder:
        devices = tree(Path(folder))
        frames, events = measured(
            Path(folder), devices, duration_s, arguments.fps, arguments.policy, arguments.seed
        )

    figures = Figures()
    add_figures(figures, frames, events, arguments.fps, quick=arguments.quick)
    return figures.finish(arguments.json)


def tree(folder: Path) -> list[Device]:
    """A sysfs with a zone for each device, and the devices."""
    zones = {}
    for number, name in enumerate(("gpu", "npu", "cpu")):
        zone = folder / "sys" / "class" / "thermal" / f"thermal_zone{number}"
        zone.mkdir(parents=True)
        (zone / "type").write_text(f"{name}-thermal\n")
        (zone / "temp").write_text("40000\n")
        zones[name] = zone / "temp"

    return [
        Device(
            *("gpu", "vulkan", zones["gpu"], folder / "gpu.delay"),
            *(14.0, 3.0, 42.0, 60.0, 8.0, 67.0),
        ),
        Device(
            *("npu", "npu", zones["npu"], folder / "npu.delay"),
            *(27.0, 1.8, 40.0, 20.0, 12.0, 75.0),
        ),
    ]


def configuration(folder: Path) -> str:
    return f"""
[fingerprint]
enabled = false
thresholds_c = {{ gpu = {TRIP_C}, npu = 80.0 }}
[thermal]
sysfs_root = "{folder / "sys"}"
devices = {{ vulkan = "gpu" }}
[prepare]
backends = ["vulkan", "npu"]
[npu]
delegate = "{native_build.delegate()}"
min_arithmetic = 0.5
[npu.delegate_options]
latency_file = "{folder / "npu.delay"}"
"""


def measured(
    folder: Path, devices: list[Device], duration_s: float, fps: float, policy: str, seed: int
) -> tuple[list[Frame], list[dict[str, Any]]]:
    """The frames of a run, and what the protocol did."""
    environment = {
        "SWITCHGEAR_PREPARE__ENABLED": "true",
        **native_build.vulkan_fault_layer(),
        "SWITCHGEAR_TEST_DELAY": str(folder / "gpu.delay"),
    }
    with (
        DaemonProcess(config=configuration(folder), environment=environment) as daemon,
        connect(daemon.socket) as client,
    ):
        model = client.load_model(small_network(), "net")
        model = client.prepare_model(model)
        for pair in model.pairs:
            if pair.state != "ready":
                raise SystemExit(f"{pair.backend} does not serve: {pair.reason}")

        random = np.random.default_rng(seed)
        inputs = {
            tensor.name: random.uniform(-1, 1, tensor.shape).astype(np.float32)
            for tensor in model.inputs
        }
        for device in devices:
            calibrate(client, device, inputs)
            device.begin()
            settle(client, device, inputs)

        heater = Heater(devices)
        heater.start()
        try:
            names = [device.backend for device in devices]
            with client.open_session(
                model, 4, backends=names, strict=True, policy=policy
            ) as session:
                frames = offered(session, inputs, heater, duration_s, fps)
        finally:
            heater.stop()

        events: list[dict[str, Any]] = []
        client.watch_events(events.append, 0.0)

    return frames, events


def calibrate(client: Client, device: Device, inputs: dict[str, Any]) -> None:
    """What a run takes without a delay, and how many delays it has in it."""
    with client.open_session("net", 1, backends=[device.backend], strict=True) as session:
        replace(device.delay, "0\n")
        device.base_ms = median_ms(session, inputs)
        replace(device.delay, "10000\n")
        device.per_submit = max(1.0, (median_ms(session, inputs) - device.base_ms) / 10)


def settle(client: Client, device: Device, inputs: dict[str, Any]) -> None:
    """Frames at the cool pace, so that the daemon knows it before the load begins."""
    with client.open_session("net", 1, backends=[device.backend], strict=True) as session:
        for _ in range(SETTLE_FRAMES):
            session.run(inputs)


def median_ms(session: Session, inputs: dict[str, Any]) -> float:
    return statistics.median(session.run(inputs).run_ms for _ in range(10))


def offered(
    session: Session, inputs: dict[str, Any], heater: Heater, duration_s: float, fps: float
) -> list[Frame]:
    """Offers a frame at each due time; one that finds all slots busy is lost."""
    from switchgear.ipc.errors import SlotBusy, SwitchgearError

    frames: list[Frame] = []
    lock = threading.Lock()
    waiting: list[threading.Thread] = []

    def take(due_s: float, request: Any) -> None:
        try:
            result: Result = request.result(copy=True)
        except SwitchgearError as error:
            frame = Frame(due_s, monotonic(), "", "", 0.0, error.name)
        else:
            heater.busy(result.backend, result.run_ms / 1000)
            frame = Frame(due_s, monotonic(), result.backend, result.reason, result.run_ms)

        with lock:
            frames.append(frame)

    begin_s = monotonic()
    number = 0
    while (due_s := begin_s + number / fps) < begin_s + duration_s:
        number += 1
        sleep(max(0.0, due_s - monotonic()))
        try:
            request = session.submit(inputs)
        except SlotBusy as error:
            with lock:
                frames.append(Frame(due_s, due_s, "", "", 0.0, error.name))

            continue

        thread = threading.Thread(target=take, args=(due_s, request))
        thread.start()
        waiting = [other for other in waiting if other.is_alive()] + [thread]

    for thread in waiting:
        thread.join()

    return sorted(frames, key=lambda frame: frame.due_s)


def add_figures(
    figures: Figures,
    frames: list[Frame],
    events: list[dict[str, Any]],
    fps: float,
    *,
    quick: bool,
) -> None:
    good = [frame for frame in frames if not frame.error]
    begin_s = frames[0].due_s
    length = "45 s (quick)" if quick else f"{(frames[-1].due_s - begin_s) / 60:.1f} minutes"
    figures.add("lost_frames", len(frames) - len(good), "frames", 0.0, how=f"in {length}")
    figures.add("swing", 100 * swing(good, begin_s, quick=quick), "%", how="of the frame rate")
    times = [1000 * (frame.done_s - frame.due_s) for frame in good]
    p50, p975 = (float(v) for v in np.percentile(times, [50, 97.5]))
    figures.add("frame_p50_ms", p50, "ms", how="due time to answer")
    figures.add("frame_p97_5_over_p50", p975 / p50, "ratio", how="of the frame time")
    changes = sum(one.backend != other.backend for one, other in pairwise(good))
    figures.add("switches", changes, "changes", how="of the backend, probes and ramps too")
    shares = Counter(frame.backend for frame in good)
    for backend, count in shares.most_common():
        figures.add(f"share_{backend}", 100 * count / len(good), "%", how="of the frames")

    late = frames_until_elsewhere(good, events)
    if late is None:
        how = "the GPU was never tripped"
        figures.add("frames_after_third_slow", 0.0, "frames", how=how)
    else:
        how = "on the GPU after the third slow frame of the first trip"
        figures.add("frames_after_third_slow", late, "frames", 1.0, how=how)

    figures.add("transitions", len(events), "events", how="of the protocol")
    rate = len(good) / (frames[-1].due_s - begin_s)
    figures.add("frame_rate", rate, "1/s", how=f"of {fps:g}")


def swing(frames: list[Frame], begin_s: float, *, quick: bool) -> float:
    """Half the range from the 2.5th to the 97.5th percentile of frame rates in windows, over
    their mean; after the first minute (10 s windows), quick: after 10 s, windows of 5 s."""
    window_s, skip_s = (5.0, 10.0) if quick else (10.0, 60.0)
    done = np.array([frame.done_s - begin_s for frame in frames])
    edges = np.arange(skip_s, done.max(), window_s)
    rates = np.histogram(done, edges)[0] / window_s
    low, high = np.percentile(rates, [2.5, 97.5])
    return float((high - low) / 2 / rates.mean())


def frames_until_elsewhere(frames: list[Frame], events: list[dict[str, Any]]) -> int | None:
    """Frames that were sent to the GPU after the third slow one of its first trip."""
    trip = next((e for e in events if e["after"] == "open" and e["level"] == "device"), None)
    if trip is None:
        return None

    slow = [f for f in frames if f.backend == "vulkan" and f.run_ms > trip["limit_ms"] > 0]
    if len(slow) < 3:
        return None

    third_s = slow[2].done_s
    away = next((f for f in frames if f.due_s > third_s and f.backend != "vulkan"), None)
    if away is None:
        return len(frames)

    return sum(third_s < f.due_s < away.due_s and f.backend == "vulkan" for f in frames)


if __name__ == "__main__":
    sys.exit(main())
