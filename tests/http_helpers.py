"""Asks an HTTP server byte by byte, as no library would."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S: Final = 15.0


@dataclass(frozen=True)
class Answer:
    status: int
    fields: dict[str, str]
    body: str


def open_socket(address: tuple[str, int] | Path) -> socket.socket:
    if isinstance(address, tuple):
        return socket.create_connection(address, LIMIT_S)

    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(LIMIT_S)
    sock.connect(str(address))
    return sock


def read_all(sock: socket.socket) -> bytes:
    """Everything until the other side closes."""
    data = b""
    while part := sock.recv(65536):
        data += part

    return data


def parse_answer(data: bytes) -> Answer:
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    fields = {
        name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines[1:])
    }
    answer = Answer(int(lines[0].split(" ")[1]), fields, body.decode())
    assert lines[0].startswith("HTTP/1.1 "), lines[0]
    return answer


def ask(address: tuple[str, int] | Path, request: str | bytes) -> Answer:
    """Sends the bytes of a request, and reads the whole answer."""
    data = request.encode() if isinstance(request, str) else request
    with open_socket(address) as sock:
        sock.sendall(data)
        return parse_answer(read_all(sock))


def get(
    address: tuple[str, int] | Path, target: str = "/metrics", host: str = "localhost"
) -> Answer:
    return ask(address, f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n")
