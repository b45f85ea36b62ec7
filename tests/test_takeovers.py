"""Which place a session has while its pair is prepared anew, and what is left behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from switchgear.daemon import takeover
from switchgear.daemon.failure import Failure
from switchgear.daemon.pair import Pair
from switchgear.daemon.takeover import Takeovers, own_lane_of

DIGEST = "0123456789abcdef"
FP16, FP32 = 2, 3


class Worker:
    """What a worker was asked for; `loaded` are the precisions that it has."""

    def __init__(self) -> None:
        self.loaded: set[int] = set()
        self.unbound: list[tuple[int, list[int]]] = []
        self.unloaded: list[tuple[int, list[int]]] = []
        self.renewals: list[asyncio.Future[Any]] = []

    def renew(self, instance: Any, precision: int, sessions: Any) -> Any:
        if precision not in self.loaded:
            return None

        self.renewals.append(asyncio.get_running_loop().create_future())
        return self.renewals[-1]

    def unbind(self, identity: int, precisions: list[int]) -> None:
        self.unbound.append((identity, precisions))

    def unload(self, identity: int, precisions: list[int]) -> None:
        self.unloaded.append((identity, precisions))


class Lane:
    def __init__(self, name: str, backend: str = "vulkan") -> None:
        self.name, self.backend, self.group, self.label = name, backend, "0", f"vulkan/{name}"
        self.worker = Worker()
        self.sessions: set[Any] = set()
        self.queued = 0
        self.is_idle = True


class Target:
    """As the router's."""

    def __init__(self, lane: Lane, precision: int, pair: Pair | None) -> None:
        self.lane, self.precision, self.pair = lane, precision, pair

    def is_warm(self, session: Any) -> bool:
        return self.precision in self.lane.worker.loaded


class Session:
    def __init__(self, identity: int, model: Any, targets: tuple[Target, ...] = ()) -> None:
        self.identity, self.model, self.instance = identity, model, model.instance
        self.targets = targets
        self.ended = False


class Case:
    """A session of a model with one pair, which serves in `lane` as fp16."""

    def __init__(self) -> None:
        self.lane = Lane("device")
        self.lanes = [self.lane]
        self.ended: list[Lane] = []
        pool = SimpleNamespace(lanes=lambda: self.lanes, end=self.ended.append)
        self.takeovers = Takeovers(pool)  # type: ignore[arg-type]
        self.pair = Pair("vulkan", "auto", state="ready", precision="fp16", number=FP16)
        instance = SimpleNamespace(identity=7)
        self.model: Any = SimpleNamespace(
            digest=DIGEST, label="net", instance=instance, pairs={"auto": self.pair}
        )
        self.session: Any = Session(1, self.model)
        self.lane.worker.loaded.add(FP16)
        self.old = self.place(self.lane, FP16)
        assert self.wants(self.old) == (self.old,)

    def place(self, lane: Lane, precision: int) -> Target:
        lane.sessions.add(self.session)
        return Target(lane, precision, self.pair)

    def wants(self, *targets: Target) -> tuple[Target, ...]:
        found: Any = self.takeovers.places(self.session, targets)  # type: ignore[arg-type]
        self.session.targets = found
        return tuple(found)

    def coming(self) -> tuple[Any, ...]:
        return self.takeovers.coming(self.session)


def run(test: Callable[[Case], Any]) -> None:
    async def body() -> None:
        await test(Case())

    asyncio.run(body())


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_another_precision_waits_beside_the_old_one() -> None:
    async def test(case: Case) -> None:
        new = case.place(case.lane, FP32)
        assert case.wants(new) == (case.old,)
        assert case.coming() == (new,)
        case.lane.worker.loaded.add(FP32)
        assert case.wants(new) == (new,)
        assert case.coming() == ()
        await turns()
        # The lane is still its own; the old precision is not.
        assert case.lane.worker.unbound == [(1, [FP16])]
        assert case.lane.worker.unloaded == [(7, [FP16])]
        assert case.session in case.lane.sessions
        assert case.ended == []

    run(test)


def test_an_old_place_that_is_gone_is_not_waited_at() -> None:
    async def test(case: Case) -> None:
        new = case.place(Lane(own_lane_of(case.model, case.pair)), FP16)
        case.lane.worker.loaded.clear()
        assert case.wants(new) == (new,)
        assert case.coming() == ()

    run(test)


def test_what_others_use_stays() -> None:
    async def test(case: Case) -> None:
        other = Session(2, case.model, (case.old,))
        case.lane.sessions.add(other)
        new = case.place(Lane("own"), FP16)
        new.lane.worker.loaded.add(FP16)
        assert case.wants(new) == (new,)
        await turns()
        assert case.lane.sessions == {other}
        assert case.lane.worker.unbound == [(1, [FP16])]
        assert case.lane.worker.unloaded == []

    run(test)


def test_what_waits_in_the_old_place_is_served_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "LOOK_AGAIN_S", 0)

    async def test(case: Case) -> None:
        case.lane.queued = 1
        new = case.place(Lane("own"), FP16)
        new.lane.worker.loaded.add(FP16)
        case.wants(new)
        await turns()
        assert case.lane.worker.unbound == []
        case.lane.queued = 0
        await turns()
        assert case.lane.worker.unbound == [(1, [FP16])]

    run(test)


def test_a_lane_of_its_own_ends_behind_the_last_session() -> None:
    async def test(case: Case) -> None:
        case.pair.own_worker = True
        first = Lane(own_lane_of(case.model, case.pair))
        first.worker.loaded.add(FP16)
        case.wants(case.place(first, FP16))
        case.pair.generation = 1
        second = Lane(own_lane_of(case.model, case.pair))
        assert second.name == f"{first.name}.1"
        case.lanes += [first, second]
        case.takeovers.renewed(case.model, case.pair)
        assert case.ended == []
        new = case.place(second, FP16)
        case.wants(new)
        second.worker.loaded.add(FP16)
        case.wants(new)
        await turns()
        assert case.ended == [first]

    run(test)


def test_a_shared_worker_that_cannot_load_it_says_so_in_the_pair() -> None:
    async def test(case: Case) -> None:
        case.takeovers.renewed(case.model, case.pair)
        (renewal,) = case.lane.worker.renewals
        renewal.set_result(Failure("opencl", -6, "CL_OUT_OF_HOST_MEMORY", "no memory"))
        await turns()
        assert case.pair.ready
        assert case.pair.reason.endswith("the one before serves: no memory")

    run(test)
