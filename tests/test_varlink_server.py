"""What a user's connections may hold in the daemon's memory, however many there are."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from daemon_process import DaemonProcess
from raw_client import Control

from switchgear.daemon.session_events import unread_bytes
from switchgear.daemon.varlink_server import (
    MAX_HELD_BYTES_PER_USER,
    MAX_WAITING_CALLS,
    Call,
    Server,
)
from switchgear.ipc.varlink import MAX_MESSAGE_BYTES, READ_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

QUICK = b'{"method":"a.Quick"}\0'
HELD = b'{"method":"a.Held"}\0'
# The kernel tells nobody that the other end has read.
POLL_S = 0.001


class Service:
    """A server whose method `a.Held` waits until it is let go."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.go_on = asyncio.Event()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen(256)
        self.listener.setblocking(False)
        self.server = Server(self.listener, self.dispatch, 256)

    async def dispatch(self, call: Call) -> None:
        if call.method == "a.Held":
            await self.go_on.wait()

        call.reply({})

    def close(self) -> None:
        self.server.stop_accepting()
        self.server.close()
        self.listener.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (what the server's readers see has no event)
        await asyncio.sleep(0)


def test_calls_behind_a_running_one_are_not_all_read(tmp_path: Path) -> None:
    async def run() -> None:
        service = Service(tmp_path / "socket")
        reader, writer = await asyncio.open_unix_connection(service.path)
        writer.write(HELD + QUICK * (MAX_MESSAGE_BYTES // len(QUICK)))
        await until(lambda: bool(service.server.connections))
        (connection,) = service.server.connections
        # Its reader is full; the rest waits in the socket, and nothing more arrives.
        await until(lambda: connection._reader.waiting > MAX_WAITING_CALLS)
        for _ in range(100):
            await asyncio.sleep(0)

        assert connection._reader.waiting <= MAX_WAITING_CALLS + READ_BYTES // len(QUICK) + 1
        service.go_on.set()
        # More than were read before: reading goes on.
        for _ in range(2 * READ_BYTES // len(QUICK)):
            assert await reader.readuntil(b"\0") == b'{"parameters":{}}\0'

        writer.transport.abort()
        await until(lambda: not service.server.connections)
        service.close()

    asyncio.run(run())


def test_unfinished_messages_of_a_user_have_one_bound() -> None:
    part = b'{"a":"' + b"x" * (MAX_MESSAGE_BYTES - READ_BYTES)
    fitting = MAX_HELD_BYTES_PER_USER // len(part)
    with DaemonProcess() as daemon:
        for _ in range(2):
            with ExitStack() as stack:
                for _ in range(fitting):
                    control = stack.enter_context(Control(daemon.socket))
                    control.send(part)
                    while unread_bytes(control.sock):
                        time.sleep(POLL_S)

                over = [stack.enter_context(Control(daemon.socket)) for _ in range(3)]
                for control in over:
                    with suppress(BrokenPipeError, ConnectionResetError):
                        control.send(part)

                for control in over:
                    answer, _ = control.receive()
                    assert answer["error"] == "io.switchgear.QuotaExceeded"
                    assert control.at_end()

                # A small call needs next to no room.
                small = stack.enter_context(Control(daemon.socket))
                assert small.call("GetInfo")["ready"]

            with Control(daemon.socket) as control:
                while control.call("GetStatus")["connections"] > 1:
                    pass
