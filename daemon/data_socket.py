"""A session's data socket, and the process at its other end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Final

from switchgear.daemon.serving_loop import unwatch, watch
from switchgear.ipc.record import RECORD_BYTES

# One more than a record has: what is longer is seen to be.
_TOO_LONG: Final = RECORD_BYTES + 1

log = logging.getLogger(__name__)


class DataSocket:
    """Owns `sock`, a SOCK_SEQPACKET one, and `pidfd`, of the process at its other end.

    Each record that comes in goes to `on_record`, which keeps it. `on_end` is called when the
    other end is closed, its process has exited, or a record cannot be sent; the owner calls
    `close` then, or before. `label` is for the log. Nothing here blocks.
    """

    def __init__(
        self,
        sock: socket.socket,
        pidfd: int,
        on_record: Callable[[bytearray], None],
        on_end: Callable[[], None],
        label: str,
    ) -> None:
        self.sock = sock
        self._pidfd = pidfd
        self._label = label
        self._on_record = on_record
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(_TOO_LONG)
        sock.setblocking(False)
        watch(self._loop, sock.fileno(), self._readable)
        self._loop.add_reader(pidfd, on_end)

    def _readable(self) -> None:
        try:
            size = self.sock.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            size = 0

        if size == 0:
            self._on_end()
            return

        self._on_record(self._buffer[:size])

    def send(self, data: bytes | bytearray) -> None:
        """Sends one record."""
        try:
            self.sock.send(data, socket.MSG_NOSIGNAL)
        except OSError as error:
            # At most `slots` replies are unread by a client that keeps the rules.
            log.info("%s takes no replies: %s", self._label, error)
            self._loop.call_soon(self._on_end)

    def close(self) -> None:
        """Ends both; calls nobody. Twice is harmless."""
        if self._pidfd >= 0:
            unwatch(self._loop, self.sock.fileno())
            self.sock.close()
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
