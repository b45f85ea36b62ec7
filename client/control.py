"""A blocking control connection: varlink calls with descriptors, one at a time."""

from __future__ import annotations

import array
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from switchgear.client import wire
from switchgear.client.wire import Reply
from switchgear.ipc import varlink
from switchgear.ipc.errors import ConnectionLost, ProtocolError, TimedOut


class Control:
    """One connection to the daemon. Not for several threads at once.

    After ConnectionLost, ProtocolError or TimedOut it is of no use any more: `usable` is False.
    """

    def __init__(self, path: str, timeout_s: float | None) -> None:
        """Connects; blocks for `timeout_s` at most.

        :raises NotRunning: no daemon answers on `path`.
        :raises PermissionDenied: the socket's mode keeps this user out.
        """
        self._reader = varlink.MessageReader()
        self._streaming = False
        self.usable = True
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if timeout_s is not None:
                # Bounds the wait for room in a full backlog; a Python timeout would not wait.
                seconds, rest = divmod(max(timeout_s, 0.001), 1)
                limit = struct.pack("@ll", int(seconds), int(rest * 1_000_000))
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

            self._sock.connect(path)
        except OSError as error:
            self._sock.close()
            self.usable = False
            raise wire.connect_error(path, error) from error

    @property
    def idle(self) -> bool:
        """Whether a call may be sent: still connected, and no reply is outstanding."""
        if not self.usable or self._streaming or len(self._reader):
            return False

        try:
            self._sock.settimeout(0)
            # Whatever is there (end of file, bytes that answer nothing) makes it useless.
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass

        return False

    def call(
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
        until = None if timeout_s is None else time.monotonic() + timeout_s
        self._streaming = True
        self._transfer(method, lambda: self._send(data, descriptors, until))
        return self._reply(method, until)

    def next(self, *, timeout_s: float | None = None) -> Reply:
        """The next reply of a call with `more`; errors as with `call`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        return self._reply("the next reply", until)

    def close(self) -> None:
        """Ends the connection; a call that is not answered is given up."""
        self.usable = False
        self._reader.close()
        self._sock.close()

    def _send(self, data: bytes, descriptors: Sequence[int], until: float | None) -> None:
        view = memoryview(data)
        while view:
            ancillary: list[Any] = []
            if descriptors:
                numbers = array.array("i", descriptors)
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)]

            self._set_limit(until)
            sent = self._sock.sendmsg([view], ancillary, socket.MSG_NOSIGNAL)
            view = view[sent:]
            descriptors = ()

    def _reply(self, what: str, until: float | None) -> Reply:
        while True:
            try:
                message = self._reader.next()
            except ProtocolError:
                self.close()
                raise

            if message is not None:
                self._streaming = False
                try:
                    reply = wire.reply_of(message)
                except ProtocolError:
                    self.close()
                    raise

                self._streaming = reply.continues
                return reply

            self._transfer(what, lambda: self._receive(until))

    def _receive(self, until: float | None) -> None:
        self._set_limit(until)
        data, fds = varlink.receive(self._sock)
        if not data:
            raise ConnectionResetError

        self._reader.feed(data, fds)

    def _transfer(self, what: str, step: Callable[[], None]) -> None:
        try:
            step()
        except TimeoutError:
            self.close()
            raise TimedOut(f"{what}: the daemon did not answer in time") from None
        except OSError:
            self.close()
            raise ConnectionLost(f"{what}: the daemon closed the connection") from None
        except BaseException:
            # Interrupted in the middle: the stream's state is unknown.
            self.close()
            raise

    def _set_limit(self, until: float | None) -> None:
        if until is None:
            self._sock.settimeout(None)
            return

        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError

        self._sock.settimeout(left_s)
