"""Sessions and lanes with workers that a test plays: clients that know what they own, random
operations, and what has to hold after each.

A test sets `lane_module.WorkerProcess` to `FakeWorker` and the first restart's delay to 0.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fake_worker import FakeWorker, fake_model, new_lane, new_session
from hypothesis import strategies as st

from switchgear.daemon.lane import Lane
from switchgear.daemon.lane_settings import LaneSettings
from switchgear.daemon.request import Second
from switchgear.daemon.slots import Slot
from switchgear.ipc.errors import BY_CODE
from switchgear.ipc.record import NO_SLOT, Kind, Priority, Record

if TYPE_CHECKING:
    from switchgear.daemon.request import Request
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


class Everywhere:
    """Sends what failed in one lane to the other, once."""

    def __init__(self, lanes: list[Lane]) -> None:
        self._lanes = lanes

    def changed(self, lane: Lane) -> None: ...
    def answered(self, lane: Lane, request: Request, run_ns: int, now_ns: int) -> None: ...
    def failed(self, lane: Lane, request: Request, domain: int, code: int) -> None: ...
    def died(self, lane: Lane, request: Request, reason: str) -> None: ...

    def elsewhere(self, request: Request, lane: Lane) -> Lane | None:
        if request.session.ended:
            return None

        others = (one for one in self._lanes if one is not lane)
        return next((one for one in others if not request.tried >> one.number & 1), None)


class CountingMeter:
    """How many requests a session's meter was told of."""

    def __init__(self) -> None:
        self.requests = 0

    def finished(self, *_: object) -> None:
        self.requests += 1

    def refused(self, *_: object) -> None:
        self.requests += 1

    def rejected(self, _code: int) -> None: ...
    def close(self) -> None: ...


class World:
    """Two sessions on one lane. Those that hedge have a device's lane too: each request goes
    to one of the two and, where slots are spare, to the other."""

    def __init__(self, *, state: bool, on_busy: str, hedge: bool = False) -> None:
        self.loop = asyncio.get_running_loop()
        self.model = fake_model(state=state)
        # Four requests at most: with two in the worker it never fills, before that it does.
        self.lane = new_lane(queue_limit=3)
        self.lanes = [self.lane]
        self.clients: list[Client] = []
        self.meters: list[Any] = []
        self.abandoned: list[FakeWorker] = []
        self.hedged = 0
        self.spare = SPARE * (2 if hedge else 1)
        self._first = 0
        if hedge:
            settings = LaneSettings({}, 3, 3, hang_s=1000.0, start_s=1000.0)
            self.lanes.append(Lane("npu", "device", "0", settings))
            for lane in self.lanes:
                lane.watcher = Everywhere(self.lanes)

        for number in range(2):
            session = new_session(
                number,
                self.lane,
                self.model,
                lambda data, n=number: self.clients[n].deliver(data),  # type: ignore[misc]
                slots=SLOTS,
                spare=self.spare,
                on_busy=on_busy,
                route=self._route,
            )
            self.meters.append(CountingMeter())
            session.meter = self.meters[-1]
            self.clients.append(Client(session))

        for lane in self.lanes:
            lane.start()

    def _route(self, session: Session, request: Request) -> Lane:
        if len(self.lanes) == 1:
            return self.lane

        first, second = self.lanes[self._first], self.lanes[1 - self._first]
        place: Any = None
        if session.may_hedge:
            self.hedged += 1
            request.second = Second(second, 0, place, 0)

        return first

    def play(self, operation: str, who: int, pick: int, priority: int) -> None:
        client = self.clients[who]
        if operation in ("answer", "fail", "die", "kill", "abandon", "ready"):
            self._to_worker(operation, self.lanes[pick % len(self.lanes)])
        elif not client.session.ended:
            self._to_session(client, operation, pick, priority)

    def _to_worker(self, operation: str, lane: Lane) -> None:
        worker: Any = lane.worker
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
            self._first = pick % 2
            owned = sorted(client.owned)
            client.send(free[pick % len(free)], owned[pick % len(owned)], priority)
        elif operation == "wrong slot" and free:
            count = SLOTS + self.spare + 2
            foreign = [n for n in range(count) if n not in client.owned]
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
        workers: list[Any] = [lane.worker for lane in self.lanes if lane.worker is not None]
        writing = set().union(*(worker.writing for worker in (*workers, *self.abandoned)))
        for number, client in enumerate(self.clients):
            session = client.session
            if session.ended:
                continue

            slots = session.output_slots
            ours = {n for n, owner in enumerate(slots) if owner is Slot.CLIENT}
            assert ours == client.owned, f"client owns {client.owned}, daemon says {slots}"
            assert len(client.flight) == session.in_flight
            assert len(ours) + session.in_flight == SLOTS
            assert session.answered == self.meters[number].requests, "it counted one twice"
            free = {n for n, owner in enumerate(slots) if owner is Slot.SPARE}
            for slot in ours | free:
                assert (number, slot) not in writing, f"two writers of slot {slot}"

            requests = list(session._requests.values())
            requests += [request.twin for request in requests if request.twin is not None]
            targets = [request.output_slot for request in requests]
            assert sorted(targets) == [n for n, s in enumerate(slots) if s is Slot.REQUEST]
            for request in requests:
                assert request.twin is None or request.twin.twin is request
                assert not request.answered
                assert request.lane is not None

        for lane in self.lanes:
            waiting = [item[-1] for item in lane._queue._heap if item[-1].waiting]
            assert lane.queued == len(waiting)
            assert len({id(request) for request in waiting}) == len(waiting)
            assert not any(request.answered for request in waiting)

    async def settle(self) -> None:
        """Lets a good worker end everything: nothing is left unanswered."""
        for _ in range(200):
            await self.turn()
            if not any(client.flight for client in self.clients) and not any(
                lane.running or lane.queued for lane in self.lanes
            ):
                break

            for lane in self.lanes:
                worker: Any = lane.worker
                if worker is None:
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

        for lane in self.lanes:
            lane.stop()


async def play(
    steps: list[tuple[str, int, int, int]], *, state: bool, on_busy: str, hedge: bool = False
) -> World:
    world = World(state=state, on_busy=on_busy, hedge=hedge)
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
