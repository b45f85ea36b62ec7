"""One opened session without I/O: records in and out, arena, results. Shared by the blocking
client and the asyncio one, each of which brings a socket and a way to wait."""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Mapping
from typing import Final

from switchgear.client.events import Inbox
from switchgear.client.failures import error_of_code, error_of_reply, fresh
from switchgear.client.opened import Opened, bytes_of, check_opened, slice_of
from switchgear.client.request import Pending, RequestOptions
from switchgear.client.result import Result
from switchgear.client.table import RequestTable
from switchgear.client.tensors import (
    Target,
    Value,
    View,
    copy_of,
    missing_inputs,
    view_of,
)
from switchgear.ipc.dtypes import DTYPES
from switchgear.ipc.errors import (
    BadRecord,
    ConnectionLost,
    ProtocolError,
    ShuttingDown,
    SlotBusy,
    StateLost,
    SwitchgearError,
)
from switchgear.ipc.record import NO_SLOT, RECORD_BYTES, RECORD_VERSION, Flag, Kind
from switchgear.ipc.slot import (
    ENTRY,
    HEADER,
    HEADER_ID,
    HEADER_ID_OFFSET,
    SLOT_MAGIC,
    SLOT_VERSION,
    SlotEntry,
    pack_header,
    unpack_error,
    unpack_header,
)

# The whole record in one call each way; what this side does not use is padding. The fields of
# _REPLY are those of `result.ReplyFields`.
_INFER: Final = struct.Struct("<BBHIQHHBBHQQ16s72x")
_PLAIN_INFER: Final = struct.Struct("<BB2xIQHH108x")
_CANCEL: Final = struct.Struct("<BBHIQHH108x")
_REPLY: Final = struct.Struct("<BBHIQ2xH36xHBBiHHIIIQQQ24x")
_INFER_KIND: Final = int(Kind.INFER)
_CANCEL_KIND: Final = int(Kind.CANCEL)
_REPLY_KIND: Final = int(Kind.REPLY)
_GOAWAY_KIND: Final = int(Kind.GOAWAY)
_EVENT_KIND: Final = int(Kind.EVENT)
_RESET: Final = int(Flag.RESET)

Targets = Mapping[str, Target]


