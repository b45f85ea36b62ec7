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
from held_worker import held
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from switchgear.backends.generate.slow import slow
from switchgear.backends.generate.state import accumulator
from switchgear.client import connect
from switchgear.client.models import WorkerStatus
from switchgear.daemon import lane as lane_module
from switchgear.daemon import restarts as restarts_module
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
        self._priority_of: dict[int, int] = {}
        self._ahead: set[int] = set()
        self.lane.start()
        self.worker.become_ready()

    @property
    def worker(self) -> Any:
        return self.lane.worker

    def client(self, pid: int, uid: int = 0, on_busy: str = "wait") -> int:
        """Opens a session of a process; returns its number."""
        number = len(self._sessions)
        session = new_session(
            number,
            self.lane,
            self._model,
            lambda data: self._take(number, bytes(data)),
            slots=SLOTS,
            spare=SLOTS,
            on_busy=on_busy,
        )
        session.peer = SimpleNamespace(pid=pid, uid=uid, gid=0)  # type: ignore[assignment]
        self._sessions.append(session)
        self._free[number] = list(range(SLOTS))
        return number

    def send(self, client: int, priority: int = NORMAL, timeout_s: float = 0.0) -> int:
        self.sent += 1
        slot = self._free[client].pop()
        self._slot_of[self.sent] = (client, slot)
        self._priority_of[self.sent] = priority
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

    async def die(self) -> None:
        """The worker ends, of somebody else's doing; the next one is ready."""
        self.worker.die(by_user=True)
        for _ in range(100):
            if self.lane.worker is not None:
                break

            await asyncio.sleep(0)

        self.worker.become_ready()

    def waiting(self) -> list[int]:
        """What waits in the lane, by number."""
        return [r.identity for s in self._sessions for r in s._requests.values() if r.waiting]

    def check(self, queue: int, per_user: int, urgent: int) -> None:
        """The lane's bounds, and that the worker was given nothing less urgent than `urgent`
        ahead since the last check."""
        waiting = self.waiting()
        assert self.lane.queued == len(waiting)
        # Those that a dead worker had come back whether there is room or not.
        assert len(waiting) <= min(queue, 2 * per_user) + AHEAD_DEPTH
        held = [record.request_id for _, record in self.worker._records]
        assert len(held) <= AHEAD_DEPTH
        for number in set(held[1:]) - self._ahead:
            assert self._priority_of[number] <= urgent

        self._ahead = set(held[1:])

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
        # Where no test says otherwise, an urgent request is never long ago.
        monkeypatch.setattr(lane_module, "URGENT_NS", 2**62)


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


def test_nothing_less_urgent_is_handed_ahead_of_urgent_ones() -> None:
    async def test() -> None:
        crowd = Crowd()
        client = crowd.client(1)
        crowd.send(client, HIGH)
        crowd.run_all()
        first, second = crowd.send(client), crowd.send(client)
        # The worker has one of them; an urgent one waits for that one only.
        urgent = crowd.send(client, HIGH)
        crowd.run_all()
        assert crowd.order[1:] == [first, urgent, second]
        crowd.close()

    in_loop(test)


def test_the_worker_gets_two_again_when_the_urgent_ones_have_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane_module, "URGENT_NS", 0)

    async def test() -> None:
        crowd = Crowd()
        client = crowd.client(1)
        crowd.send(client, HIGH)
        crowd.run_all()
        first, second = crowd.send(client), crowd.send(client)
        urgent = crowd.send(client, HIGH)
        crowd.run_all()
        assert crowd.order[1:] == [first, second, urgent]
        crowd.close()

    in_loop(test)


def test_who_would_not_be_handed_ahead_is_busy_where_nobody_waits() -> None:
    async def test() -> None:
        crowd = Crowd()
        waits, rejects = crowd.client(1), crowd.client(2, on_busy="reject")
        crowd.send(waits)
        second = crowd.send(rejects)
        assert second not in crowd.outcomes, "the worker has room for two"
        crowd.run_all()
        crowd.send(waits, HIGH)
        refused = crowd.send(rejects)
        assert crowd.outcomes[refused] == "Busy"
        urgent = crowd.send(rejects, HIGH)
        assert urgent not in crowd.outcomes
        crowd.close()

    in_loop(test)


@pytest.mark.parametrize("full", ["queue", "per_user"])
def test_a_full_queue_gives_up_the_least_urgent_for_an_urgent_one(full: str) -> None:
    async def test() -> None:
        crowd = Crowd(**{"queue": 8, "per_user": 8, full: 3})
        client = crowd.client(1)
        running = [crowd.send(client, HIGH) for _ in range(AHEAD_DEPTH)]
        waiting = [crowd.send(client, NORMAL), crowd.send(client, BATCH), crowd.send(client)]
        refused = crowd.send(client, BATCH)
        assert crowd.outcomes == {refused: "Busy"}
        first = crowd.send(client, HIGH)
        assert crowd.outcomes == {refused: "Busy", waiting[1]: "Busy"}
        assert crowd.retry_after_ms[waiting[1]] >= 1
        second = crowd.send(client, HIGH)
        assert crowd.outcomes[waiting[2]] == "Busy", "the newest of its rank"
        crowd.run_all()
        assert crowd.order == [*running, first, second, waiting[0]]
        crowd.close()

    in_loop(test)


