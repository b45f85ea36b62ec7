"""More requests than a lane can run: who goes first, who is refused, and what never runs.

A lane with a worker that a test answers for, so that the order is known; then a real daemon
whose model counts its own runs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from daemon_process import DaemonProcess
from fake_worker import FakeWorker, fake_model, new_session

from switchgear.backends.generate.slow import slow
from switchgear.backends.generate.state import accumulator
from switchgear.client import connect
from switchgear.daemon import lane as lane_module
from switchgear.daemon.lane import AHEAD_DEPTH, Lane
from switchgear.daemon.lane_settings import LaneSettings
from switchgear.ipc.errors import BY_CODE, DeadlineExceeded
from switchgear.ipc.record import Kind, Priority, Record

SLOTS = 16
HIGH, NORMAL, BATCH = Priority.HIGH, Priority.NORMAL, Priority.BATCH


class Crowd:
    """Sessions of several clients on one lane. Requests are named by a number of their own;
    `order` is that of the runs, `outcomes` what each was answered: `ok`, or an error's name."""

    def __init__(self, *, queue: int = 256, per_user: int = 256) -> None:
        settings = LaneSettings({}, queue, per_user, hang_s=1000.0, start_s=1000.0)
        self.lane = Lane("cpu", "interactive", "0", settings)
        self.order: list[int] = []
        self.outcomes: dict[int, str] = {}
        self.retry_after_ms: dict[int, int] = {}
        self.sent = 0
        self._model = fake_model()
        self._sessions: list[Any] = []
        self._free: dict[int, list[int]] = {}
        self._slot_of: dict[int, tuple[int, int]] = {}
        self.lane.start()
        self.worker.become_ready()

    @property
    def worker(self) -> Any:
        return self.lane.worker

    def client(self, pid: int, uid: int = 0) -> int:
        """Opens a session of a process; returns its number."""
        number = len(self._sessions)
        session = new_session(
            number,
            self.lane,
            self._model,
            lambda data: self._take(number, bytes(data)),
            slots=SLOTS,
            spare=SLOTS,
        )
        session.peer = SimpleNamespace(pid=pid, uid=uid, gid=0)  # type: ignore[assignment]
        self._sessions.append(session)
        self._free[number] = list(range(SLOTS))
        return number

    def send(self, client: int, priority: int = NORMAL, timeout_s: float = 0.0) -> int:
        self.sent += 1
        slot = self._free[client].pop()
        self._slot_of[self.sent] = (client, slot)
        record = Record(
            Kind.INFER,
            self.sent,
            epoch=1,
            input_slot=slot,
            output_slot=slot,
            priority=priority,
            timeout_us=round(timeout_s * 1e6),
        )
        self._sessions[client].receive(bytearray(record.pack()))
        return self.sent

    def expire(self, request: int) -> None:
        """Its deadline is there, whatever the clock says."""
        client, _ = self._slot_of[request]
        session = self._sessions[client]
        session._expired(session._requests[request])

    def run_one(self) -> int:
        """The worker ends its oldest run; returns which one that was."""
        _, record = self.worker._records[0]
        number: int = record.request_id
        self.order.append(number)
        self.worker.answer()
        return number

    def run_all(self) -> None:
        while self.worker.busy:
            self.run_one()

    def _take(self, client: int, data: bytes) -> None:
        reply = Record.unpack(data)
        number = reply.request_id
        assert number not in self.outcomes, f"{number} was answered already"
        name = "ok" if not reply.status_domain else BY_CODE[reply.status_code].__name__
        self.outcomes[number] = name
        self.retry_after_ms[number] = reply.retry_after_ms
        owner, slot = self._slot_of[number]
        assert owner == client
        self._free[client].append(slot)

    def close(self) -> None:
        for session in self._sessions:
            session.deliver = lambda _data: None
            session.end()

        self.lane.stop()


@pytest.fixture(autouse=True)
def without_processes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "daemon" not in request.node.name:
        monkeypatch.setattr(lane_module, "WorkerProcess", FakeWorker)


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 15))


def test_urgent_ones_go_before_all_that_the_worker_has_not_got() -> None:
    async def test() -> None:
        crowd = Crowd()
        client = crowd.client(1)
        batch = [crowd.send(client, BATCH) for _ in range(4)]
        normal = [crowd.send(client, NORMAL) for _ in range(4)]
        high = [crowd.send(client, HIGH) for _ in range(4)]
        crowd.run_all()
        ahead = batch[:AHEAD_DEPTH]
        assert crowd.order == [*ahead, *high, *normal, *batch[AHEAD_DEPTH:]]
        crowd.close()

    in_loop(test)


def test_clients_of_one_priority_take_turns() -> None:
    async def test() -> None:
        crowd = Crowd()
        greedy, modest = crowd.client(1), crowd.client(2)
        many = [crowd.send(greedy) for _ in range(SLOTS)]
        few = [crowd.send(modest) for _ in range(3)]
        crowd.run_all()
        # After what the worker had: one of each as long as both wait.
        rest = crowd.order[AHEAD_DEPTH:]
        assert rest[:6] == [many[2], few[0], many[3], few[1], many[4], few[2]]
        assert sorted(crowd.order) == sorted([*many, *few])
        crowd.close()

    in_loop(test)


