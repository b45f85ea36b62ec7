"""A session for asyncio: runs frames of one model."""

from __future__ import annotations

import asyncio
import socket
import warnings
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Self

from switchgear.client import forks
from switchgear.client.channel import RECEIVE_BYTES, take_in
from switchgear.client.core import SessionCore
from switchgear.client.events import SessionEvent
from switchgear.client.lifetime import SessionBase, SlotBase, merged, take_slot
from switchgear.client.options import SessionOptions
from switchgear.client.request import Pending, RequestOptions, request_options
from switchgear.client.result import Result
from switchgear.client.tensors import Value
from switchgear.ipc.errors import ConnectionLost, ProtocolError, TimedOut

Reopen = Callable[[], Awaitable[tuple[SessionCore, socket.socket]]]


class Channel:
    """Owns the session's socket, which the event loop watches."""

    def __init__(self, core: SessionCore, sock: socket.socket) -> None:
        self.core = core
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._readable)
        self._news = asyncio.Event()
        core.events.on_news = self._news.set
        forks.watch(self)

    def send(self, request: Pending, slot: int, options: RequestOptions, holds: bool) -> None:
        """Sends a request; the socket has room for as many as there are slots.

        :raises SlotBusy: a request is in flight in the slot.
        :raises ConnectionLost: the session is over, and the request was not sent.
        """
        record = self.core.begin(request, slot, options, holds)
        try:
            self._sock.send(record, socket.MSG_NOSIGNAL)
        except OSError as error:
            self.core.withdraw(request)
            self._lose()
            raise self.core.loss() from error

    def cancel(self, request: Pending) -> None:
        record = self.core.cancel(request)
        if record is not None:
            try:
                self._sock.send(record, socket.MSG_NOSIGNAL)
            except OSError:
                self._lose()

    def poll(self) -> None:
        """Handles the replies that are there already."""
        while self.core.lost is None and self._readable():
            pass

    async def next_event(self, timeout_s: float | None) -> SessionEvent | None:
        """The next event; None when none has come within `timeout_s`.

        :raises ConnectionLost: the session is over.
        """
        self.poll()
        try:
            async with asyncio.timeout(timeout_s):
                while (event := self.core.events.take()) is None:
                    if self.core.lost is not None:
                        raise self.core.loss()

                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return None

        return event

    def give_back(self, slot: int) -> None:
        self.core.give_back(slot)

    def close(self) -> None:
        """Ends the session; requests in flight end with ConnectionLost. May be repeated."""
        self.core.lose("the session was closed")
        self.core.forget()
        self._close_socket()

    def after_fork(self) -> None:
        # Not removed from the loop, which shares its epoll descriptor with the parent's.
        self._sock.close()
        self.core.lose("the process was forked: the session stays the parent's")

    def _readable(self) -> bool:
        """Handles one packet; False where there is none."""
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""

        if not data:
            self._lose()
            return True

        try:
            self.core.receive(data)
        except ProtocolError:
            self._lose()

        if self.core.lost is not None:
            self._close_socket()

        return True

    def _lose(self) -> None:
        if self.core.lost is None:
            take_in(self.core, self._sock)
            self.core.lose()

        self._close_socket()

    def _close_socket(self) -> None:
        # Who waits for an event learns of the end.
        self._news.set()
        number = self._sock.fileno()
        if number >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(number)

            self._sock.close()


class Request(Pending):
    """An inference on its way; see `switchgear.client.Request`."""

    __slots__ = ("_channel", "_waiters")

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        if not self.ended:
            self._channel.poll()

        return self.ended

    async def result(self, timeout_s: float | None = None, *, copy: bool = False) -> Result:
        """Waits until the request has ended; may be called again, and from several tasks.

        Cancelling the task that waits does not cancel the request. Errors as with the blocking
        client.
        """
        if not self.ended:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                async with asyncio.timeout(timeout_s):
                    await waiter
            except TimeoutError:
                raise TimedOut(
                    "no reply within the time limit; the request is still in flight"
                ) from None

        return self._channel.core.take(self, copy)

    async def cancel(self) -> None:
        """Asks for its end. `result()` raises Cancelled, or returns when it came first."""
        self._channel.cancel(self)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

        self._waiters.clear()


