"""One run of one policy on one device: the discrete events between an app and its backends."""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Final, Protocol

from switchgear.daemon.simulation.device import TICK_S, Device

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from switchgear.daemon.simulation.scenario import Scenario

# A run this old is taken for hung, and its worker is ended. Ours, as in the daemon a limit far
# above any healthy run of a model for live frames.
HANG_LIMIT_S: Final = 1.0
# A worker's new start with a warm cache. Ours.
RESTART_S: Final = 2.0
# A driver refuses a model about this fast.
REFUSAL_S: Final = 0.001

UNSUPPORTED: Final = "unsupported"
DEVICE_LOST: Final = "device_lost"
HUNG: Final = "hung"

_ARRIVAL: Final = 0
_END: Final = 1
_TICK: Final = 2
_FAULT: Final = 3
_RESTARTED: Final = 4


@dataclass(slots=True, eq=False)
class Frame:
    """A request of the app, or a probe that a policy asked for. Times in seconds."""

    number: int
    arrived_s: float
    backend: str = ""
    started_s: float = 0.0
    retries: int = 0
    is_probe: bool = False


@dataclass(slots=True, eq=False)
class Lane:
    """The queue of one block, which runs one frame at a time."""

    block: str
    waiting: deque[Frame] = field(default_factory=deque)
    running: Frame | None = None
    power_w: float = 0.0
    counted_to_s: float = 0.0
    busy_j: float = 0.0
    busy_s: float = 0.0
    fault: str = ""


class Policy(Protocol):
    """Decides where frames run. It sees what a daemon can see: readings, times, failures."""

    def choose(self, now_s: float, frame: Frame) -> str:
        """The backend for a frame, or "" for none: the frame fails."""
        ...

    def finished(self, now_s: float, frame: Frame, run_ms: float) -> None: ...

    def failed(self, now_s: float, frame: Frame, fault: str, run_ms: float) -> None: ...

    def restarted(self, now_s: float, backend: str) -> None: ...

    def tick(self, now_s: float, readings: Mapping[str, float | None]) -> Iterable[str]:
        """Each `TICK_S`; the backends that it wants to probe now."""
        ...


@dataclass(slots=True)
class Trace:
    """What happened, a row for each answered frame and for each second.

    `ends_s`, `latencies_ms`, `runs_ms` and `backends` belong together. `seconds` has the time,
    the temperature of each node, and the clock of each block.
    """

    ends_s: list[float] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)
    runs_ms: list[float] = field(default_factory=list)
    backends: list[str] = field(default_factory=list)
    seconds: list[tuple[float, tuple[float, ...], tuple[float, ...]]] = field(
        default_factory=list
    )
    nodes: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    offered: int = 0
    superseded: int = 0
    lost: int = 0
    probes: int = 0
    energy_j: float = 0.0


