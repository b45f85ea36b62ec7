"""Frames in flight count by their age, with the limits of the session that sent them."""

from __future__ import annotations

from time import monotonic
from types import SimpleNamespace
from typing import Any, Final

from switchgear.daemon.config import Configuration
from switchgear.daemon.protocol.machine import Protocol
from switchgear.daemon.protocol.topology import PairKey, SessionLimits
from switchgear.daemon.switchboard.board import Switchboard
from switchgear.daemon.switchboard.place import Place
from switchgear.daemon.switchboard.topology import Part, topology_of

PARTS: Final = {"cpu": Part("cpu", "cpu"), "npu": Part("npu", "npu")}
ON_NPU: Final = PairKey("model", "npu", "fp32")
WORKER: Final = 7
OWN: Final = SessionLimits(1, slow_ms=10.0)


class World:
    """A board without a sensor for its NPU: there, slow frames alone decide."""

    def __init__(self) -> None:
        self.protocol = Protocol(None, topology_of(PARTS, {}), seed=1)
        watch: Any = None
        self.board = Switchboard(
            Configuration(), self.protocol, PARTS, {}, watch, lambda _event: None
        )
        pair = SimpleNamespace(
            backend="npu", precision="fp32", ready=True, fresh=False, figures={"run_us": 5000}
        )
        model: Any = SimpleNamespace(digest=ON_NPU.model, run_us=5000, pairs={"npu": pair})
        self.board.add_model(model)

    def place(self) -> Place:
        return self.board._places[ON_NPU]

    def age(self, age_ms: float, limits: SessionLimits | None) -> set[str]:
        session = SimpleNamespace(seat=SimpleNamespace(limits=limits))
        request = SimpleNamespace(place=self.place(), session=session)
        lane: Any = SimpleNamespace(
            backend="npu", head=(request, age_ms), worker=SimpleNamespace(pid=WORKER)
        )
        return self.board.age([lane], monotonic())

    def allowed(self, session: int = 0) -> bool:
        return self.protocol.admit(ON_NPU, monotonic(), session=session).allowed


def test_a_frame_that_hangs_moves_its_own_session_by_its_own_limit() -> None:
    world = World()
    world.place().is_first_use(WORKER)
    # Three times its session's limit, below the pair's own 200 ms.
    assert world.age(35.0, OWN) == {"npu"}
    assert not world.allowed(OWN.session)
    assert world.allowed()
    assert world.allowed(2)


def test_a_frame_without_limits_of_its_own_counts_by_the_pairs() -> None:
    world = World()
    world.place().is_first_use(WORKER)
    world.age(35.0, None)
    assert world.allowed()
    world.age(650.0, None)
    assert not world.allowed()


def test_a_pairs_first_frame_in_a_worker_counts_no_age() -> None:
    world = World()
    assert world.age(650.0, OWN) == {"npu"}
    assert world.allowed()
    assert world.allowed(OWN.session)
