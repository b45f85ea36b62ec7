"""A control connection for asyncio: varlink calls with descriptors, one at a time."""

from __future__ import annotations

import array
import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from switchgear.client import wire
from switchgear.client.steps import growing_waits
from switchgear.client.wire import Reply
from switchgear.ipc import varlink
from switchgear.ipc.errors import ConnectionLost, ProtocolError, TimedOut


class AsyncControl:
    """One connection to the daemon; one call at a time.

    After ConnectionLost, TimedOut or a cancellation it is of no use any more:
    `usable` is False.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Takes over a connected, non-blocking socket; `open` makes one."""
        self._reader = varlink.MessageReader()
        self._message: varlink.Message | None = None
        self._sock = sock
        self._streaming = False
        self.usable = True

    @classmethod
    async def open(cls, path: str, timeout_s: float | None) -> AsyncControl:
        """Connects; errors as with `Control`."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            async with asyncio.timeout(timeout_s):
                await _connect(sock, path)
        except OSError as error:
            sock.close()
            raise wire.connect_error(path, error) from error
        except BaseException:
            sock.close()
            raise

        return cls(sock)

    @property
    def idle(self) -> bool:
        """Whether a call may be sent: still connected, and no reply is outstanding."""
        if not self.usable or self._streaming or len(self._reader):
            return False

        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass

        return False

    async def call(
        self,
        method: str,
        parameters: dict[str, object] | None = None,
        descriptors: Sequence[int] = (),
        *,
        more: bool = False,
        timeout_s: float | None = None,
    ) -> Reply:
        """Sends a call and returns its first reply; the descriptors stay the caller's.

        :raises SwitchgearError: what the daemon answered.
        :raises ConnectionLost: the daemon went away; whether it did the call is not known.
        :raises TimedOut: no reply within `timeout_s`.
        """
        data = wire.call_bytes(method, parameters or {}, more)
        self._streaming = True

        async def exchange() -> None:
            await self._send(data, descriptors)
            await self._fill()

        await self._transfer(method, timeout_s, exchange)
        return self._take()

    async def next(self, *, timeout_s: float | None = None) -> Reply:
        """The next reply of a call with `more`; errors as with `call`."""
        await self._transfer("the next reply", timeout_s, self._fill)
        return self._take()

    def close(self) -> None:
        """Ends the connection; a call that is not answered is given up."""
        self.usable = False
        self._reader.close()
        self._sock.close()

    def _take(self) -> Reply:
        message, self._message = self._message, None
        assert message is not None
        self._streaming = False
        try:
            reply = wire.reply_of(message)
        except ProtocolError:
            self.close()
            raise

        self._streaming = reply.continues
        return reply

    async def _send(self, data: bytes, descriptors: Sequence[int]) -> None:
        view = memoryview(data)
        while view:
            ancillary: list[Any] = []
            if descriptors:
                numbers = array.array("i", descriptors)
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)]

            try:
                sent = self._sock.sendmsg([view], ancillary, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                await self._ready(writing=True)
                continue

            view = view[sent:]
            descriptors = ()

    async def _fill(self) -> None:
        """Receives until a whole message is there."""
        while (message := self._reader.next()) is None:
            try:
                data, fds = varlink.receive(self._sock)
            except BlockingIOError:
                await self._ready(writing=False)
                continue

            if not data:
                raise ConnectionResetError

            self._reader.feed(data, fds)

        self._message = message

    async def _ready(self, *, writing: bool) -> None:
        loop = asyncio.get_running_loop()
        event: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not event.done():
                event.set_result(None)

        add, remove = (
            (loop.add_writer, loop.remove_writer)
            if writing
            else (loop.add_reader, loop.remove_reader)
        )
        number = self._sock.fileno()
        add(number, wake)
        try:
            await event
        finally:
            remove(number)

    async def _transfer(
        self, what: str, timeout_s: float | None, step: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await step()
        except TimeoutError:
            self.close()
            raise TimedOut(f"{what}: the daemon did not answer in time") from None
        except OSError:
            self.close()
            raise ConnectionLost(f"{what}: the daemon closed the connection") from None
        except BaseException:
            # Cancelled in the middle, or bytes that are no message: the stream is lost.
            self.close()
            raise


async def _connect(sock: socket.socket, path: str) -> None:
    for wait_s in growing_waits():
        try:
            sock.connect(path)
        except BlockingIOError:
            # The backlog is full. For such a socket no event tells when it no longer is.
            await asyncio.sleep(wait_s)
        else:
            return
