"""A device's lane: workers that die while they load, and no restarts that nobody needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

import pytest
from fake_worker import FakeWorker, fake_model, new_session

from switchgear.daemon import lane as lane_module
from switchgear.daemon import restarts as restarts_module
from switchgear.daemon.deaths import QUARANTINE_DEATHS
from switchgear.daemon.lane import Lane
from switchgear.daemon.lane_settings import LaneSettings
from switchgear.daemon.request import Request
from switchgear.daemon.session import Session
from switchgear.ipc.errors import ModelQuarantined
from switchgear.ipc.record import Kind, Record

SETTINGS = LaneSettings({}, 4, 4, hang_s=1000.0, start_s=1000.0)


@pytest.fixture(autouse=True)
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "WorkerProcess", FakeWorker)
    # Restarts are due at the loop's next turn.
    monkeypatch.setattr(restarts_module, "RESTART_FIRST_S", 0.0)


def infer() -> bytearray:
    return bytearray(Record(Kind.INFER, 1, epoch=1, input_slot=0, output_slot=0).pack())


def on_a_lane(
    work: Callable[[Lane, Session, Any, list[Record]], Any], backend: str = "npu"
) -> None:
    async def run() -> None:
        answers: list[Record] = []
        lane = Lane(backend, "device", "0", SETTINGS)
        model = fake_model()
        session = new_session(
            1, lane, model, lambda data: answers.append(Record.unpack(bytes(data)))
        )
        await work(lane, session, model, answers)

    asyncio.run(run())


async def started(lane: Lane) -> Any:
    """The lane's worker, once its restart was due."""
    for _ in range(100):
        if lane.worker is not None:
            break

        await asyncio.sleep(0)

    worker: Any = lane.worker
    worker.become_ready()
    return worker


def test_deaths_while_it_is_loaded_count_against_the_model() -> None:
    async def work(lane: Lane, session: Session, model: Any, answers: list[Record]) -> None:
        lane.start()
        for death in range(QUARANTINE_DEATHS):
            assert lane.blamed not in model.quarantined, death
            worker = await started(lane)
            worker.loading = (model, monotonic_ns())
            worker.die()

        assert lane.blamed in model.quarantined
        session.receive(infer())
        assert [answer.status_code for answer in answers] == [ModelQuarantined.code]

    on_a_lane(work)


def test_a_run_behind_a_load_is_not_to_blame() -> None:
    async def work(lane: Lane, session: Session, model: Any, _: list[Record]) -> None:
        lane.start()
        worker = await started(lane)
        other = fake_model()
        worker.loading = (other, monotonic_ns())
        session.receive(infer())
        assert lane.running == 1
        worker.die()
        assert (other.deaths[lane.blamed], model.deaths[lane.blamed]) == (1, 0)

    on_a_lane(work)


def test_a_load_behind_a_run_is_not_to_blame() -> None:
    async def work(lane: Lane, session: Session, model: Any, _: list[Record]) -> None:
        lane.start()
        worker = await started(lane)
        session.receive(infer())
        other = fake_model()
        worker.loading = (other, monotonic_ns() + 1)
        worker.die()
        assert (other.deaths[lane.blamed], model.deaths[lane.blamed]) == (0, 1)

    on_a_lane(work)


@pytest.mark.parametrize(("backend", "comes_back"), [("npu", False), ("cpu", True)])
def test_a_device_without_sessions_is_not_started_again(backend: str, comes_back: bool) -> None:
    async def work(lane: Lane, session: Session, _model: Any, _: list[Record]) -> None:
        lane.start()
        worker = await started(lane)
        session.end()
        lane.forget(session)
        worker.die()
        for _turn in range(100):
            await asyncio.sleep(0)

        assert (lane.worker is not None) is comes_back
        # The next need starts it.
        assert lane.start() is not None

    on_a_lane(work, backend)


def test_a_lane_whose_lost_work_is_done_elsewhere_comes_back() -> None:
    async def work(lane: Lane, session: Session, model: Any, _: list[Record]) -> None:
        other = Lane("cpu", "interactive", "0", SETTINGS)
        other.start()
        await started(other)

        class Elsewhere:
            def changed(self, lane: Lane) -> None: ...
            def died(self, lane: Lane, request: Request, reason: str) -> None: ...

            def elsewhere(self, request: Request, lane: Lane) -> Lane:
                return other

        lane.watcher = Elsewhere()  # type: ignore[assignment]
        lane.start()
        worker = await started(lane)
        session.receive(infer())
        worker.die()
        assert other.running == 1
        assert await started(lane) is not worker

    on_a_lane(work)
