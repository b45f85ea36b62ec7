"""The varlink server's transport: bounded in everything a client can make it do.

One `Connection` per client on the daemon's loop. Calls of a connection are handled in order,
one at a time; what a client sends meanwhile waits in its reader, up to a bound. Nothing here
knows the interface: a `Dispatcher` gets each `Call`."""

from __future__ import annotations

import array
import asyncio
import errno
import logging
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from switchgear.daemon.listen import peer_credentials
from switchgear.daemon.shortage import as_no_space
from switchgear.ipc.errors import InternalError, ProtocolError, QuotaExceeded, SwitchgearError
from switchgear.ipc.varlink import (
    MAX_MESSAGE_BYTES,
    Descriptors,
    Message,
    MessageReader,
    encode,
    receive,
)

MAX_UNSENT_BYTES: Final = 1 << 20
# Calls that wait behind the one that runs, before no more is read.
MAX_WAITING_CALLS: Final = 16
# What all connections of one user hold: unread calls and unsent replies.
MAX_HELD_BYTES_PER_USER: Final = 64 << 20
ACCEPTS_PER_WAKEUP: Final = 16
ACCEPT_PAUSE_S: Final = 0.1
INTERFACE: Final = "io.switchgear"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, as the kernel recorded it at connect."""

    pid: int
    uid: int
    gid: int


@dataclass(slots=True)
class Call:
    """One method call. Descriptors that the handler does not take are closed after it."""

    connection: Connection
    method: str
    parameters: dict[str, object]
    more: bool
    oneway: bool
    descriptors: Descriptors
    replied: bool = field(default=False, init=False)

    @property
    def peer(self) -> Peer:
        return self.connection.peer

    def reply(
        self, parameters: dict[str, object], fds: Sequence[int] = (), *, continues: bool = False
    ) -> None:
        """Sends a reply; does not block. The descriptors stay the caller's.

        The handler of a call without `more` replies exactly once.
        """
        if self.oneway:
            self.replied = True
            return

        fields: dict[str, object] = {"parameters": parameters}
        if continues:
            fields["continues"] = True
        else:
            self.replied = True

        self.connection.send(encode(fields), fds)

    def fail(self, name: str, parameters: dict[str, object]) -> None:
        self.replied = True
        if not self.oneway:
            self.connection.send(encode({"error": name, "parameters": parameters}))


Handler = Callable[[Call], Coroutine[Any, Any, None]]


def error_fields(error: SwitchgearError) -> tuple[str, dict[str, object]]:
    """An error's varlink name and parameters."""
    return f"{INTERFACE}.{error.name}", {
        "code": error.code,
        "message": error.text,
        "details": error.details,
    }


