"""Three processes that pass records on and back, and the same records to a session."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from switchgear.ipc import varlink


@contextlib.contextmanager
def relay() -> Iterator[socket.socket]:
    """A client's end of client, relay and echo: three processes, blocking calls, our record."""
    kind = socket.SOCK_SEQPACKET
    ours, front = socket.socketpair(socket.AF_UNIX, kind)
    back, echo = socket.socketpair(socket.AF_UNIX, kind)
    children = []
    for mine, work in ((front, _relay), (echo, _echo)):
        pid = os.fork()
        if pid == 0:
            for sock in {ours, front, back, echo} - {mine, back if work is _relay else mine}:
                sock.close()

            work(mine, back)
            os._exit(0)

        children.append(pid)

    for sock in (front, back, echo):
        sock.close()

    try:
        yield ours
    finally:
        ours.close()
        for pid in children:
            os.waitpid(pid, 0)


def _relay(front: socket.socket, back: socket.socket) -> None:
    while data := front.recv(256):
        back.send(data)
        front.send(back.recv(256))


def _echo(sock: socket.socket, _: socket.socket) -> None:
    while data := sock.recv(256):
        sock.send(data)


@contextlib.contextmanager
def raw_session(path: str, model: str) -> Iterator[socket.socket]:
    """The data socket of a session, without the client library."""
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(path)
        call: dict[str, object] = {"method": "io.switchgear.OpenSession"}
        control.sendall(varlink.encode({**call, "parameters": {"model": model}}))
        reader = varlink.MessageReader()
        while (message := reader.next()) is None:
            reader.feed(*varlink.receive(control))

        with socket.socket(fileno=message.descriptors.take(0)) as sock:
            message.descriptors.close()
            yield sock


def exchange(sock: socket.socket, data: bytes) -> bytes:
    sock.send(data)
    return sock.recv(256)
