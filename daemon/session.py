"""A session: its slots, its requests, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Final

from switchgear.daemon.data_socket import DataSocket
from switchgear.daemon.hedging import Hedges
from switchgear.daemon.options import Options
from switchgear.daemon.request import NO_DEADLINE, Request
from switchgear.daemon.slots import Slot
from switchgear.ipc import record
from switchgear.ipc.errors import (
    BadRecord,
    BadRequest,
    BadSlot,
    Busy,
    Cancelled,
    DeadlineExceeded,
    NoBackend,
    ShuttingDown,
    SlotBusy,
    StateLost,
    Superseded,
    SwitchgearError,
    WorkerDied,
)
from switchgear.ipc.record import NO_SLOT, RECORD_BYTES, Flag, Kind, Priority
from switchgear.ipc.worker import layout_to_json

if TYPE_CHECKING:
    import socket

    from switchgear.daemon.instances import Instance
    from switchgear.daemon.lane import Lane
    from switchgear.daemon.models import Model
    from switchgear.daemon.router import Target
    from switchgear.daemon.session_events import Listener
    from switchgear.daemon.switchboard.place import Seat
    from switchgear.daemon.telemetry.requests import Meter
    from switchgear.daemon.varlink_server import Peer
    from switchgear.ipc.arena import Layout

MAX_TIMEOUT_S: Final = 86400.0
# Plain numbers: comparing enumerations is slow, and this is the data plane.
_INFER: Final = int(Kind.INFER)
_CANCEL: Final = int(Kind.CANCEL)
_LATE: Final = int(Flag.LATE)
_CLIENT_FLAGS: Final = int(Flag.RESET)
_LAST_PRIORITY: Final = int(Priority.BATCH)
_LAST_CLOCK: Final = int(record.Clock.REALTIME)

log = logging.getLogger(__name__)
_OF_CLIENT: Final = Slot.CLIENT
_OF_REQUEST: Final = Slot.REQUEST


class Session:
    """Serves one client's records. Without a socket, `deliver` takes the replies."""

    def __init__(
        self,
        identity: int,
        peer: Peer,
        instance: Instance,
        options: Options,
        arena_fd: int,
        layout: Layout,
        route: Callable[[Session, Request], Lane | None],
        retry_after_ms: Callable[[Session], int],
        on_end: Callable[[Session], None],
    ) -> None:
        self.identity = identity
        self.peer = peer
        self.instance = instance
        self.model: Model = instance.model
        self.options = options
        self.arena_fd = arena_fd
        self.layout = layout
        self.layout_json = layout_to_json(layout)
        self.epoch = 1
        self.answered = 0
        self.lanes: set[Lane] = set()
        # Where the router may send requests, and its answers by priority: lane, reason and
        # precision.
        self.targets: tuple[Target, ...] = ()
        self.routes: dict[int, tuple[Lane, int, int]] = {}
        # What the switchboard knows of it.
        self.seat: Seat | None = None
        # Where the client asked for events.
        self.listener: Listener | None = None
        self.accepting = True
        self.deliver: Callable[[bytes | bytearray], None] = lambda _data: None
        # Counts what is answered; None where nobody wants to know.
        self.meter: Meter | None = None
        self._waits_when_busy = options.on_busy == "wait"
        self._route = route
        self._retry_after_ms = retry_after_ms
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._inputs: list[Request | None] = [None] * options.slots
        self._outputs = [
            Slot.CLIENT if number < options.slots else Slot.SPARE
            for number in range(len(layout.outputs))
        ]
        # Unanswered requests by id; of two copies of one, the session's.
        self._requests: dict[int, Request] = {}
        self._hedges = Hedges(self._requests, self._inputs, self._outputs)
        self._link: DataSocket | None = None
        self.ended = False

    @property
    def data_socket(self) -> socket.socket | None:
        """The data socket, None before `attach`; it stays the session's."""
        return self._link.sock if self._link is not None else None

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    @property
    def may_hedge(self) -> bool:
        """Whether a slot is spare for a second copy, and one more to give a request up with."""
        return self._outputs.count(Slot.SPARE) >= 2

    @property
    def output_slots(self) -> list[Slot]:
        return list(self._outputs)

    def attach(self, sock: socket.socket, pidfd: int) -> None:
        """Serves `sock` until it closes or the process behind `pidfd` exits; owns both."""
        self._link = DataSocket(sock, pidfd, self.receive, self.end, f"session {self.identity}")
        self.deliver = self._link.send

    # Records from the client.

    def receive(self, data: bytearray) -> None:
        """Handles one record, and keeps it; what is none ends the session after one error."""
        arrival_ns = monotonic_ns()
        try:
            # First what every frame is, without a call: see `check_request`.
            if (
                len(data) == RECORD_BYTES
                and data[0] == _INFER
                and data[1] == record.RECORD_VERSION
                and data.endswith(record.ZERO_AFTER_REQUEST)
                and not data[22]
                and not data[23]
            ):
                self._infer(data, arrival_ns)
                return

            record.check_request(data)
            if data[0] == _CANCEL:
                self._cancel(data)
            else:
                raise BadRequest("ARENA_ADD is not supported")
        except BadRecord as error:
            log.info("session %d: %s", self.identity, error)
            self._answer_record(data, error.code)
            self.end()
        except BadRequest as error:
            self._answer_record(data, error.code)

    def _answer_record(self, data: bytearray, code: int) -> None:
        """The reply to a record that never became a request."""
        reply = record.Record(Kind.REPLY, epoch=self.epoch)
        if len(data) == RECORD_BYTES:
            fields = record.REQUEST.unpack_from(data)
            reply.request_id, reply.input_slot, reply.output_slot = fields[4:7]

        reply.status_domain = 1
        reply.status_code = code
        reply.temperature_age_ms = record.NO_READING
        if self.meter is not None:
            self.meter.rejected(code)

        self.deliver(reply.pack())

    def _infer(self, data: bytearray, arrival_ns: int) -> None:
        fields = record.REQUEST.unpack_from(data)
        _, _, flags, epoch, identity, source, target, priority, clock, _, timeout_us = fields
        if flags & ~_CLIENT_FLAGS or priority > _LAST_PRIORITY or clock > _LAST_CLOCK:
            raise BadRecord("unknown flags, priority or clock")

        if identity in self._requests:
            raise BadRecord(f"request {identity} is in flight already")

        deadline_ns = NO_DEADLINE
        if timeout_us:
            deadline_ns = min(arrival_ns + timeout_us * 1000, NO_DEADLINE)

        request = Request(
            self,
            data,
            identity,
            source,
            target,
            priority or self.options.priority,
            arrival_ns,
            deadline_ns,
        )
        inputs, outputs = self._inputs, self._outputs
        if not (
            source < len(inputs)
            and inputs[source] is None
            and target < len(outputs)
            and outputs[target] is _OF_CLIENT
            and self.accepting
            and (epoch == self.epoch or not self.model.state)
        ):
            # It never owned its slots: they stay as they are.
            problem = self._problem(source, target, epoch)
            if self.meter is not None:
                self.meter.rejected(problem.code)

            self.deliver(request.refuse(problem.code, target, self.epoch, arrival_ns))
            return

        self._requests[identity] = request
        inputs[source] = request
        outputs[target] = _OF_REQUEST
        if timeout_us:
            timeout_s = min(timeout_us / 1e6, MAX_TIMEOUT_S)
            request.timer = self._loop.call_later(timeout_s, self._expired, request)

        lane = self._route(self, request)
        if lane is None:
            self.refuse(request, NoBackend, retry_after_ms=self._retry_after_ms(self))
            return

        if self._waits_when_busy and lane in self.lanes:
            lane.submit(request)
        else:
            self._submit(request, lane)

        if request.second is not None:
            twin = self._hedges.copy(request)
            if twin is not None:
                self.resubmit(twin, request.second.lane)

    def _problem(self, source: int, target: int, epoch: int) -> type[SwitchgearError]:
        """Why a request cannot be taken."""
        if source >= len(self._inputs) or target >= len(self._outputs):
            return BadSlot

        if self._inputs[source] is not None:
            return SlotBusy

        if self._outputs[target] is not _OF_CLIENT:
            return BadSlot

        if epoch != self.epoch and self.model.state:
            return StateLost

        return ShuttingDown

    def _submit(self, request: Request, lane: Lane) -> None:
        if not self._waits_when_busy:
            if self.options.on_busy == "reject" and lane.would_wait(request):
                self.refuse(request, Busy, retry_after_ms=lane.retry_after_ms())
                return

            if self.options.on_busy == "replace_oldest":
                self._supersede(request)

        if lane not in self.lanes:
            self.lanes.add(lane)
            lane.sessions.add(self)

        lane.submit(request)

    def resubmit(self, request: Request, lane: Lane) -> None:
        """Gives a request whose backend failed, or a copy of one, to another lane."""
        if lane not in self.lanes:
            self.lanes.add(lane)
            lane.sessions.add(self)

        lane.submit(request)

    def _supersede(self, newest: Request) -> None:
        for other in list(self._requests.values()):
            waits = other.waiting and (other.twin is None or other.twin.waiting)
            if waits and other is not newest:
                self._give_up(other, Superseded)

    def _cancel(self, data: bytearray) -> None:
        request = self._requests.get(record.REQUEST.unpack_from(data)[4])
        if request is not None:
            self._give_up(request, Cancelled)

    def _expired(self, request: Request) -> None:
        # A copy of it may have taken its place, and the timer with it.
        request = self._requests[request.identity]
        request.timer = None
        self._give_up(request, DeadlineExceeded)

    def _give_up(self, request: Request, error: type[SwitchgearError]) -> None:
        """Answers a request before its result is there, where a slot is free for that."""
        if request.twin is not None:
            self._hedges.drop(request.twin)

        if request.waiting:
            self._withdraw(request, error)
            return

        # It runs: the client gets a spare slot, and the run ends on its own.
        if Slot.SPARE in self._outputs:
            spare = self._outputs.index(Slot.SPARE)
            self._outputs[spare] = Slot.CLIENT
            self._outputs[request.output_slot] = Slot.POISONED
            reply = request.refuse(error.code, spare, self.epoch, monotonic_ns())
            self._answer(request, reply)

    def _withdraw(self, request: Request, error: type[SwitchgearError]) -> None:
        if request.lane is not None:
            request.lane.withdraw(request)

        self.refuse(request, error)

    # Replies.

    def _answer(self, request: Request, reply: bytes | bytearray) -> None:
        """The one reply of a request."""
        request.answered = True
        self.answered += 1
        self._requests.pop(request.identity, None)
        if self._inputs[request.input_slot] is request:
            self._inputs[request.input_slot] = None

        if request.timer is not None:
            request.timer.cancel()
            request.timer = None

        if self.meter is not None:
            self.meter.refused(request, reply, monotonic_ns())

        if not self.ended:
            self.deliver(reply)

    def refuse(
        self, request: Request, error: type[SwitchgearError], *, retry_after_ms: int = 0
    ) -> None:
        """Answers a request that runs nowhere with an error of the daemon's. Of two copies one
        that is refused leaves it to the other."""
        if request.answered:
            return

        if request.twin is not None:
            self._hedges.give_way(request)
            self._outputs[request.output_slot] = Slot.SPARE
            return

        self._outputs[request.output_slot] = Slot.CLIENT
        self._answer(
            request,
            request.refuse(
                error.code,
                request.output_slot,
                self.epoch,
                monotonic_ns(),
                retry_after_ms=retry_after_ms,
            ),
        )

    def finish(self, request: Request, reply: bytearray, run_ns: int, now_ns: int) -> None:
        """A worker is done with a request: its result, or the end of a poisoned slot."""
        if request.twin is not None:
            self._hedges.ended(request, reply)

        if request.answered:
            self._outputs[request.output_slot] = Slot.SPARE
            return

        # What `_answer` does, without its calls: this is every frame's way.
        request.answered = True
        self.answered += 1
        del self._requests[request.identity]
        self._inputs[request.input_slot] = None
        self._outputs[request.output_slot] = _OF_CLIENT
        request.complete(reply, run_ns, self.epoch, now_ns)
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None

        if now_ns > request.deadline_ns:
            reply[2] |= _LATE

        self.deliver(reply)
        if self.meter is not None:
            self.meter.finished(request, reply, run_ns, now_ns)

    def give_way(self, request: Request) -> None:
        """A run was lost: where the request has another copy, that one goes on alone."""
        if request.twin is not None:
            self._hedges.give_way(request)

    def unpoison(self, request: Request) -> bool:
        """Its worker is reaped: nobody writes to its slot. True when it needs another run."""
        if request.answered:
            self._outputs[request.output_slot] = Slot.SPARE

        return not request.answered

    def poison(self, request: Request) -> bool:
        """Its worker was left behind and may still write: like `unpoison`, with a fresh slot.

        Without a spare slot the request fails and the session ends.
        """
        self._outputs[request.output_slot] = Slot.POISONED
        if request.answered:
            return False

        if Slot.SPARE not in self._outputs:
            self._answer(
                request, request.refuse(WorkerDied.code, NO_SLOT, self.epoch, monotonic_ns())
            )
            self.go_away(WorkerDied)
            return False

        self.move(request)
        return True

    def move(self, request: Request) -> int:
        """Gives a request a fresh output slot, for a device may still write to the old one;
        returns that, poisoned until `clean`, or NO_SLOT where no spare one is left."""
        if Slot.SPARE not in self._outputs:
            return NO_SLOT

        old = request.output_slot
        self._outputs[old] = Slot.POISONED
        request.output_slot = self._outputs.index(Slot.SPARE)
        self._outputs[request.output_slot] = Slot.REQUEST
        record.SLOTS.pack_into(
            request.record, record.SLOTS_OFFSET, request.input_slot, request.output_slot
        )
        return old

    def clean(self, slot: int) -> None:
        """A slot that `move` left is nobody's any more."""
        self._outputs[slot] = Slot.SPARE

    def lose_state(self) -> None:
        """The worker with the state is gone: a new epoch, and what waits is answered."""
        self.epoch += 1
        for request in list(self._requests.values()):
            if request.waiting:
                self._withdraw(request, StateLost)

    # The end.

    def go_away(self, error: type[SwitchgearError]) -> None:
        """Answers what is in flight with `error`, says why to the client, ends the session."""
        if not self.ended:
            for request in list(self._requests.values()):
                self._give_up(request, error)
                if not request.answered:
                    # It runs, and no slot is free to give back; soon the client has none.
                    self._outputs[request.output_slot] = Slot.POISONED
                    reply = request.refuse(error.code, NO_SLOT, self.epoch, monotonic_ns())
                    self._answer(request, reply)

            notice = record.Record(Kind.GOAWAY, epoch=self.epoch)
            notice.status_domain = 1
            notice.status_code = error.code
            self.deliver(notice.pack())
            self.end()

    def end(self) -> None:
        """Drops what waits; what runs ends on its own, its result is thrown away."""
        if self.ended:
            return

        self.ended = True
        for request in list(self._requests.values()):
            if request.twin is not None:
                self._hedges.drop(request.twin)

            if request.waiting:
                self._withdraw(request, Cancelled)
            else:
                self._outputs[request.output_slot] = Slot.POISONED
                self._answer(request, b"")

        if self.listener is not None:
            self.listener.close()

        if self._link is not None:
            self._link.close()

        for lane in self.lanes:
            lane.forget(self)

        if self.meter is not None:
            self.meter.close()

        with contextlib.suppress(OSError):
            os.close(self.arena_fd)

        self.arena_fd = -1
        self._on_end(self)
