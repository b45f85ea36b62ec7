"""Switchgear's own protocol and routing, driven in virtual time instead of by the daemon."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Final

from switchgear.daemon.protocol.constants import Constants
from switchgear.daemon.protocol.machine import Protocol
from switchgear.daemon.routing.candidate import Candidate, Context
from switchgear.daemon.routing.choice import choose
from switchgear.daemon.routing.estimates import EnergyEstimate, LaneLoad, ServiceEstimate
from switchgear.daemon.routing.policies import DEFAULT_POLICY, policy_of
from switchgear.daemon.routing.ring import DecisionRing
from switchgear.daemon.routing.scores import RESERVE_SHARE
from switchgear.daemon.simulation.device import SKIN
from switchgear.daemon.simulation.driven import Driven, topology_of
from switchgear.daemon.simulation.metrics import limit_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from switchgear.daemon.protocol.answers import Admission
    from switchgear.daemon.protocol.topology import PairKey
    from switchgear.daemon.simulation.run import Frame, Simulation
    from switchgear.daemon.simulation.scenario import BackendModel

# How far the fingerprint's prior and its energy are off: standard deviations of a logarithm.
# Ours: a prior from operations and bytes is rough, a fuel gauge is good to a few percent.
PRIOR_ERROR: Final = 0.15
ENERGY_ERROR: Final = 0.03
# Runs of the known-answer check, which are measured before a pair serves.
CHECK_RUNS: Final = 8


class Ours(Driven):
    """The default protocol with scores; `ring` has the decisions of the run."""

    def __init__(self, simulation: Simulation, seed: int, policy: str = DEFAULT_POLICY) -> None:
        scenario = simulation.scenario
        # The kernel's passive trips, as the fingerprint finds them.
        trip_mc = round(scenario.governor.block_limit_c * 1000)
        trips = dict.fromkeys(simulation.device.blocks, trip_mc)
        constants = Constants()
        self.ring: Final = DecisionRing()
        self._policy = policy_of(policy)
        self._least_energy = policy_of("max_efficiency")
        self._context = Context(limit_of(scenario) or 0.0)
        self._loads = {block: LaneLoad() for block in simulation.lanes}
        draw = random.Random(f"{seed}:fingerprint")  # noqa: S311
        self._candidates = {
            name: self._candidate(name, model, draw)
            for name, model in scenario.backends.items()
        }
        super().__init__(
            simulation,
            Protocol(constants, topology_of(scenario, trips), seed, estimate=self._expected_ms),
            self._slow_ms(scenario.load.fps, constants.slow_factor),
        )
        # The INT4 variant stands in for the NPU only (degrade).
        self._usual = tuple(
            candidate for name, candidate in self._candidates.items() if name != "opencl_int4"
        )
        self._with_int4 = tuple(self._candidates.values())
        self._queued: dict[int, float] = {}

    def choose(self, now_s: float, frame: Frame) -> str:
        self._look_at_lanes(now_s)
        candidates = self._usual
        policy = self._policy
        if "opencl_int4" in self._candidates and self.degraded():
            candidates = self._with_int4

        down = self._simulation.down
        for candidate in candidates:
            answer = self.protocol.admit(self._pairs[candidate.key], now_s)
            candidate.share = 0.0 if candidate.key in down else self._share(answer)
            candidate.state = answer.state
            if answer.least_energy:
                policy = self._least_energy

        verdict = choose(candidates, policy, self._context, now_s, self.ring, frame.number)
        if verdict.chosen >= 0:
            return candidates[verdict.chosen].key

        # Every worker is starting again: the frame waits for the first of them.
        waiting = [
            candidate.key
            for candidate in candidates
            if self.protocol.admit(self._pairs[candidate.key], now_s).allowed
        ]
        return waiting[0] if waiting else ""

    def finished(self, now_s: float, frame: Frame, run_ms: float) -> None:
        if frame.is_probe or frame.backend not in self._first_use:
            self._candidates[frame.backend].estimate.observe(run_ms, now_s)

        super().finished(now_s, frame, run_ms)

    def tick(self, now_s: float, readings: Mapping[str, float | None]) -> Iterable[str]:
        wanted = super().tick(now_s, readings)
        for candidate in self._with_int4:
            trend = self._trends[candidate.device]
            known = readings.get(self._sensors[candidate.device]) is not None
            candidate.headroom_c = (
                self._scenario.governor.block_limit_c - trend.temperature_c
                if known
                else math.inf
            )

        skin_c = readings.get(SKIN)
        self._context.case_headroom_c = (
            math.inf if skin_c is None else self._scenario.governor.skin_limit_c - skin_c
        )
        return wanted

    def _candidate(self, name: str, model: BackendModel, draw: random.Random) -> Candidate:
        prior_ms = model.frame_ms * math.exp(draw.gauss(0.0, PRIOR_ERROR))
        estimate = ServiceEstimate(prior_ms, "the fingerprint's prior")
        for _ in range(CHECK_RUNS):
            run_ms = model.frame_ms * math.exp(draw.gauss(0.0, model.jitter))
            estimate.observe(run_ms, 0.0)

        energy_mj = model.frame_ms * model.busy_w * math.exp(draw.gauss(0.0, ENERGY_ERROR))
        return Candidate(
            name,
            model.device,
            model.device,
            estimate,
            EnergyEstimate(model.busy_w, energy_mj),
            self._loads[model.device],
        )

    def _share(self, answer: Admission) -> float:
        return RESERVE_SHARE if answer.reserve and self._context.limit_ms else answer.share

    def _slow_ms(self, fps: float, factor: float) -> Mapping[str, float]:
        """The app's own limit: what keeps up with its frames is not too slow for it."""
        if not fps:
            return {}

        return {
            name: max(factor * candidate.estimate.median_ms, 1000.0 / fps)
            for name, candidate in self._candidates.items()
        }

    def _expected_ms(self, pair: PairKey) -> float | None:
        return self._candidates[self._names[pair]].estimate.median_ms

    def _look_at_lanes(self, now_s: float) -> None:
        for block, lane in self._simulation.lanes.items():
            load = self._loads[block]
            load.clear()
            for frame in lane.waiting:
                load.queued(self._candidates[frame.backend].estimate.expected_ms(now_s))

            running = lane.running
            if running is not None:
                expected_ms = self._candidates[running.backend].estimate.expected_ms(now_s)
                load.started(expected_ms, running.started_s)
