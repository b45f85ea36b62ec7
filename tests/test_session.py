"""Sessions and a lane under random records, replies, deaths and cancels.

Whatever happens: each request is answered exactly once, the client always owns as many output
slots as it gave away none of, and nobody else writes to a slot that it owns.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from fake_worker import FakeWorker, fake_model, new_lane, new_session
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from switchgear.daemon import lane as lane_module
from switchgear.daemon import restarts as restarts_module
from switchgear.daemon.session import Slot
from switchgear.ipc.errors import BY_CODE, ModelInUse
from switchgear.ipc.record import NO_SLOT, Kind, Priority, Record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from switchgear.daemon.session import Session

SLOTS = 2
SPARE = 2
OPERATIONS = (
    "infer", "infer", "infer", "infer", "wrong slot", "slot in use", "cancel", "cancel",
    "expire", "answer", "answer", "answer", "fail", "die", "kill", "abandon", "ready", "end",
)  # fmt: skip

step = st.tuples(
    st.sampled_from(OPERATIONS),
    st.integers(0, 1),
    st.integers(0, 15),
    st.sampled_from([Priority.DEFAULT, Priority.HIGH, Priority.BATCH]),
)


@pytest.fixture(autouse=True)
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "WorkerProcess", FakeWorker)
    # Restarts are due at the loop's next turn.
    monkeypatch.setattr(restarts_module, "RESTART_FIRST_S", 0.0)


class Client:
    """What a client knows: its slots and its requests in flight."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.owned = set(range(SLOTS))
        self.flight: dict[int, int] = {}  # request id: input slot
        self.answers: list[str] = []
        self.epoch = 1
        self.gone = False
        self._next = 1

    def send(self, source: int, target: int, priority: int) -> None:
        number = self._next
        self._next += 1
        self.flight[number] = source
        self.owned.discard(target)
        record = Record(
            Kind.INFER,
            number,
            epoch=self.epoch,
            input_slot=source,
            output_slot=target,
            priority=priority,
        )
        self.session.receive(bytearray(record.pack()))

    def send_wrong(self, source: int, target: int) -> None:
        """A record that must be refused, and that changes nothing."""
        number = self._next
        self._next += 1
        before = len(self.answers)
        record = Record(
            Kind.INFER, number, epoch=self.epoch, input_slot=source, output_slot=target
        )
        self.flight[number] = -1
        kept = set(self.owned)
        self.owned.discard(target)
        self.session.receive(bytearray(record.pack()))
        assert self.answers[before:] in (["BadSlot"], ["SlotBusy"])
        # The slot is named as it came, whoever it belongs to.
        self.owned = kept

    def cancel(self, number: int) -> None:
        self.session.receive(bytearray(Record(Kind.CANCEL, number).pack()))

    def free_inputs(self) -> list[int]:
        return [slot for slot in range(SLOTS) if slot not in self.flight.values()]

    def deliver(self, data: bytes | bytearray) -> None:
        assert not self.gone, "a record after the end"
        reply = Record.unpack(bytes(data))
        if reply.kind == Kind.GOAWAY:
            self.gone = True
            return

        assert reply.request_id in self.flight, f"{reply.request_id} was answered already"
        del self.flight[reply.request_id]
        name = "" if reply.status_domain != 1 else BY_CODE[reply.status_code].__name__
        self.answers.append(name)
        self.epoch = reply.epoch
        if reply.output_slot != NO_SLOT and name not in ("BadSlot", "SlotBusy"):
            assert reply.output_slot not in self.owned
            self.owned.add(reply.output_slot)


