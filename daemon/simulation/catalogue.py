"""The policies that a simulation can run, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from switchgear.daemon.routing.policies import DEFAULT_POLICY, POLICIES
from switchgear.daemon.simulation.baselines import ExpectedLatency, Fixed, Threshold
from switchgear.daemon.simulation.literal import Literal
from switchgear.daemon.simulation.ours import Ours
from switchgear.ipc.errors import BadRequest

if TYPE_CHECKING:
    from switchgear.daemon.simulation.run import Policy, Simulation
    from switchgear.daemon.simulation.scenario import Scenario

OURS: Final = "ours"
_FIXED: Final = {"always-gpu": "vulkan", "always-npu": "npu", "always-cpu": "cpu"}
NAMES: Final = (*_FIXED, "threshold", "latency", "report", OURS)


def names_for(scenario: Scenario) -> list[str]:
    """The policies that this device has the backends for."""
    return [name for name in NAMES if _FIXED.get(name, "cpu") in scenario.backends]


def check(name: str) -> str:
    """The name; `ours` may carry a routing policy: `ours:max_performance`.

    :raises BadRequest: there is no such policy.
    """
    base, colon, routing = name.partition(":")
    if base not in NAMES or (colon and (base != OURS or routing not in POLICIES)):
        known = ", ".join(NAMES)
        raise BadRequest(
            f"no policy {name[:64]!r}; there is {known}, and {OURS}: with one of "
            f"{', '.join(POLICIES)}"
        )

    return name


def make(name: str, simulation: Simulation, seed: int) -> Policy:
    """A policy for one run.

    :raises BadRequest: there is no such policy, or the device lacks its backend.
    """
    base, _, routing = check(name).partition(":")
    if base in _FIXED:
        if _FIXED[base] not in simulation.scenario.backends:
            raise BadRequest(f"{simulation.scenario.name} has no {_FIXED[base]}")

        return Fixed(simulation, _FIXED[base])

    if base == "threshold":
        return Threshold(simulation)

    if base == "latency":
        return ExpectedLatency(simulation)

    if base == "report":
        return Literal(simulation, seed)

    return Ours(simulation, seed, routing or DEFAULT_POLICY)
