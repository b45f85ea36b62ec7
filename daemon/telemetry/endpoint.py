"""A minimal HTTP server that answers GET /metrics and nothing else.

Bounded in everything a client can make it do: one request a connection, a short head, a time
limit for the whole exchange, few connections at once. A browser that a foreign page points here
(by a name that leads to the loopback address) is turned away by its Host line.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from switchgear.daemon import listen
from switchgear.daemon.telemetry.address import Address
from switchgear.daemon.telemetry.exposition import CONTENT_TYPE

if TYPE_CHECKING:
    from switchgear.daemon.listen import Listener

MAX_HEAD_BYTES: Final = 4096
MAX_CONNECTIONS: Final = 16
# From the first byte wanted to the last one taken: a scrape takes milliseconds.
EXCHANGE_LIMIT_S: Final = 10.0
BACKLOG: Final = 16
_END_OF_HEAD: Final = b"\r\n\r\n"
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")

log = logging.getLogger(__name__)


class Endpoint:
    """Serves `text`, which is asked anew for each request, until `close`."""

    def __init__(self, address: Address, text: Callable[[], Awaitable[str]]) -> None:
        self._address = address
        self._text = text
        self._exchanges: set[_Exchange] = set()
        self._server: asyncio.Server | None = None
        self._listener: Listener | None = None

    async def open(self) -> Address:
        """Listens; returns the address with the port that it got.

        :raises OSError: the port is taken, or the address is not there.
        :raises SwitchgearError: the socket's path is not usable, or another process serves it.
        """
        loop = asyncio.get_running_loop()
        path = self._address.path
        if path is not None:
            self._listener = listen.own(path)
            self._server = await loop.create_unix_server(
                lambda: _Exchange(self), sock=self._listener.socket, backlog=BACKLOG
            )
            return self._address

        self._server = await loop.create_server(
            lambda: _Exchange(self), self._address.host, self._address.port, backlog=BACKLOG
        )
        port = self._server.sockets[0].getsockname()[1]
        return Address(host=self._address.host, port=port)

    def close(self) -> None:
        """Stops listening and drops what is open; does not wait."""
        if self._server is not None:
            self._server.close()

        for exchange in list(self._exchanges):
            exchange.abort()

        if self._listener is not None:
            self._listener.close()

    # What an exchange asks of it.

    def admit(self, exchange: _Exchange) -> bool:
        """False when there are as many as there may be."""
        if len(self._exchanges) >= MAX_CONNECTIONS:
            return False

        self._exchanges.add(exchange)
        return True

    def leave(self, exchange: _Exchange) -> None:
        self._exchanges.discard(exchange)

    async def answer(self, head: bytes) -> tuple[int, str]:
        """Status and body for a request's head, without its empty line."""
        try:
            lines = head.decode("ascii").split("\r\n")
            method, target, version = lines[0].split(" ")
            fields = [line.partition(":") for line in lines[1:]]
        except ValueError:
            return 400, "no request\n"

        names = [name.lower() for name, separator, _ in fields if separator]
        if len(names) != len(fields) or not version.startswith("HTTP/1."):
            return 400, "no request\n"

        hosts = [value.strip().lower() for name, _, value in fields if name.lower() == "host"]
        if len(hosts) > 1 or (not hosts and version != "HTTP/1.0"):
            return 400, "one Host line is needed\n"

        if self._address.path is None and hosts and not _is_local(hosts[0]):
            return 403, "ask by a loopback address\n"

        if target.partition("?")[0] != "/metrics":
            return 404, "only /metrics is here\n"

        if method not in ("GET", "HEAD"):
            return 405, "only GET and HEAD\n"

        try:
            return 200, await self._text()
        except Exception:
            log.exception("the metrics cannot be told")
            return 500, "a fault of the daemon; its log says more\n"


def _is_local(host: str) -> bool:
    name, separator, port = host.rpartition(":")
    return host in _LOCAL_NAMES or (bool(separator) and name in _LOCAL_NAMES and port.isdigit())


class _Exchange(asyncio.Protocol):
    """One connection: one request, one answer, the end."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._endpoint.admit(self):
            self._limit = self._loop.call_later(EXCHANGE_LIMIT_S, self.abort)
        else:
            self._send(503, "too many connections\n", head_only=False)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if self._task is not None or self._answered:
            # A second request, or a body: nobody reads it.
            return

        self._received += data
        end = self._received.find(_END_OF_HEAD)
        if end > MAX_HEAD_BYTES or (end < 0 and len(self._received) > MAX_HEAD_BYTES):
            self._send(431, "the head is too long\n", head_only=False)
        elif end >= 0:
            self._transport.pause_reading()
            self._task = self._loop.create_task(self._answer(bytes(self._received[:end])))

    async def _answer(self, head: bytes) -> None:
        status, body = await self._endpoint.answer(head)
        self._send(status, body, head_only=head.startswith(b"HEAD "))

    def _send(self, status: int, body: str, *, head_only: bool) -> None:
        assert self._transport is not None
        self._answered = True
        if self._transport.is_closing():
            return

        data = body.encode()
        kind = CONTENT_TYPE if status == 200 else "text/plain; charset=utf-8"
        lines = [
            f"HTTP/1.1 {status} {_REASONS[status]}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(data)}",
            "Connection: close",
        ]
        if status == 405:
            lines.append("Allow: GET, HEAD")

        self._transport.write("\r\n".join(lines).encode() + _END_OF_HEAD)
        if not head_only:
            self._transport.write(data)

        self._transport.close()

    def eof_received(self) -> bool:
        # A client may close its half after the request and still read.
        return self._task is not None

    def connection_lost(self, error: Exception | None) -> None:
        if self._limit is not None:
            self._limit.cancel()

        if self._task is not None:
            self._task.cancel()

        self._endpoint.leave(self)

    def abort(self) -> None:
        """Drops the connection at once."""
        if self._transport is not None:
            self._transport.abort()