class World:
    """Two sessions on one lane."""

    def __init__(self, *, state: bool, on_busy: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.model = fake_model(state=state)
        # Four requests at most: with two in the worker it never fills, before that it does.
        self.lane = new_lane(queue_limit=3)
        self.clients: list[Client] = []
        self.abandoned: list[FakeWorker] = []
        for number in range(2):
            session = new_session(
                number,
                self.lane,
                self.model,
                lambda data, n=number: self.clients[n].deliver(data),  # type: ignore[misc]
                slots=SLOTS,
                spare=SPARE,
                on_busy=on_busy,
            )
            self.clients.append(Client(session))

        self.lane.start()

    @property
    def worker(self) -> Any:
        return self.lane.worker

    def play(self, operation: str, who: int, pick: int, priority: int) -> None:
        client = self.clients[who]
        if operation in ("answer", "fail", "die", "kill", "abandon", "ready"):
            self._to_worker(operation)
        elif not client.session.ended:
            self._to_session(client, operation, pick, priority)

    def _to_worker(self, operation: str) -> None:
        worker = self.worker
        if worker is None:
            return

        if operation == "ready" and worker.state == "starting":
            worker.become_ready()
        elif operation in ("answer", "fail") and worker.busy:
            worker.answer(failed=operation == "fail")
        elif operation == "die":
            worker.die()
        elif operation == "kill":
            worker.die(by_user=True)
        elif operation == "abandon":
            self.abandoned.append(worker)
            worker.die(abandoned=True)

    def _to_session(self, client: Client, operation: str, pick: int, priority: int) -> None:
        free = client.free_inputs()
        if operation == "infer" and free and client.owned:
            owned = sorted(client.owned)
            client.send(free[pick % len(free)], owned[pick % len(owned)], priority)
        elif operation == "wrong slot" and free:
            foreign = [n for n in range(SLOTS + SPARE + 2) if n not in client.owned]
            client.send_wrong(free[0], foreign[pick % len(foreign)])
        elif operation == "slot in use" and len(free) < SLOTS and client.owned:
            used = [n for n in range(SLOTS) if n not in free]
            client.send_wrong(used[pick % len(used)], min(client.owned))
        elif operation == "cancel" and client.flight:
            client.cancel(sorted(client.flight)[pick % len(client.flight)])
        elif operation == "expire" and client.flight:
            requests = client.session._requests
            client.session._expired(requests[sorted(requests)[pick % len(requests)]])
        elif operation == "end" and pick == 0:
            client.gone = True
            client.session.end()

    async def turn(self) -> None:
        """Lets what is due happen: restarts."""
        for _ in range(3):
            await asyncio.sleep(0)

    def check(self) -> None:
        writing = set().union(*(w.writing for w in self.abandoned)) if self.abandoned else set()
        if self.worker is not None:
            writing |= self.worker.writing

        for number, client in enumerate(self.clients):
            session = client.session
            if session.ended:
                continue

            slots = session.output_slots
            ours = {n for n, owner in enumerate(slots) if owner is Slot.CLIENT}
            assert ours == client.owned, f"client owns {client.owned}, daemon says {slots}"
            assert len(client.flight) == session.in_flight
            assert len(ours) + session.in_flight == SLOTS
            for slot in ours:
                assert (number, slot) not in writing, f"two writers of slot {slot}"

            requests = list(session._requests.values())
            targets = [request.output_slot for request in requests]
            assert sorted(targets) == [n for n, s in enumerate(slots) if s is Slot.REQUEST]

        lane = self.lane
        waiting = [item[-1] for item in lane._queue._heap if item[-1].waiting]
        assert lane.queued == len(waiting)
        assert len({id(request) for request in waiting}) == len(waiting)

    async def settle(self) -> None:
        """Lets a good worker end everything: nothing is left unanswered."""
        for _ in range(200):
            await self.turn()
            worker = self.worker
            if worker is None:
                if not self.lane.queued and not any(c.flight for c in self.clients):
                    break

                continue

            if worker.state == "starting":
                worker.become_ready()
            elif worker.busy:
                worker.answer()

            self.check()

        for client in self.clients:
            assert client.session.ended or not client.flight, "never answered"

    def close(self) -> None:
        for client in self.clients:
            client.gone = True
            client.session.end()

        self.lane.stop()


async def play(steps: list[tuple[str, int, int, int]], *, state: bool, on_busy: str) -> World:
    world = World(state=state, on_busy=on_busy)
    try:
        for operation in steps:
            world.play(*operation)
            await world.turn()
            world.check()

        await world.settle()
    finally:
        world.close()
        await asyncio.sleep(0)

    return world


@pytest.mark.parametrize("on_busy", ["wait", "reject", "replace_oldest"])
@pytest.mark.parametrize("state", [False, True])
@given(steps=st.lists(step, max_size=40))
@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_each_request_is_answered_once_and_no_slot_has_two_writers(
    state: bool, on_busy: str, steps: list[tuple[str, int, int, int]]
) -> None:
    asyncio.run(play(steps, state=state, on_busy=on_busy))


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as loop:
        yield loop


def test_a_death_costs_a_stateful_session_one_state_lost(runner: asyncio.Runner) -> None:
    steps = [("ready", 0, 0, 0), ("infer", 0, 0, 0), ("infer", 0, 0, 0), ("die", 0, 0, 0)]
    world = runner.run(play(steps, state=True, on_busy="wait"))
    assert world.clients[0].answers == ["StateLost", "StateLost"]
    assert world.clients[0].epoch == 2


def test_a_stateless_request_is_run_again_once(runner: asyncio.Runner) -> None:
    steps = [("ready", 0, 0, 0), ("infer", 0, 0, 0), ("die", 0, 0, 0)]
    world = runner.run(play(steps, state=False, on_busy="wait"))
    assert world.clients[0].answers == [""]
    again = [*steps, ("ready", 0, 0, 0), ("die", 0, 0, 0)]
    world = runner.run(play(again, state=False, on_busy="wait"))
    assert world.clients[0].answers == ["WorkerDied"]


def test_a_worker_left_behind_keeps_its_slot(runner: asyncio.Runner) -> None:
    """It may still write: the request goes on with a fresh slot, which the reply names."""
    steps = [("ready", 0, 0, 0), ("infer", 0, 0, 0), ("abandon", 0, 0, 0)]
    world = runner.run(play(steps, state=False, on_busy="wait"))
    client = world.clients[0]
    assert client.answers == [""]
    assert client.owned == {1, 2}


def test_end_of_a_model_tells_the_client_why(runner: asyncio.Runner) -> None:
    async def run() -> None:
        world = World(state=False, on_busy="wait")
        for slot in range(SLOTS):
            world.clients[0].send(slot, slot, Priority.DEFAULT)

        world.clients[0].session.go_away(ModelInUse)
        assert world.clients[0].answers == ["ModelInUse"] * SLOTS
        assert world.clients[0].gone
        assert world.clients[0].session.ended
        world.close()

    runner.run(run())
