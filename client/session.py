"""A session for threads: runs frames of one model."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from switchgear.client.channel import Channel
from switchgear.client.core import SessionCore
from switchgear.client.events import SessionEvent
from switchgear.client.lifetime import SessionBase, SlotBase, merged, take_slot
from switchgear.client.options import SessionOptions
from switchgear.client.request import PLAIN, Pending, request_options
from switchgear.client.result import Result
from switchgear.client.tensors import Value, write_all
from switchgear.ipc.errors import ConnectionLost
from switchgear.ipc.record import NO_SLOT

if TYPE_CHECKING:
    import socket

Reopen = Callable[[], "tuple[SessionCore, socket.socket]"]


class Request(Pending):
    """An inference on its way. Its slot is free again when its result was taken, when it ended
    with an error, or when nobody has the request any more."""

    __slots__ = ("_channel",)

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    @property
    def done(self) -> bool:
        """Whether it has ended; looks at the socket, does not block."""
        if not self.ended:
            self._channel.poll()

        return self.ended

    def result(self, timeout_s: float | None = None, *, copy: bool = False) -> Result:
        """Blocks until the request has ended; may be called again.

        :raises TimedOut: it has not within `timeout_s`; it is still in flight.
        :raises Cancelled: it was cancelled before its result was there.
        :raises SwitchgearError: how it ended otherwise: DeadlineExceeded, Busy, Superseded,
            StateLost, WorkerDied, BackendFailed, ConnectionLost, ...
        """
        if self.fields is None and self.error is None:
            self._channel.wait(self, timeout_s)

        return self._channel.core.take(self, copy)

    def cancel(self) -> None:
        """Asks for its end. `result()` raises Cancelled, or returns when it came first."""
        self._channel.cancel(self)


class Slot(SlotBase[Channel]):
    """A slot that its owner fills in place; give it back with `close` or a `with` block.

    It belongs to one connection: after ConnectionLost, take another.
    """

    def submit(
        self,
        inputs: Mapping[str, Value] | None = None,
        *,
        deadline_ms: float | None = None,
        priority: str | None = None,
        reset: bool = False,
        trace_id: bytes = b"",
        capture_ns: int = 0,
        capture_clock: str = "monotonic",
    ) -> Request:
        """Sends what lies in `inputs`; those given here are written first. Does not block.

        :raises SlotBusy: its request is still in flight.
        :raises ConnectionLost: its session is over.
        """
        options = request_options(
            reset, deadline_ms, priority, trace_id, capture_ns, capture_clock
        )
        self._write(inputs or {})
        request = Request(self._channel)
        self._channel.send(request, self.index, options, holds=False)
        return request

    def run(
        self,
        inputs: Mapping[str, Value] | None = None,
        *,
        deadline_ms: float | None = None,
        copy: bool = False,
        reset: bool = False,
        timeout_s: float | None = None,
    ) -> Result:
        """`submit` and `result` in one."""
        core = self._channel.core
        if (
            deadline_ms is None
            and timeout_s is None
            and not (copy or reset or self._closed)
            and core.table.outputs[self.index] != NO_SLOT
        ):
            if inputs:
                write_all(core.targets(self.index), inputs)

            outcome = self._channel.exchange_plain(self.index, False, Request)
            if isinstance(outcome, Pending):
                return core.take(outcome, False)

            if outcome is not None:
                return outcome

        return _outcome(
            self.submit(inputs, deadline_ms=deadline_ms, reset=reset), timeout_s, copy
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Session(SessionBase):
    """An open session. Several threads may use it; `Client.open_session` makes one.

    When the daemon went away, requests in flight raise ConnectionLost and the next call opens
    the session again: it blocks until the daemon is back, for `reconnect_s` at most.
    """

    def __init__(
        self,
        core: SessionCore,
        sock: socket.socket,
        options: SessionOptions,
        reopen: Reopen,
        reconnect: bool,
    ) -> None:
        super().__init__(core, options, reconnect)
        self._channel = Channel(core, sock)
        self._reopen = reopen
        self._reopening = threading.Lock()

    def run(
        self,
        inputs: Mapping[str, Value] | None = None,
        /,
        *,
        deadline_ms: float | None = None,
        copy: bool = False,
        reset: bool = False,
        timeout_s: float | None = None,
        **keywords: Value,
    ) -> Result:
        """Runs one frame: inputs as a mapping, or as keywords. Blocks until it has ended.

        The outputs are views that stay valid until the slot is used again: with n slots and one
        thread, during the next n - 1 calls. `copy=True` gives copies that stay.

        `deadline_ms`: the daemon answers DeadlineExceeded when the result is not there by then.
        `timeout_s`: the client stops to wait and cancels.

        :raises BadInput: an input is missing, unknown or does not fit; nothing was sent.
        :raises SlotBusy: every slot is in use.
        :raises SwitchgearError: how it ended otherwise; see `Request.result`.
        """
        if keywords or inputs is None:
            inputs = merged(inputs, keywords)

        if deadline_ms is None and timeout_s is None and not copy and not reset:
            result = self._run_plain(inputs)
            if result is not None:
                return result

        options = PLAIN
        if reset or deadline_ms is not None:
            options = request_options(reset, deadline_ms, None, b"", 0, "none")

        again = True
        while True:
            channel = self._channel
            if channel.core.lost is not None:
                channel = self._live(reset)

            index = take_slot(channel, None)
            try:
                channel.core.fill(index, inputs)
                request = Request(channel)
                channel.exchange(request, index, options, timeout_s)
            except ConnectionLost:
                channel.give_back(index)
                # It was not sent: when the loss shows only now, the caller need not know.
                if not again or not self._lost_but_open(channel.core):
                    raise

                again = False
            except BaseException:
                channel.give_back(index)
                raise
            else:
                return channel.core.take(request, copy)

    def _run_plain(self, inputs: Mapping[str, Value]) -> Result | None:
        """`run` by the short way; None where nothing was sent."""
        channel = self._channel
        core = channel.core
        index = core.table.take() if core.lost is None else None
        if index is None:
            return None

        try:
            core.fill(index, inputs)
            outcome = channel.exchange_plain(index, True, Request)
        except BaseException:
            channel.give_back(index)
            raise

        if isinstance(outcome, Pending):
            return core.take(outcome, False)

        core.table.give_back(index)
        return outcome

    def submit(
        self,
        inputs: Mapping[str, Value],
        *,
        slot: int | None = None,
        deadline_ms: float | None = None,
        priority: str | None = None,
        reset: bool = False,
        trace_id: bytes = b"",
        capture_ns: int = 0,
        capture_clock: str = "monotonic",
    ) -> Request:
        """Sends one frame and does not wait for it. At most `slots` are in flight.

        `slot`: this one rather than any free one. `priority`: high, normal or batch rather than
        the session's. `trace_id` (at most 16 bytes) and `capture_ns` (on `capture_clock`:
        monotonic, boottime or realtime) travel with the request.

        Blocks only when the session has to be opened again. Errors as with `run`.
        """
        options = request_options(
            reset, deadline_ms, priority, trace_id, capture_ns, capture_clock
        )
        again = True
        while True:
            channel = self._live(reset)
            index = take_slot(channel, slot)
            try:
                channel.core.fill(index, inputs)
                request = Request(channel)
                channel.send(request, index, options, holds=True)
            except ConnectionLost:
                channel.give_back(index)
                # It was not sent: when the loss shows only now, the caller need not know.
                if not again or not self._lost_but_open(channel.core):
                    raise

                again = False
            except BaseException:
                channel.give_back(index)
                raise
            else:
                return request

    def slot(self) -> Slot:
        """Takes a slot whose inputs the caller writes in place, without a copy.

        :raises SlotBusy: every slot is in use.
        """
        channel = self._live(reset=False)
        return Slot(channel, take_slot(channel, None))

    def events(self, timeout_s: float | None = None) -> Iterator[SessionEvent]:
        """What the daemon tells of the places where the session may run, each place's newest.

        Blocks until the next one; ends when none has come for `timeout_s` (0: with those that
        are there), or when the session is closed here. Frames may run meanwhile, in this thread
        or in others. It does not open a lost session again: a frame does.

        :raises BadRequest: the session was not opened with `events=True`.
        :raises ConnectionLost: in the iteration: the daemon ended the session, or went away.
        """
        self._require_events()
        return self._events(timeout_s)

    def _events(self, timeout_s: float | None) -> Iterator[SessionEvent]:
        while True:
            try:
                event = self._channel.next_event(timeout_s)
            except ConnectionLost:
                if self._closed:
                    return

                raise

            if event is None:
                return

            yield event

    def close(self) -> None:
        """Ends the session; requests in flight raise ConnectionLost. May be repeated."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(
                f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2
            )
            self.close()

    def _live(self, reset: bool) -> Channel:
        """The channel; the session is opened again where it was lost."""
        if self._channel.core.lost is None:
            return self._channel

        with self._reopening:
            if self._channel.core.lost is not None:
                self._require_reopening()
                core, sock = self._reopen()
                self._channel = Channel(core, sock)
                if self._closed:
                    self._channel.close()
                    raise ConnectionLost("the session is closed")

                self._adopt(core, reset)

        return self._channel


def _outcome(request: Request, timeout_s: float | None, copy: bool) -> Result:
    try:
        return request.result(timeout_s, copy=copy)
    finally:
        # Given up: the time limit of this call, or an interrupt.
        if request.fields is None and request.error is None:
            request.cancel()