class Simulation:
    """The app, the lanes and the device. `lanes` and `down` are for policies to look at."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario: Final = scenario
        self.device: Final = Device(scenario, seed)
        self.lanes: Final = {block: Lane(block) for block in self.device.blocks}
        self.lane_of: Final = {
            name: self.lanes[model.device] for name, model in scenario.backends.items()
        }
        self.down: set[str] = set()
        self.unsupported: set[str] = set()
        self._in_flight = 0
        self._events: list[tuple[float, int, int, object]] = []
        self._order = count()
        self._numbers = count(1)
        self._faults = random.Random(f"{seed}:faults")  # noqa: S311
        self._next_fault: dict[str, str] = {}
        self.trace: Final = Trace(nodes=self.device.names, blocks=self.device.blocks)

    def run(self, policy: Policy) -> Trace:
        """Runs to the end of the scenario; once for each simulation."""
        duration_s = self.scenario.duration_s
        self._plan_faults(duration_s)
        self._at(0.0, _ARRIVAL, None)
        self._at(TICK_S, _TICK, None)
        ticks = 0
        events = self._events
        while events:
            now_s, _, kind, what = heapq.heappop(events)
            if now_s > duration_s:
                break

            if kind == _END:
                assert isinstance(what, Lane)
                self._end(now_s, what, policy)
            elif kind == _ARRIVAL:
                self._arrive(now_s, policy)
            elif kind == _TICK:
                ticks += 1
                self._tick(now_s, ticks, policy)
            elif kind == _FAULT:
                assert isinstance(what, str)
                self._break(now_s, what)
            else:
                assert isinstance(what, str)
                self.down.discard(what)
                policy.restarted(now_s, what)
                self._start(now_s, self.lane_of[what])

        self.trace.energy_j = self.device.energy_j
        return self.trace

    def _at(self, when_s: float, kind: int, what: object) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), kind, what))

    def _arrive(self, now_s: float, policy: Policy) -> None:
        load = self.scenario.load
        if load.fps > 0.0:
            self.trace.offered += 1
            self._at(self.trace.offered / load.fps, _ARRIVAL, None)
            if self._in_flight >= load.slots and not self._supersede():
                # Every slot is in a run: the app has to let this frame go.
                self.trace.superseded += 1
                return
        else:
            self.trace.offered += 1

        self._in_flight += 1
        self._route(now_s, Frame(next(self._numbers), now_s), policy)

    def _supersede(self) -> bool:
        """Takes the oldest frame that waits out of its queue."""
        oldest: Frame | None = None
        where: Lane | None = None
        for lane in self.lanes.values():
            for frame in lane.waiting:
                if not frame.is_probe and (oldest is None or frame.number < oldest.number):
                    oldest, where = frame, lane

        if oldest is None or where is None:
            return False

        where.waiting.remove(oldest)
        self._in_flight -= 1
        self.trace.superseded += 1
        return True

    def _route(self, now_s: float, frame: Frame, policy: Policy) -> None:
        backend = policy.choose(now_s, frame)
        if not backend:
            self._in_flight -= 1
            self.trace.lost += 1
            self._next(now_s)
            return

        frame.backend = backend
        lane = self.lane_of[backend]
        lane.waiting.append(frame)
        if lane.running is None:
            self._start(now_s, lane)

    def _next(self, now_s: float) -> None:
        """As fast as it goes: an answer brings the next frame."""
        if self.scenario.load.fps <= 0.0:
            # What fails at once must not bring the next one at the same moment for ever.
            self._at(now_s + REFUSAL_S, _ARRIVAL, None)

    def _start(self, now_s: float, lane: Lane) -> None:
        if lane.running is not None:
            return

        frame = next((one for one in lane.waiting if one.backend not in self.down), None)
        if frame is None:
            return

        lane.waiting.remove(frame)
        frame.started_s = now_s
        lane.running = frame
        lane.counted_to_s = now_s
        lane.power_w = self.device.busy_w(frame.backend)
        run_s = self.device.frame_ms(frame.backend) / 1000.0
        lane.fault = ""
        if frame.backend in self.unsupported:
            lane.fault, run_s = UNSUPPORTED, REFUSAL_S
        elif frame.backend in self._next_fault:
            lane.fault = self._next_fault.pop(frame.backend)
            run_s = HANG_LIMIT_S if lane.fault == HUNG else run_s / 2.0

        self._at(now_s + run_s, _END, lane)

    def _end(self, now_s: float, lane: Lane, policy: Policy) -> None:
        self._count(now_s, lane)
        frame = lane.running
        assert frame is not None
        lane.running = None
        run_ms = (now_s - frame.started_s) * 1000.0
        if lane.fault:
            self._failed(now_s, lane, frame, run_ms, policy)
        else:
            policy.finished(now_s, frame, run_ms)
            if not frame.is_probe:
                trace = self.trace
                trace.ends_s.append(now_s)
                trace.latencies_ms.append((now_s - frame.arrived_s) * 1000.0)
                trace.runs_ms.append(run_ms)
                trace.backends.append(frame.backend)
                self._in_flight -= 1
                if self.scenario.load.fps <= 0.0:
                    self._at(now_s, _ARRIVAL, None)

        self._start(now_s, lane)

    def _failed(
        self, now_s: float, lane: Lane, frame: Frame, run_ms: float, policy: Policy
    ) -> None:
        if lane.fault != UNSUPPORTED:
            self.down.add(frame.backend)
            self._at(now_s + RESTART_S, _RESTARTED, frame.backend)

        policy.failed(now_s, frame, lane.fault, run_ms)
        if not frame.is_probe:
            frame.retries += 1
            self._route(now_s, frame, policy)

    def _tick(self, now_s: float, ticks: int, policy: Policy) -> None:
        self._at((ticks + 1) * TICK_S, _TICK, None)
        busy_j = {}
        busy_s = {}
        for block, lane in self.lanes.items():
            if lane.running is not None:
                self._count(now_s, lane)

            busy_j[block], busy_s[block] = lane.busy_j, lane.busy_s
            lane.busy_j = lane.busy_s = 0.0

        self.device.tick(now_s, busy_j, busy_s)
        if ticks % round(1.0 / TICK_S) == 0:
            self.trace.seconds.append(
                (
                    now_s,
                    tuple(self.device.temperatures_c.values()),
                    tuple(self.device.clocks[block] for block in self.device.blocks),
                )
            )

        for backend in policy.tick(now_s, self.device.readings):
            self.trace.probes += 1
            lane = self.lane_of[backend]
            lane.waiting.append(Frame(0, now_s, backend, is_probe=True))
            self._start(now_s, lane)

    def _count(self, now_s: float, lane: Lane) -> None:
        busy_s = now_s - lane.counted_to_s
        lane.busy_s += busy_s
        lane.busy_j += busy_s * lane.power_w
        lane.counted_to_s = now_s

    def _plan_faults(self, duration_s: float) -> None:
        for kind, per_hour in self.scenario.faults_per_h.items():
            if per_hour <= 0.0:
                continue

            when_s = self._faults.expovariate(per_hour / 3600.0)
            while when_s < duration_s:
                self._at(when_s, _FAULT, kind)
                when_s += self._faults.expovariate(per_hour / 3600.0)

    def _break(self, now_s: float, kind: str) -> None:
        backends = self.scenario.backends
        if kind == "npu_unsupported" and "npu" in backends:
            self.unsupported.add("npu")
        elif kind == "vulkan_device_lost" and "vulkan" in backends:
            self._next_fault["vulkan"] = DEVICE_LOST
        elif kind == "npu_hang" and "npu" in backends:
            self._next_fault["npu"] = HUNG
        elif kind == "sensor_lost":
            known = sorted(set(self.scenario.sensors) & set(self.device.blocks))
            if known:
                self.device.lose_sensor(self._faults.choice(known), now_s)
