"""What is known of a pair that serves: its estimates, and a session's places together."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Final

from switchgear.daemon.routing.candidate import Candidate, Context
from switchgear.daemon.routing.choice import REQUESTED, Inputs, Verdict, decide
from switchgear.daemon.routing.estimates import EnergyEstimate, LaneLoad, ServiceEstimate

if TYPE_CHECKING:
    from switchgear.daemon.lane import Lane
    from switchgear.daemon.protocol.topology import PairKey, SessionLimits
    from switchgear.daemon.router import Target
    from switchgear.daemon.routing.policies import Policy

# A worker's first frames of a model are no measurement: caches and clocks are cold.
WORKERS_REMEMBERED: Final = 64


class Place:
    """One pair, for all sessions. `device` is its physical part, `kind` that part's kind."""

    __slots__ = ("_seen", "device", "energy", "estimate", "int4", "is_cpu", "key", "kind")

    def __init__(
        self,
        key: PairKey,
        device: str,
        kind: str,
        estimate: ServiceEstimate,
        energy: EnergyEstimate,
    ) -> None:
        self.key = key
        self.device = device
        self.kind = kind
        self.estimate = estimate
        self.energy = energy
        self.int4 = key.precision == "int4"
        self.is_cpu = key.backend == "cpu"
        self._seen: dict[int, None] = {}

    def was_used(self, worker: int) -> bool:
        """Whether a frame of the pair has ended in the worker with this pid."""
        return worker in self._seen

    def is_first_use(self, worker: int) -> bool:
        """Whether this is the pair's first frame in the worker with this pid."""
        if worker in self._seen:
            return False

        self._seen[worker] = None
        if len(self._seen) > WORKERS_REMEMBERED:
            del self._seen[next(iter(self._seen))]

        return True


class LaneWait(LaneLoad):
    """What stands before a new request in a lane, read from the lane itself."""

    __slots__ = ("_lane",)

    def __init__(self, lane: Lane) -> None:
        super().__init__()
        self._lane = lane

    def wait_ms(self, now_s: float) -> float:
        return self._lane.wait_ms(now_s)


class Row:
    """A target of a session with its candidate and its pair's place."""

    __slots__ = ("candidate", "place", "target")

    def __init__(self, target: Target, place: Place) -> None:
        self.target = target
        self.place = place
        label = f"{place.key.backend}/{place.key.precision}"
        load = LaneWait(target.lane)
        self.candidate = Candidate(
            label, place.device, place.kind, place.estimate, place.energy, load
        )


class Seat:
    """A session as the switchboard sees it: its rows, its policy, and its own limits."""

    __slots__ = ("context", "hedges", "limits", "policy", "rows", "sole", "wants_int4")

    def __init__(
        self,
        rows: list[Row],
        policy: Policy,
        context: Context,
        limits: SessionLimits | None,
        *,
        wants_int4: bool,
        hedges: bool = False,
    ) -> None:
        self.rows = rows
        self.policy = policy
        self.context = context
        self.limits = limits
        self.wants_int4 = wants_int4
        self.hedges = hedges
        # Where the CPU is the only place: what all choices have in common (their inputs
        # from the home to the flags), and the verdict.
        self.sole: tuple[tuple[Any, ...], Verdict] | None = None
        if len(rows) == 1 and rows[0].place.is_cpu and limits is None:
            flags = REQUESTED if context.requested else 0
            common = ("", -inf, context.pinned, flags)
            row = rows[0].candidate.row(0.0)
            inputs = Inputs(0.0, policy.number, 0.0, *common, inf, (row,))
            self.sole = common, decide(inputs, policy)