def test_one_users_quota_leaves_room_for_another() -> None:
    async def test() -> None:
        crowd = Crowd(queue=12, per_user=8)
        one, other = crowd.client(1, uid=1000), crowd.client(2, uid=1001)
        greedy = [crowd.send(one) for _ in range(SLOTS)]
        waiting = AHEAD_DEPTH + 8
        assert [crowd.outcomes.get(number) for number in greedy] == (
            [None] * waiting + ["Busy"] * (SLOTS - waiting)
        )
        assert all(crowd.retry_after_ms[number] >= 1 for number in greedy[waiting:])
        modest = [crowd.send(other) for _ in range(6)]
        # Four more places: the whole queue has 12.
        assert [crowd.outcomes.get(number) for number in modest] == [None] * 4 + ["Busy"] * 2
        crowd.run_all()
        assert Counter(crowd.outcomes.values()) == {"ok": waiting + 4, "Busy": 8}
        crowd.close()

    in_loop(test)


def test_an_expired_request_never_reaches_the_worker() -> None:
    async def test() -> None:
        crowd = Crowd()
        client = crowd.client(1)
        first = [crowd.send(client) for _ in range(AHEAD_DEPTH)]
        late = [crowd.send(client, timeout_s=1000.0) for _ in range(4)]
        patient = crowd.send(client)
        for number in late:
            crowd.expire(number)

        assert [crowd.outcomes[number] for number in late] == ["DeadlineExceeded"] * 4
        crowd.run_all()
        assert crowd.order == [*first, patient]
        crowd.close()

    in_loop(test)


def test_one_that_expires_while_it_runs_is_answered_once() -> None:
    async def test() -> None:
        crowd = Crowd()
        client = crowd.client(1)
        running = crowd.send(client, timeout_s=1000.0)
        crowd.expire(running)
        assert crowd.outcomes[running] == "DeadlineExceeded"
        assert crowd.run_one() == running
        # A second answer would have been an error in `_take`.
        assert crowd.outcomes == {running: "DeadlineExceeded"}
        crowd.close()

    in_loop(test)


def test_four_times_what_the_lane_can_run() -> None:
    """Each round one high, one normal and two batch requests of as many users come in, and one
    run ends: whoever cannot be run is refused or expires, the urgent ones are served."""

    async def test() -> None:
        crowd = Crowd(queue=30, per_user=10)
        urgent, usual = crowd.client(1, uid=1), crowd.client(2, uid=2)
        bulk = [crowd.client(3, uid=3), crowd.client(4, uid=4)]
        high: list[int] = []
        short: list[int] = []
        for number in range(200):
            high.append(crowd.send(urgent, HIGH))
            if crowd._free[usual]:
                short.append(crowd.send(usual, timeout_s=1000.0))
                if number >= 5 and short[-6] not in crowd.outcomes:
                    crowd.expire(short[-6])

            for client in bulk:
                crowd.send(client, BATCH)

            crowd.run_one()

        crowd.run_all()
        assert len(crowd.outcomes) == crowd.sent, "some were never answered"
        assert {crowd.outcomes[number] for number in high} == {"ok"}
        # In the worker's order, a high one stands at most behind what the worker had already.
        places = {number: index for index, number in enumerate(crowd.order)}
        assert all(places[number] <= index + AHEAD_DEPTH for index, number in enumerate(high))
        expired = {n for n, outcome in crowd.outcomes.items() if outcome == "DeadlineExceeded"}
        assert expired
        assert not expired & set(crowd.order)
        assert set(crowd.outcomes.values()) == {"ok", "Busy", "DeadlineExceeded"}
        crowd.close()

    in_loop(test)


def test_a_daemon_runs_nothing_that_has_expired() -> None:
    """The model counts its own runs, in the lane where slow ones stand before it."""
    with DaemonProcess() as daemon, connect(daemon.socket) as client:
        client.load_model(slow(60.0), "slow")
        client.load_model(accumulator(), "counter")
        one, x = np.ones(4, np.float32), np.ones((1, 1, 1, 128), np.float32)
        with (
            client.open_session("slow", 6) as blocking,
            client.open_session("counter", 8) as counting,
        ):
            assert counting.run({"x": one}, copy=True)["total"][0] == 1
            slow_ones = [blocking.submit({"x": x}) for _ in range(6)]
            late = [counting.submit({"x": one}, deadline_ms=20.0) for _ in range(7)]
            for request in late:
                with pytest.raises(DeadlineExceeded):
                    request.result()

            # This one has no deadline: it runs, behind the slow ones.
            total = counting.run({"x": one}, copy=True)["total"]
            assert total[0] == 2, "an expired request was run"
            assert all(request.result().run_ms > 0 for request in slow_ones)

        assert client.status()["counters"]["requests_answered"] == 1 + 6 + 7 + 1
