"""The field report's rules to the letter: the protocol's report mode, backends in order."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from switchgear.daemon.protocol.constants import report
from switchgear.daemon.protocol.machine import Protocol
from switchgear.daemon.simulation.driven import Driven, topology_of

if TYPE_CHECKING:
    from switchgear.daemon.simulation.run import Frame, Simulation

# Vulkan, from there to the NPU, from there to OpenCL in INT4; the rest is what is left.
ORDER: Final = ("vulkan", "npu", "opencl_int4", "opencl", "cpu")


class Literal(Driven):
    """Its limits are those that the scenario scales to its model and device."""

    def __init__(self, simulation: Simulation, seed: int) -> None:
        scenario = simulation.scenario
        limits = scenario.limits
        constants = dataclasses.replace(
            report(),
            trip_mc=round(limits.trip_c * 1000),
            recover_below_mc=round((limits.trip_c - limits.recover_c) * 1000),
            slow_ms=limits.slow_ms,
            recover_ms=limits.recover_ms,
        )
        super().__init__(simulation, Protocol(constants, topology_of(scenario, {}), seed))
        self._order = tuple(name for name in ORDER if name in scenario.backends)

    def choose(self, now_s: float, frame: Frame) -> str:
        waiting = ""
        for name in self._order:
            if name == "opencl_int4" and not self.degraded():
                continue

            if self.protocol.admit(self._pairs[name], now_s).allowed:
                if name not in self._simulation.down:
                    return name

                waiting = waiting or name

        return waiting