def test_a_users_full_share_costs_no_other_user() -> None:
    async def test() -> None:
        crowd = Crowd(queue=8, per_user=2)
        one, other = crowd.client(1, uid=1), crowd.client(2, uid=2)
        for _ in range(AHEAD_DEPTH):
            crowd.send(one, HIGH)

        kept = [crowd.send(other, BATCH) for _ in range(2)]
        for _ in range(2):
            crowd.send(one, HIGH)

        assert crowd.outcomes.get(crowd.send(one, HIGH)) == "Busy"
        assert not set(kept) & set(crowd.outcomes)
        crowd.run_all()
        assert crowd.order[-2:] == kept
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


step = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 3), st.sampled_from([HIGH, NORMAL, BATCH])),
    st.tuples(st.sampled_from(["run", "run", "expire", "die"]), st.integers(0, 15), st.none()),
)


@pytest.mark.parametrize(("queue", "per_user"), [(4, 4), (6, 3), (3, 8)])
@given(steps=st.lists(step, max_size=80))
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_whoever_is_refused_for_room_was_the_least_urgent(
    monkeypatch: pytest.MonkeyPatch,
    queue: int,
    per_user: int,
    steps: list[tuple[str, int, int | None]],
) -> None:
    """Two clients of each of two users. `Crowd` holds that each is answered once."""
    # Restarts are due at the loop's next turn.
    monkeypatch.setattr(restarts_module, "RESTART_FIRST_S", 0.0)

    async def test() -> None:
        crowd = Crowd(queue=queue, per_user=per_user)
        clients = [crowd.client(number, uid=number % 2) for number in range(4)]
        priority_of = crowd._priority_of
        user_of: dict[int, int] = {}
        for kind, number, priority in steps:
            waiting = crowd.waiting()
            if kind == "send" and priority is not None and crowd._free[clients[number]]:
                before = set(crowd.outcomes)
                user_of[crowd.sent + 1] = number % 2
                sent = crowd.send(clients[number], priority)
                refused = set(crowd.outcomes) - before
                assert len(refused) <= 1
                for one in refused:
                    assert crowd.outcomes[one] == "Busy"
                    rivals = [n for n in (*waiting, sent) if user_of[n] == user_of[one]]
                    assert priority_of[one] == max(priority_of[n] for n in rivals)
                    assert one == sent or priority_of[one] > priority_of[sent]
                    full = sum(user_of[n] == number % 2 for n in waiting) >= per_user
                    assert full or len(waiting) >= queue
                    assert not full or user_of[one] == number % 2, "another user paid"
            elif kind == "run" and crowd.worker.busy:
                crowd.run_one()
            elif kind == "expire" and waiting:
                crowd.expire(waiting[number % len(waiting)])
            elif kind == "die" and crowd.worker.busy:
                await crowd.die()

            crowd.check(queue, per_user, min(priority_of.values(), default=BATCH))

        crowd.run_all()
        assert len(crowd.outcomes) == crowd.sent, "some were never answered"
        crowd.close()

    in_loop(test)


def test_a_daemon_runs_nothing_that_has_expired() -> None:
    """The model counts its own runs, in the lane where others stand before it: in a worker that
    is stopped until the deadlines are over."""
    config = "[workers]\nhang_s = 600\n"
    with DaemonProcess(config=config) as daemon, connect(daemon.socket) as client:

        def lane() -> WorkerStatus:
            (row,) = [w for w in client.status()["workers"] if w["lane"] == "interactive"]
            return row

        client.load_model(slow(1.0), "slow")
        client.load_model(accumulator(), "counter")
        one, x = np.ones(4, np.float32), np.ones((1, 1, 1, 128), np.float32)
        with (
            client.open_session("slow", 6) as blocking,
            client.open_session("counter", 8) as counting,
        ):
            assert counting.run({"x": one}, copy=True)["total"][0] == 1
            with held(lane()["pid"]):
                slow_ones = [blocking.submit({"x": x}) for _ in range(6)]
                # Records of two sessions are read in turns.
                while lane()["running"] + lane()["queued"] < len(slow_ones):
                    pass

                late = [counting.submit({"x": one}, deadline_ms=20.0) for _ in range(7)]
                for request in late:
                    with pytest.raises(DeadlineExceeded):
                        request.result()

            # This one has no deadline: it runs.
            total = counting.run({"x": one}, copy=True)["total"]
            assert total[0] == 2, "an expired request was run"
            assert all(request.result().run_ms > 0 for request in slow_ones)

        assert client.status()["counters"]["requests_answered"] == 1 + 6 + 7 + 1
