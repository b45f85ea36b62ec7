"""A request on its way through the daemon."""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from switchgear.ipc.errors import DOMAINS
from switchgear.ipc.record import (
    NO_READING,
    REPLY_STATUS,
    ROUTE_OFFSET,
    SLOTS,
    SLOTS_OFFSET,
    STATUS_OFFSET,
    Backend,
    Kind,
    Precision,
    Reason,
)

if TYPE_CHECKING:
    from switchgear.daemon.lane import Lane
    from switchgear.daemon.protocol.topology import PairKey
    from switchgear.daemon.session import Session
    from switchgear.daemon.switchboard.place import Place

NO_DEADLINE: Final = 2**63
# epoch, request id, input slot, output slot
_HEAD: Final = struct.Struct("<IQHH")
_HEAD_OFFSET: Final = 4
# reason, retries, tried, temperature age, retry after, queue, run and total time, and zeros
# where the route to the worker stood
_TAIL: Final = struct.Struct("<HHIIIQQQQQ")
_TAIL_OFFSET: Final = 64
_SWITCHGEAR: Final = DOMAINS["switchgear"]
_HEDGED: Final = int(Reason.HEDGED)


class Second(NamedTuple):
    """Where a second copy of a request may run beside it."""

    lane: Lane
    precision: int
    place: Place
    temperature_age_ms: int


class Request:
    """One INFER record and what became of it.

    `answered` is set with its one reply. It may then still run (cancelled, over its deadline,
    or outrun by its copy): its output slot is poisoned until the worker is done with it.
    `attempts` counts workers that died while running it."""

    __slots__ = (
        "answered",
        "arrival_ns",
        "attempts",
        "blame",
        "deadline_ns",
        "dispatch_ns",
        "identity",
        "input_slot",
        "lane",
        "output_slot",
        "place",
        "precision",
        "priority",
        "reason",
        "record",
        "second",
        "session",
        "temperature_age_ms",
        "timer",
        "tried",
        "twin",
        "waiting",
    )

    def __init__(
        self,
        session: Session,
        record: bytearray,
        identity: int,
        input_slot: int,
        output_slot: int,
        priority: int,
        arrival_ns: int,
        deadline_ns: int,
    ) -> None:
        self.session = session
        self.record = record
        self.identity = identity
        self.input_slot = input_slot
        self.output_slot = output_slot
        self.priority = priority
        self.arrival_ns = arrival_ns
        self.deadline_ns = deadline_ns
        self.dispatch_ns = 0
        self.attempts = 0
        self.tried = 0
        self.reason = 0
        # As the router chose: 0 is the model's own.
        self.precision = 0
        # The pair that has it, where the switchboard chose.
        self.place: Place | None = None
        # The pair that failed it before, with domain and code.
        self.blame: tuple[PairKey, str, int] | None = None
        self.temperature_age_ms = NO_READING
        self.answered = False
        # In its lane's queue, so that no worker has it.
        self.waiting = False
        self.lane: Lane | None = None
        self.timer: asyncio.TimerHandle | None = None
        # Set by the router where its session hedges; the other copy while both go on.
        self.second: Second | None = None
        self.twin: Request | None = None

    def copy(self, second: Second, output_slot: int) -> Request:
        """A copy for a second place, with an output slot of its own; the two are twins."""
        record = bytearray(self.record)
        SLOTS.pack_into(record, SLOTS_OFFSET, self.input_slot, output_slot)
        twin = Request(
            self.session,
            record,
            self.identity,
            self.input_slot,
            output_slot,
            self.priority,
            self.arrival_ns,
            self.deadline_ns,
        )
        twin.precision = second.precision
        twin.place = second.place
        twin.temperature_age_ms = second.temperature_age_ms
        twin.reason = _HEDGED
        twin.twin = self
        self.twin = twin
        return twin

    def complete(self, reply: bytearray, run_ns: int, epoch: int, now_ns: int) -> None:
        """Turns a worker's reply into the client's, in place; its status stays."""
        _HEAD.pack_into(
            reply, _HEAD_OFFSET, epoch, self.identity, self.input_slot, self.output_slot
        )
        _TAIL.pack_into(
            reply,
            _TAIL_OFFSET,
            self.reason,
            self.attempts,
            self.tried,
            self.temperature_age_ms,
            0,
            self.dispatch_ns - self.arrival_ns,
            run_ns,
            now_ns - self.arrival_ns,
            0,
            0,
        )

    def refuse(
        self,
        code: int,
        output_slot: int,
        epoch: int,
        now_ns: int,
        *,
        retry_after_ms: int = 0,
        domain: int = _SWITCHGEAR,
    ) -> bytearray:
        """The reply of an error that the daemon itself gives; no backend ran."""
        reply = bytearray(self.record)
        reply[0] = Kind.REPLY
        _HEAD.pack_into(reply, _HEAD_OFFSET, epoch, self.identity, self.input_slot, output_slot)
        queue_ns = (self.dispatch_ns or now_ns) - self.arrival_ns
        REPLY_STATUS.pack_into(
            reply,
            STATUS_OFFSET,
            domain,
            Backend.NONE,
            Precision.NONE,
            code,
            self.reason,
            self.attempts,
            self.tried,
            NO_READING,
            retry_after_ms,
            queue_ns,
            0,
            now_ns - self.arrival_ns,
        )
        reply[ROUTE_OFFSET:] = bytes(len(reply) - ROUTE_OFFSET)
        return reply
