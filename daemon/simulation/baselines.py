"""The policies that ours is held against. Each knows what a simple daemon would know: which
worker is down, which backend has refused the model, the sensors, and its own measured times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from switchgear.daemon.routing.estimates import ServiceEstimate
from switchgear.daemon.simulation.run import UNSUPPORTED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from switchgear.daemon.simulation.run import Frame, Simulation

# The field report's preference: the GPU, from there to the NPU, in the end the CPU.
ORDER: Final = ("vulkan", "npu", "opencl", "cpu")


class Fixed:
    """One backend, come what may; a frame waits while its worker starts again."""

    def __init__(self, simulation: Simulation, backend: str) -> None:
        self._backend = backend
        self._refused = False

    def choose(self, now_s: float, frame: Frame) -> str:
        return "" if self._refused else self._backend

    def finished(self, now_s: float, frame: Frame, run_ms: float) -> None:
        pass

    def failed(self, now_s: float, frame: Frame, fault: str, run_ms: float) -> None:
        self._refused = self._refused or fault == UNSUPPORTED

    def restarted(self, now_s: float, backend: str) -> None:
        pass

    def tick(self, now_s: float, readings: Mapping[str, float | None]) -> Iterable[str]:
        return ()


class _Avoiding:
    """What the next two share: a backend that is down or has refused is not chosen."""

    def __init__(self, simulation: Simulation) -> None:
        self._down = simulation.down
        self._refused: set[str] = set()
        self.order = tuple(name for name in ORDER if name in simulation.scenario.backends)

    def usable(self) -> tuple[str, ...]:
        if not self._refused and not self._down:
            return self.order

        able = tuple(name for name in self.order if name not in self._refused)
        return tuple(name for name in able if name not in self._down) or able

    def finished(self, now_s: float, frame: Frame, run_ms: float) -> None:
        pass

    def failed(self, now_s: float, frame: Frame, fault: str, run_ms: float) -> None:
        if fault == UNSUPPORTED:
            self._refused.add(frame.backend)

    def restarted(self, now_s: float, backend: str) -> None:
        pass

    def tick(self, now_s: float, readings: Mapping[str, float | None]) -> Iterable[str]:
        return ()


class Threshold(_Avoiding):
    """The GPU while it is cool: leaves it over the trip, comes back under the recover
    temperature, with no holds, no probes and no look at the frames."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self._limits = simulation.scenario.limits
        self._hot = False

    def choose(self, now_s: float, frame: Frame) -> str:
        usable = self.usable()
        if self._hot:
            usable = (
                tuple(name for name in usable if name not in ("vulkan", "opencl")) or usable
            )

        return usable[0]

    def tick(self, now_s: float, readings: Mapping[str, float | None]) -> Iterable[str]:
        temperature_c = readings.get("gpu")
        if temperature_c is not None:
            limit_c = self._limits.recover_c if self._hot else self._limits.trip_c
            self._hot = temperature_c > limit_c

        return ()


class ExpectedLatency(_Avoiding):
    """The earliest expected answer, from the same estimates as ours; heat and energy unseen."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        backends = simulation.scenario.backends
        self._estimates = {
            name: ServiceEstimate(backends[name].frame_ms) for name in self.order
        }
        self._lanes = simulation.lane_of

    def choose(self, now_s: float, frame: Frame) -> str:
        return min(self.usable(), key=lambda name: self._done_ms(now_s, name))

    def _done_ms(self, now_s: float, name: str) -> float:
        own_ms = self._estimates[name].expected_ms(now_s)
        lane = self._lanes[name]
        wait_ms = sum(
            self._estimates[waiting.backend].expected_ms(now_s) for waiting in lane.waiting
        )
        running = lane.running
        if running is not None:
            ran_ms = (now_s - running.started_s) * 1000.0
            wait_ms += abs(self._estimates[running.backend].expected_ms(now_s) - ran_ms)

        return own_ms + wait_ms

    def finished(self, now_s: float, frame: Frame, run_ms: float) -> None:
        self._estimates[frame.backend].observe(run_ms, now_s)