class Slot(SlotBase[Channel]):
    """A slot that its owner fills in place; see `switchgear.client.Slot`."""

    async def submit(
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
        """Sends what lies in `inputs`; those given here are written first."""
        options = request_options(
            reset, deadline_ms, priority, trace_id, capture_ns, capture_clock
        )
        self._write(inputs or {})
        request = Request(self._channel)
        self._channel.send(request, self.index, options, holds=False)
        return request

    async def run(
        self,
        inputs: Mapping[str, Value] | None = None,
        *,
        deadline_ms: float | None = None,
        copy: bool = False,
        reset: bool = False,
        timeout_s: float | None = None,
    ) -> Result:
        """`submit` and `result` in one."""
        request = await self.submit(inputs, deadline_ms=deadline_ms, reset=reset)
        return await _outcome(request, timeout_s, copy)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Events:
    """A session's events for `async for`; see `Session.events`. Several may be at it: each
    event goes to one of them."""

    def __init__(self, session: Session, timeout_s: float | None) -> None:
        self._session = session
        self._timeout_s = timeout_s

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionEvent:
        try:
            event = await self._session._channel.next_event(self._timeout_s)
        except ConnectionLost:
            if self._session.closed:
                raise StopAsyncIteration from None

            raise

        if event is None:
            raise StopAsyncIteration

        return event


class Session(SessionBase):
    """An open session of one event loop; see `switchgear.client.Session`."""

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
        self._reopening = asyncio.Lock()

    async def run(
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
        """Runs one frame; parameters, result and errors as with the blocking client.

        When the task is cancelled, so is the request.
        """
        options = request_options(reset, deadline_ms, None, b"", 0, "none")
        request = await self._start(merged(inputs, keywords), None, options)
        return await _outcome(request, timeout_s, copy)

    async def submit(
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
        """Sends one frame and does not wait for it; parameters as with the blocking client."""
        options = request_options(
            reset, deadline_ms, priority, trace_id, capture_ns, capture_clock
        )
        return await self._start(inputs, slot, options)

    async def slot(self) -> Slot:
        """Takes a slot whose inputs the caller writes in place, without a copy.

        :raises SlotBusy: every slot is in use.
        """
        channel = await self._live(reset=False)
        return Slot(channel, take_slot(channel, None))

    def events(self, timeout_s: float | None = None) -> Events:
        """What the daemon tells of the places where the session may run, for `async for`; as
        with the blocking client. Frames may run meanwhile.

        :raises BadRequest: the session was not opened with `events=True`.
        """
        self._require_events()
        return Events(self, timeout_s)

    async def close(self) -> None:
        """Ends the session; requests in flight raise ConnectionLost. May be repeated."""
        self._close()

    def _close(self) -> None:
        self._closed = True
        self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(
                f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2
            )
            self._close()

    async def _start(
        self, inputs: Mapping[str, Value], slot: int | None, options: RequestOptions
    ) -> Request:
        again = True
        while True:
            channel = await self._live(options.reset)
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

    async def _live(self, reset: bool) -> Channel:
        """The channel; the session is opened again where it was lost."""
        if self._channel.core.lost is None:
            return self._channel

        async with self._reopening:
            if self._channel.core.lost is not None:
                self._require_reopening()
                core, sock = await self._reopen()
                self._channel = Channel(core, sock)
                if self._closed:
                    self._channel.close()
                    raise ConnectionLost("the session is closed")

                self._adopt(core, reset)

        return self._channel


async def _outcome(request: Request, timeout_s: float | None, copy: bool) -> Result:
    try:
        return await request.result(timeout_s, copy=copy)
    finally:
        # Given up: the time limit of this call, or its task was cancelled.
        if not request.ended:
            await request.cancel()