class SessionCore:
    """Sends nothing and waits for nothing: the owner does, and serialises the calls.

    `lost` is set once the session is over; each request in flight then has ended with it.
    """

    def __init__(self, opened: Opened, arena: mmap.mmap) -> None:
        """Takes over the mapping: it is unmapped with the last view of it.

        :raises ProtocolError: the layout does not fit the tensors.
        :raises UnsupportedModel: a tensor's dtype is not known here.
        """
        self.opened = opened
        self.epoch = opened.epoch
        self.table: RequestTable[Pending] = RequestTable(
            opened.slots, len(opened.layout.outputs)
        )
        self.lost: SwitchgearError | None = None
        # The next frame starts from a fresh state.
        self.reset_due = False
        self.events = Inbox()
        # A frame was sent: there is a state to lose.
        self.used = False
        self._goaway: SwitchgearError | None = None
        self._fatal: SwitchgearError | None = None
        self._ids = itertools.count(1)
        self._held: set[int] = set()
        check_opened(opened)
        memory = memoryview(arena)
        layout = opened.layout
        self._targets: tuple[Targets, ...] = tuple(
            {
                spec.name: Target(spec, slice_of(memory, place, bytes_of(spec)))
                for spec, place in zip(opened.inputs, places, strict=True)
            }
            for places in layout.inputs[: opened.slots]
        )
        self._names = tuple(spec.name for spec in opened.outputs)
        self._limits = [spec.capacity_bytes for spec in opened.outputs]
        self._rooms = tuple(slice_of(memory, place, place.length) for place in layout.headers)
        self._raw = tuple(
            tuple(slice_of(memory, place, place.length) for place in places)
            for places in layout.outputs
        )
        self._header_bytes = HEADER.size + len(opened.outputs) * ENTRY.size
        # What a header says when each output has its declared shape: then the views are ready.
        self._usual = tuple(
            SlotEntry(spec.dtype, spec.shape, bytes_of(spec))
            for spec in opened.outputs
            if not spec.dynamic
        )
        self._usual_bytes = pack_header(0, self._usual)[HEADER.size :]
        self._usual_header = bytearray(
            HEADER.pack(SLOT_MAGIC, SLOT_VERSION, len(self._names), 0) + self._usual_bytes
        )
        self._heads = tuple(room[: self._header_bytes] for room in self._rooms)
        self._usual_views: list[Mapping[str, View] | None] = [None] * len(layout.outputs)

    @property
    def may_reopen(self) -> bool:
        """Whether the session ended for a reason that a new one does not have."""
        return self._fatal is None and (
            self._goaway is None or isinstance(self._goaway, ShuttingDown)
        )

    def targets(self, slot: int) -> Targets:
        """The input tensors of a slot.

        :raises ConnectionLost: the session was closed.
        """
        try:
            return self._targets[slot]
        except IndexError:
            raise self.loss() from None

    def require_idle(self, slot: int) -> None:
        """:raises SlotBusy: a request is in flight in the slot: its inputs are being read."""
        if self.table.outputs[slot] == NO_SLOT and self.lost is None:
            raise SlotBusy(f"slot {slot} has a request in flight")

    def give_back(self, slot: int) -> None:
        """Makes a slot that the caller holds free: now, or when its request has ended."""
        request = self.table.request_in(slot)
        if request is None:
            self.table.give_back(slot)
        else:
            self._held.add(request.id)

    def fill(self, slot: int, inputs: Mapping[str, Value]) -> None:
        """Writes all inputs of a slot that the caller holds.

        :raises BadInput: one is missing, unknown or does not fit.
        """
        targets = self.targets(slot)
        if inputs.keys() != targets.keys():
            raise missing_inputs(targets, inputs)

        for name, target in targets.items():
            target.write(inputs[name])

    def begin(self, request: Pending, slot: int, options: RequestOptions, holds: bool) -> bytes:
        """The record that sends `request` in a slot that the caller holds.

        `holds`: the slot becomes free when the request is done with.

        :raises SlotBusy: a request is in flight in the slot.
        :raises ConnectionLost: the session is over.
        """
        if self.lost is not None:
            raise self.loss()

        if self._goaway is not None:
            raise ConnectionLost(
                f"the daemon is about to end the session: {self._goaway.text}",
                cause=self._goaway.name,
            )

        request_id = next(self._ids)
        output = self.table.begin(request_id, request, slot)
        request.id = request_id
        request.slot = slot
        request._core = self
        request.reset = reset = options.reset or self.reset_due
        if holds:
            self._held.add(request_id)

        self.reset_due = False
        self.used = True
        return _INFER.pack(
            _INFER_KIND,
            RECORD_VERSION,
            _RESET if reset else 0,
            self.epoch,
            request_id,
            slot,
            output,
            options.priority,
            options.clock,
            0,
            options.timeout_us,
            options.capture_ns,
            options.trace_id,
        )

    # The short way of a frame without options whose caller waits for it at once: no request
    # object and no entry in the table, unless something else comes up.

    def begin_plain(self, slot: int) -> tuple[int, int, bytes] | None:
        """Begins a frame in a slot that the caller holds: request id, output slot, record.

        None where the frame needs `begin`.
        """
        output = self.table.outputs[slot]
        if output == NO_SLOT or self.reset_due or self._goaway is not None or not self._rooms:
            return None

        request_id = next(self._ids)
        self.table.outputs[slot] = NO_SLOT
        self.used = True
        record = _PLAIN_INFER.pack(
            _INFER_KIND, RECORD_VERSION, self.epoch, request_id, slot, output
        )
        return request_id, output, record

    def end_plain(self, data: bytes, begun: tuple[int, int, bytes], slot: int) -> Result | None:
        """The result of a frame begun the short way; None where `data` is anything else.

        :raises ProtocolError: the output slot's header does not fit the session.
        """
        if len(data) != RECORD_BYTES:
            return None

        fields = _REPLY.unpack(data)
        request_id, output, _ = begun
        if (
            fields[4] != request_id
            or fields[6]
            or fields[0] != _REPLY_KIND
            or fields[1] != RECORD_VERSION
            or fields[5] != output
            or self.lost is not None
        ):
            return None

        self.table.outputs[slot] = output
        # What `_views` finds for outputs of their declared shapes, without its calls.
        HEADER_ID.pack_into(self._usual_header, HEADER_ID_OFFSET, request_id)
        views = self._usual_views[output]
        if views is None or bytes(self._heads[output]) != self._usual_header:
            views = self._views(fields)

        return Result(views, fields)

    def adopt_plain(
        self, request: Pending, begun: tuple[int, int, bytes], slot: int, holds: bool
    ) -> None:
        """Makes a frame begun the short way an ordinary request in flight, or, where the
        session was lost meanwhile, one that has ended with it."""
        request.id = begun[0]
        request.slot = slot
        request._core = self
        if holds:
            self._held.add(begun[0])

        if self.lost is not None:
            self._end(request, self.lost)
        else:
            self.table.in_flight[begun[0]] = (request, slot, begun[1])

    def withdraw_plain(self, begun: tuple[int, int, bytes], slot: int) -> None:
        """Undoes `begin_plain`: the record could not be sent."""
        self.table.outputs[slot] = begun[1]

    def withdraw(self, request: Pending) -> None:
        """Undoes `begin`: the record could not be sent. The slot stays the caller's."""
        self.table.withdraw(request.id)
        self._held.discard(request.id)
        self.reset_due |= request.reset
        request._core = None

    def cancel(self, request: Pending) -> bytes | None:
        """The record that cancels a request; None where there is nothing to cancel."""
        if request.ended or request.cancel_sent or self.lost is not None:
            return None

        request.cancel_sent = True
        return _CANCEL.pack(_CANCEL_KIND, RECORD_VERSION, 0, self.epoch, request.id, 0, 0)

    def receive(self, data: bytes) -> None:
        """Handles one packet of the session's socket; ends the request that it answers.

        :raises ProtocolError: it breaks the protocol; the owner has to end the session.
        """
        if len(data) != RECORD_BYTES or data[1] != RECORD_VERSION:
            raise self._broken("the daemon sent bytes that are no record of version 1")

        fields = _REPLY.unpack(data)
        if fields[0] != _REPLY_KIND:
            if fields[0] == _GOAWAY_KIND:
                self._goaway = error_of_code(fields[9])
                self._leave()
            elif fields[0] == _EVENT_KIND:
                self.events.put(data)

            return

        if fields[4] == 0:
            # An answer to no request: the daemon refuses what this side sent, then closes.
            self._fatal = error_of_reply(fields, "")
            return

        try:
            request = self.table.finish(fields[4], fields[5])
        except ProtocolError as broken:
            raise self._broken(broken.text) from None

        if fields[6]:
            self._fail(request, fields)
        else:
            request.fields = fields
            request._wake()

        if self._goaway is not None:
            self._leave()

    def _leave(self) -> None:
        """After the announcement: what is in flight is still answered, then it ends."""
        if not self.table.in_flight:
            self.lose()

    def _fail(self, request: Pending, fields: tuple[int, ...]) -> None:
        text = unpack_error(self._rooms[fields[5]]) if fields[7] and self._rooms else ""
        error = error_of_reply(fields, text)
        if isinstance(error, StateLost):
            self.epoch = fields[3]
        elif isinstance(error, BadRecord):
            self._fatal = error

        # It never reached a worker: the reset that it asked for is still due.
        if request.reset and not fields[7]:
            self.reset_due = True

        self._end(request, error)

    def _broken(self, text: str) -> ProtocolError:
        error = ProtocolError(text)
        self._fatal = error
        return error

    def _end(self, request: Pending, error: SwitchgearError) -> None:
        request.error = error
        self.release(request)
        request._wake()

    def lose(self, text: str = "the daemon went away") -> None:
        """The session is over: every request in flight ends with ConnectionLost."""
        if self.lost is not None:
            return

        cause = self._fatal or self._goaway
        if cause is None:
            self.lost = ConnectionLost(text)
        else:
            self.lost = ConnectionLost(
                f"the daemon ended the session: {cause.text}", cause=cause.name
            )
            self.lost.__cause__ = cause

        for request in self.table.end():
            self._end(request, self.lost)

    def loss(self) -> SwitchgearError:
        """The exception for a session that is over, to raise."""
        return fresh(self.lost or ConnectionLost("the session was closed"))

    def forget(self) -> None:
        """Lets the memory go; views that the app still has keep their part of it alive."""
        self._targets = ()
        self._rooms = ()
        self._heads = ()
        self._raw = ()
        self._usual_views = []

    def release(self, request: Pending) -> None:
        """Makes the slot that a request holds free; does nothing the second time."""
        try:
            self._held.remove(request.id)
        except KeyError:
            return

        # Its end then has nothing to release.
        request._core = None
        self.table.give_back(request.slot)

    def take(self, request: Pending, copy: bool) -> Result:
        """The result of a request that has ended; its slot is free from now on.

        :raises SwitchgearError: how it ended otherwise.
        :raises ProtocolError: the output slot's header does not fit the session.
        """
        if request.error is not None:
            raise fresh(request.error)

        assert request.fields is not None
        result = request._result
        if result is None:
            try:
                result = Result(self._views(request.fields), request.fields)
                if copy:
                    result = _copied(result, request.fields)
            finally:
                self.release(request)

            request._result = result
        elif copy:
            result = _copied(result, request.fields)

        return result

    def _views(self, fields: tuple[int, ...]) -> Mapping[str, View]:
        output = fields[5]
        if not self._rooms:
            raise ConnectionLost("the session was closed before the result was taken")

        header = bytes(self._rooms[output][: self._header_bytes])
        usual = HEADER.pack(SLOT_MAGIC, SLOT_VERSION, len(self._names), fields[4])
        if header == usual + self._usual_bytes:
            views = self._usual_views[output]
            if views is None:
                views = self._usual_views[output] = self._build(output, self._usual)

            return views

        request_id, entries = unpack_header(memoryview(header), self._limits)
        if request_id != fields[4]:
            raise ProtocolError(
                f"output slot {output} holds request {request_id}, not {fields[4]}"
            )

        return self._build(output, entries)

    def _build(
        self, output: int, entries: list[SlotEntry] | tuple[SlotEntry, ...]
    ) -> Mapping[str, View]:
        return {
            name: view_of(raw[: entry.length], DTYPES[entry.dtype], entry.shape)
            for name, raw, entry in zip(self._names, self._raw[output], entries, strict=True)
        }


def _copied(result: Result, fields: tuple[int, ...]) -> Result:
    return Result({name: copy_of(view) for name, view in result.items()}, fields)
