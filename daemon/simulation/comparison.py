"""Policies side by side: on one device, and over many."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from switchgear.daemon.simulation.catalogue import OURS, make
from switchgear.daemon.simulation.metrics import Result, result_of
from switchgear.daemon.simulation.run import Simulation, Trace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from switchgear.daemon.simulation.scenario import Scenario

# Policies whose frames in time differ by less than this share of the most are equal in them,
# and energy decides between them.
EQUAL_SHARE: Final = 0.005
# As good as the best policy: within this share of its frames in time and of its energy.
WITHIN_SHARE: Final = 0.02


def simulate(scenario: Scenario, policy: str, seed: int) -> tuple[Result, Trace]:
    """One run. Blocks for about a second per ten minutes of virtual time.

    :raises BadRequest: there is no such policy, or the device lacks its backend.
    """
    simulation = Simulation(scenario, seed)
    trace = simulation.run(make(policy, simulation, seed))
    return result_of(trace, scenario, policy), trace


@dataclass(frozen=True, slots=True)
class Standing:
    """How one policy stands against the best on a device.

    The best has the most frames in time, and of those that are equal in that the least energy
    per answered frame. `frames` and `energy` are this policy's relative to the best's, minus 1.
    """

    best: str
    frames: float
    energy: float

    @property
    def good(self) -> bool:
        """Best, or within 2 % of it in frames in time and in energy."""
        return self.frames >= -WITHIN_SHARE and self.energy <= WITHIN_SHARE


def standing(results: Mapping[str, Result], policy: str = OURS) -> Standing:
    """Where a policy stands among the results of one device, which all have a frame period."""
    frames = {name: result.in_time or 0 for name, result in results.items()}
    energy = {name: result.energy_per_frame_mj for name, result in results.items()}
    most = max(frames.values())
    equal = [
        name
        for name in results
        if frames[name] >= (1.0 - EQUAL_SHARE) * most and not math.isnan(energy[name])
    ]
    best = min(equal, key=energy.__getitem__)
    return Standing(
        best,
        frames[policy] / frames[best] - 1.0 if frames[best] else 0.0,
        energy[policy] / energy[best] - 1.0,
    )


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy over many devices; shares are 0 to 1."""

    policy: str
    devices: int
    good: int
    in_time: float
    energy_per_frame_mj: float
    lost: int


def summaries(devices: Sequence[Mapping[str, Result]]) -> list[Summary]:
    """A line for each policy, over the devices that it can run on."""
    names = list(dict.fromkeys(name for results in devices for name in results))
    found = []
    for name in names:
        own = [results for results in devices if name in results]
        offered = sum(results[name].offered for results in own)
        in_time = sum(results[name].in_time or 0 for results in own)
        answered = sum(results[name].answered for results in own)
        energy_j = sum(results[name].energy_j for results in own)
        found.append(
            Summary(
                name,
                len(own),
                sum(standing(results, name).good for results in own),
                in_time / offered if offered else 0.0,
                1000.0 * energy_j / answered if answered else math.nan,
                sum(results[name].lost for results in own),
            )
        )

    return found
