"""What one decision costs: steps of the state machine and the choice, beside a method call.

    ./dev bench decision [--json FILE]

Each figure is the best of many short rounds: this measures our code, not the machine's load.
The ratio is against a method call that stores one attribute, timed in the same process. `PARTS`
are the functions that add figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Final

from figures import Figures

from switchgear.daemon.protocol import device, pair
from switchgear.daemon.protocol.constants import Constants
from switchgear.daemon.protocol.device_rules import DeviceState, Heat, Limits
from switchgear.daemon.protocol.machine import Protocol
from switchgear.daemon.protocol.pair_state import Frame, new_pair
from switchgear.daemon.protocol.reading import Reading
from switchgear.daemon.protocol.topology import Device, PairKey, Topology
from switchgear.daemon.routing.candidate import Candidate, Context
from switchgear.daemon.routing.choice import choose
from switchgear.daemon.routing.estimates import EnergyEstimate, LaneLoad, ServiceEstimate
from switchgear.daemon.routing.policies import POLICIES, Policy
from switchgear.daemon.routing.ring import DecisionRing

ROUNDS: Final = 60
CALLS: Final = 200
STEP_LIMIT_US: Final = 5.0
DECISION_LIMIT_US: Final = 20.0


class Plain:
    """The yardstick: one method call that stores one attribute."""

    def __init__(self) -> None:
        self.value = 0.0

    def store(self, value: float) -> None:
        self.value = value


def cost_us(call: Callable[[], object], calls: int = CALLS, rounds: int = ROUNDS) -> float:
    """Microseconds of one call: the best round, the loop's own cost taken off."""
    best_ns = empty_ns = float("inf")
    for _ in range(rounds):
        start_ns = perf_counter_ns()
        for _ in range(calls):
            call()

        best_ns = min(best_ns, perf_counter_ns() - start_ns)
        start_ns = perf_counter_ns()
        for _ in range(calls):
            pass

        empty_ns = min(empty_ns, perf_counter_ns() - start_ns)

    return (best_ns - empty_ns) / calls / 1000


def plain_call_us() -> float:
    """The yardstick, measured like everything else."""
    plain = Plain()
    return cost_us(lambda: plain.store(1.0))


def machine(models: int = 4) -> tuple[Protocol, PairKey]:
    """A phone's protocol with a few models, whose pairs know their limits."""
    topology = Topology(
        {"gpu": Device("gpu"), "npu": Device("npu"), "cpu": Device("cpu", is_cpu=True)},
        {"vulkan": "gpu", "opencl": "gpu", "npu": "npu", "cpu": "cpu"},
    )
    protocol = Protocol(None, topology, seed=1)
    keys = [
        PairKey(f"model{number}", backend, "fp16")
        for number in range(models)
        for backend in topology.backends
    ]
    for key in keys:
        protocol.add_pair(key)

    for name in topology.devices:
        protocol.reading(name, Reading(40_000), 0.0)

    for key in keys:
        for number in range(100):
            protocol.frame(key, 30.0, 0.01 * number)

    return protocol, keys[0]


def steps(figures: Figures, plain_us: float) -> None:
    """The pure steps: those that every frame and reading takes, and those of a slow frame."""
    constants = Constants()
    known = new_pair(constants, "m", slow_ms=45.0, recover_ms=36.0)
    fast = Frame(30.0, above=False, learns=False)
    slow = Frame(60.0, above=True, learns=False)
    streak, _ = pair.step(known, slow, 1.0)
    learning = new_pair(constants, "m")
    for number in range(50):
        learning, _ = pair.step(learning, Frame(30.0, above=False, learns=True), number * 0.1)

    learn = Frame(30.0, above=False, learns=True)
    cool = DeviceState(Limits(65_000, 58_000, 80_000), constants)
    reading = Heat(Reading(40_000), elsewhere=False)
    for name, call in (
        ("frame that changes nothing", lambda: pair.step(known, fast, 2.0)),
        ("slow frame, counted", lambda: pair.step(known, slow, 2.0)),
        ("slow frame, second", lambda: pair.step(streak, slow, 2.0)),
        ("frame that teaches", lambda: pair.step(learning, learn, 2.0)),
        ("reading", lambda: device.step(cool, reading, 2.0)),
    ):
        us = cost_us(call)
        figures.add(f"step: {name}", us, "us", STEP_LIMIT_US, how="pure step, no shell")
        figures.add(f"step: {name}, ratio", us / plain_us, "x", how="to a plain method call")


def shell(figures: Figures, plain_us: float) -> None:
    """What the daemon calls for each frame: through the shell, all levels looked at."""
    protocol, key = machine()
    for name, call in (
        ("frame", lambda: protocol.frame(key, 30.0, 1.0)),
        ("admit", lambda: protocol.admit(key, 1.0)),
        ("reading", lambda: protocol.reading("gpu", Reading(40_000), 1.0)),
        ("tick", lambda: protocol.tick(1.0)),
    ):
        us = cost_us(call)
        limit = STEP_LIMIT_US if name == "frame" else None
        figures.add(f"machine: {name}", us, "us", limit, how="3 devices, 4 backends, 16 pairs")
        figures.add(f"machine: {name}, ratio", us / plain_us, "x", how="to a plain method call")


def decision(figures: Figures, plain_us: float) -> None:
    """A whole routing decision over four pairs, with the breaker's admissions and step."""
    protocol, _ = machine()
    keys = [
        PairKey("model0", backend, "fp16") for backend in ("vulkan", "opencl", "npu", "cpu")
    ]
    kinds = {"vulkan": "gpu", "opencl": "gpu", "npu": "npu", "cpu": "cpu"}
    candidates = []
    for number, key in enumerate(keys):
        estimate = ServiceEstimate(30.0 + number)
        for run in range(100):
            estimate.observe(30.0 + number + 0.3 * (run % 3), 0.01 * run)

        kind = kinds[key.backend]
        energy = EnergyEstimate(3.0 + number)
        candidates.append(Candidate(key.backend, kind, kind, estimate, energy, LaneLoad()))

    paired = tuple(zip(candidates, keys, strict=True))
    context = Context(50.0)
    ring = DecisionRing()

    def choice(policy: Policy) -> object:
        return choose(candidates, policy, context, 1.0, ring, 1)

    def whole(policy: Policy) -> object:
        for candidate, key in paired:
            answer = protocol.admit(key, 1.0)
            candidate.share = answer.share
            candidate.state = answer.state

        verdict = choose(candidates, policy, context, 1.0, ring, 1)
        protocol.frame(keys[verdict.chosen], 30.0, 1.0)
        return verdict

    for name in ("max_efficiency", "max_performance"):
        policy = POLICIES[name]
        us = cost_us(partial(choice, policy))
        figures.add(f"choice: {name}", us, "us", how="4 pairs, recorded in the ring")
        us = cost_us(partial(whole, policy))
        how = "4 admissions, the choice, its record, and the breaker's step of its frame"
        figures.add(f"decision: {name}", us, "us", DECISION_LIMIT_US, how=how)
        figures.add(f"decision: {name}, ratio", us / plain_us, "x", how="to a method call")


# Each adds its figures, given the cost of a plain method call in microseconds.
PARTS: Final[tuple[Callable[[Figures, float], None], ...]] = (steps, shell, decision)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    figures = Figures()
    plain_us = plain_call_us()
    figures.add("plain method call", plain_us, "us", how=f"best of {ROUNDS} rounds")
    for part in PARTS:
        part(figures, plain_us)

    return figures.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
