"""The protocol in virtual time: its readings, frames, failures and probes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from switchgear.daemon.protocol.reading import Reading
from switchgear.daemon.protocol.topology import Device, PairKey, Topology
from switchgear.daemon.routing.trend import Trend
from switchgear.daemon.simulation.run import DEVICE_LOST, HUNG, UNSUPPORTED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Literal

    from switchgear.daemon.protocol.answers import Probe
    from switchgear.daemon.protocol.machine import Protocol
    from switchgear.daemon.simulation.run import Frame, Simulation
    from switchgear.daemon.simulation.scenario import Scenario

MODEL: Final = "model"
_FAULTS: Final[dict[str, tuple[Literal["error", "hang", "device_lost"], str, int]]] = {
    UNSUPPORTED: ("error", "nnapi", 4),
    DEVICE_LOST: ("device_lost", "vulkan", -4),
    HUNG: ("hang", "signal", 9),
}


def pair_of(backend: str) -> PairKey:
    if backend == "opencl_int4":
        return PairKey(MODEL, "opencl", "int4")

    return PairKey(MODEL, backend, "auto")


def topology_of(scenario: Scenario, trip_mc: Mapping[str, int]) -> Topology:
    """The devices and backends of a scenario as the protocol knows them."""
    blocks = dict.fromkeys(model.device for model in scenario.backends.values())
    backends = {
        pair_of(name).backend: model.device for name, model in scenario.backends.items()
    }
    return Topology(
        {
            block: Device(block, trip_mc=trip_mc.get(block), is_cpu=block == "cpu")
            for block in blocks
        },
        backends,
    )


class Driven:
    """The protocol with its readings, probes and failures; a subclass chooses.

    `slow_ms` are limits that are known better than by the protocol's own rule, by backend.
    """

    def __init__(
        self,
        simulation: Simulation,
        protocol: Protocol,
        slow_ms: Mapping[str, float] | None = None,
    ) -> None:
        self.protocol: Final = protocol
        self._simulation = simulation
        self._scenario = simulation.scenario
        self._pairs = {name: pair_of(name) for name in self._scenario.backends}
        self._names = {pair: name for name, pair in self._pairs.items()}
        for name, pair in self._pairs.items():
            protocol.add_pair(pair, slow_ms=(slow_ms or {}).get(name))

        sensors = {sensor.node: name for name, sensor in self._scenario.sensors.items()}
        self._sensors = {block: sensors.get(block, "") for block in simulation.device.blocks}
        self._trends = {block: Trend() for block in self._sensors}
        self._probing: dict[str, Probe] = {}
        self._first_use = set(self._scenario.backends)

    def finished(self, now_s: float, frame: Frame, run_ms: float) -> None:
        if frame.is_probe:
            self._answer(now_s, frame, good=True)
            return

        first = frame.backend in self._first_use
        if first:
            self._first_use.discard(frame.backend)

        self.protocol.frame(self._pairs[frame.backend], run_ms, now_s, first_use=first)

    def failed(self, now_s: float, frame: Frame, fault: str, run_ms: float) -> None:
        if frame.is_probe:
            self._answer(now_s, frame, good=False)
            return

        kind, domain, code = _FAULTS[fault]
        self.protocol.failure(self._pairs[frame.backend], kind, domain, code, now_s)

    def restarted(self, now_s: float, backend: str) -> None:
        self._first_use.add(backend)

    def tick(self, now_s: float, readings: Mapping[str, float | None]) -> Iterable[str]:
        protocol = self.protocol
        for block, sensor in self._sensors.items():
            protocol.reading(block, self._reading(block, readings.get(sensor), now_s), now_s)

        busy = [
            block for block, lane in self._simulation.lanes.items() if lane.running is not None
        ]
        wanted = []
        for probe in protocol.tick(now_s, busy):
            name = self._names.get(probe.pair) if probe.pair else probe.backend
            if name is None:
                name = probe.backend

            self._probing[name] = probe
            wanted.append(name)

        return wanted

    def degraded(self) -> bool:
        """Whether the INT4 variant stands in for an NPU that refused the model."""
        state = self.protocol.pair_state(self._pairs["opencl_int4"])
        return state.trial.phase in ("running", "passed")

    def _reading(self, block: str, temperature_c: float | None, now_s: float) -> Reading:
        trend = self._trends[block]
        if temperature_c is None:
            trend.forget()
            return Reading(None, "lost" if self._sensors[block] else "none")

        trend.read(temperature_c, now_s)
        return Reading(
            round(trend.temperature_c * 1000.0),
            "measured",
            0.0,
            trend.slope_c_per_s * 1000.0,
        )

    def _answer(self, now_s: float, frame: Frame, *, good: bool) -> None:
        probe = self._probing.pop(frame.backend, None)
        if probe is not None:
            self.protocol.probe_result(probe.target, probe.lease, good, now_s)