class Connection:
    """One client. Ends at end-of-file, at an error of the stream, or when the server closes."""

    def __init__(self, server: Server, sock: socket.socket, peer: Peer) -> None:
        self._server = server
        self._loop = server.loop
        self.socket = sock
        self._fd = sock.fileno()
        self.peer = peer
        self._reader = MessageReader()
        self._unsent: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._unsent_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._reading = False
        self._closing = False
        self.closed = False
        self.calls = 0
        self._held_bytes = 0
        self._resume_reading()

    def _resume_reading(self) -> None:
        if not self._reading and not self.closed and not self._closing:
            self._loop.add_reader(self._fd, self._readable)
            self._reading = True

    def _pause_reading(self) -> None:
        if self._reading:
            self._loop.remove_reader(self._fd)
            self._reading = False

    def _readable(self) -> None:
        try:
            data, fds = receive(self.socket)
            if not data:
                self.close()
                return

            self._reader.feed(data, fds)
        except (BlockingIOError, InterruptedError):
            return
        except ProtocolError as error:
            self._refuse(error)
            return
        except OSError as error:
            log.debug("client %d: %s", self.peer.pid, error)
            self.close()
            return

        self._advance()
        self._account()

    def _account(self) -> None:
        """Tells the server what this connection holds; over the user's bound it is closed."""
        held = 0 if self.closed else len(self._reader) + self._unsent_bytes
        change = held - self._held_bytes
        if not change:
            return

        self._held_bytes = held
        total = self._server.account(self.peer.uid, change)
        if change > 0 and total > MAX_HELD_BYTES_PER_USER and not self._closing:
            self._refuse(
                QuotaExceeded(
                    f"over {MAX_HELD_BYTES_PER_USER} bytes wait on the connections of user "
                    f"{self.peer.uid}"
                )
            )

    def _advance(self) -> None:
        """Starts the next call, unless one is running or replies are waiting to be read."""
        while self._task is None and not self._unsent and not self.closed and not self._closing:
            try:
                message = self._reader.next()
                call = None if message is None else self._call(message)
            except ProtocolError as error:
                self._refuse(error)
                return

            if call is None:
                break

            self.calls += 1
            self._task = self._loop.create_task(self._handle(call))

        # Keep reading while a call runs, so that end-of-file ends it; but bounded.
        full = len(self._reader) > MAX_MESSAGE_BYTES or self._reader.waiting > MAX_WAITING_CALLS
        if self._unsent or full:
            self._pause_reading()
        else:
            self._resume_reading()

    def _call(self, message: Message) -> Call:
        fields = message.fields
        method = fields.get("method")
        parameters = fields.get("parameters", {})
        flags = [fields.get(flag, False) for flag in ("more", "oneway", "upgrade")]
        if not isinstance(method, str) or not isinstance(parameters, dict):
            raise ProtocolError("a call has a method (string) and parameters (object)")

        if not all(isinstance(flag, bool) for flag in flags) or flags[2]:
            raise ProtocolError("more and oneway are booleans, and upgrade is not supported")

        return Call(
            self, method, parameters, bool(flags[0]), bool(flags[1]), message.descriptors
        )

    async def _handle(self, call: Call) -> None:
        try:
            await self._server.dispatch(call)
        except SwitchgearError as error:
            call.fail(*error_fields(error))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            answer: SwitchgearError | None = as_no_space(error)
            if answer is None:
                log.exception("%s of client %d failed", call.method[:64], self.peer.pid)
                answer = InternalError("a fault of the daemon; its log says more")

            call.fail(*error_fields(answer))
        finally:
            call.descriptors.close()
            self._task = None

        if not self.closed:
            self._advance()

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Queues bytes and sends what the socket takes. Over the bound, the client is
        dropped.

        :raises OSError: no descriptor is free for a copy of `fds`; nothing is sent then.
        """
        if self.closed:
            return

        self._unsent.append((memoryview(data), _copies(fds)))
        self._unsent_bytes += len(data)
        if len(self._unsent) == 1:
            self._flush()

        if self._unsent_bytes > MAX_UNSENT_BYTES:
            log.warning("client %d does not read its replies: dropped", self.peer.pid)
            self.close()
        else:
            self._account()

    def _flush(self) -> None:
        while self._unsent:
            data, fds = self._unsent[0]
            ancillary = []
            if fds:
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]

            try:
                sent = self.socket.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._fd, self._writable)
                return
            except OSError as error:
                log.debug("client %d: %s", self.peer.pid, error)
                self.close()
                return

            for fd in fds:
                os.close(fd)

            self._unsent_bytes -= sent
            if sent == len(data):
                self._unsent.popleft()
            else:
                self._unsent[0] = (data[sent:], ())

        self._loop.remove_writer(self._fd)

    def _writable(self) -> None:
        self._flush()
        self._account()
        if self._unsent or self.closed:
            return

        if self._closing:
            self.close()
        else:
            self._advance()

    def _refuse(self, error: SwitchgearError) -> None:
        """One error, then close."""
        name, parameters = error_fields(error)
        self.close_after(encode({"error": name, "parameters": parameters}))

    def close_after(self, data: bytes) -> None:
        """Sends `data` as far as the client reads it, then closes."""
        self._closing = True
        self._pause_reading()
        self._end_call()
        self.send(data)
        if not self._unsent:
            self.close()

    def _end_call(self) -> None:
        if self._task is not None:
            self._task.cancel()

    @property
    def unsent_bytes(self) -> int:
        """Of replies that the client has not read yet."""
        return self._unsent_bytes

    @property
    def idle(self) -> bool:
        """Connected, but never called anything."""
        return self.calls == 0

    def close(self) -> None:
        """Ends the connection and its running call; what it started goes on."""
        if self.closed:
            return

        self.closed = True
        self._pause_reading()
        self._loop.remove_writer(self._fd)
        self._end_call()
        for _, fds in self._unsent:
            for fd in fds:
                os.close(fd)

        self._unsent.clear()
        self._reader.close()
        self._account()
        self.socket.close()
        self._server.forget(self)


def _copies(fds: Sequence[int]) -> tuple[int, ...]:
    """Descriptors of our own, all or none: the caller closes its when it likes."""
    held: list[int] = []
    try:
        for fd in fds:
            held.append(os.dup(fd))  # noqa: PERF401 (those made before one fails are closed)
    except OSError:
        for fd in held:
            os.close(fd)

        raise

    return tuple(held)


class Server:
    """Accepts clients on a listening socket that stays the caller's."""

    def __init__(
        self, listener: socket.socket, dispatch: Handler, connections_per_user: int
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.dispatch = dispatch
        self.connections: set[Connection] = set()
        self._per_user: Counter[int] = Counter()
        self._held_bytes: Counter[int] = Counter()
        self._limit = connections_per_user
        self._listener = listener
        self._reserve = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._told_exhausted = False
        self._resume: asyncio.TimerHandle | None = None
        self.loop.add_reader(listener.fileno(), self._acceptable)

    def _acceptable(self) -> None:
        for _ in range(ACCEPTS_PER_WAKEUP):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._exhausted(error)
                return

            self._told_exhausted = False
            self._admit(sock)

    def _exhausted(self, error: OSError) -> None:
        """No descriptor left: turn one waiting client away with the reserve, else pause."""
        if not self._told_exhausted:
            log.error("cannot accept: %s", error)
            self._told_exhausted = True

        if error.errno == errno.EMFILE and self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1
            try:
                sock, _ = self._listener.accept()
                sock.close()
            except OSError:
                pass

        try:
            if self._reserve < 0:
                self._reserve = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            pass

        # The listening socket stays readable while clients wait: no spinning.
        self.loop.remove_reader(self._listener.fileno())
        self._resume = self.loop.call_later(ACCEPT_PAUSE_S, self._accept_again)

    def _accept_again(self) -> None:
        self._resume = None
        self.loop.add_reader(self._listener.fileno(), self._acceptable)

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            peer = Peer(*peer_credentials(sock))
        except OSError:
            sock.close()
            return

        connection = Connection(self, sock, peer)
        self.connections.add(connection)
        self._per_user[peer.uid] += 1
        if self._per_user[peer.uid] > self._limit:
            error = QuotaExceeded(f"more than {self._limit} connections of user {peer.uid}")
            name, parameters = error_fields(error)
            connection.close_after(encode({"error": name, "parameters": parameters}))

    def account(self, uid: int, change_bytes: int) -> int:
        """Counts what a user's connections hold; returns their sum."""
        self._held_bytes[uid] += change_bytes
        return self._held_bytes[uid]

    def forget(self, connection: Connection) -> None:
        if connection in self.connections:
            self.connections.discard(connection)
            self._per_user[connection.peer.uid] -= 1
            if not self._per_user[connection.peer.uid]:
                del self._per_user[connection.peer.uid]
                del self._held_bytes[connection.peer.uid]

    def stop_accepting(self) -> None:
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        elif self._listener.fileno() >= 0:
            self.loop.remove_reader(self._listener.fileno())

        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1

    def close(self) -> None:
        """Closes every connection; idle ones delay nothing."""
        for connection in list(self.connections):
            connection.close()
