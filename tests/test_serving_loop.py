"""The serving loop: data callbacks on a short way, and everything else on time all the same."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import TYPE_CHECKING

import pytest

from switchgear.daemon.serving_loop import ServingLoop, unwatch, watch

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def loop() -> Iterator[ServingLoop]:
    made = ServingLoop()
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.setblocking(False)
    with one, two:
        yield one, two


def run_busy(loop: ServingLoop, pair: tuple[socket.socket, socket.socket]) -> int:
    """Runs the loop until it is stopped, with a socket that always has data; its callbacks."""
    calls = 0

    def callback() -> None:
        nonlocal calls
        calls += 1

    pair[1].send(b"never read")
    watch(loop, pair[0].fileno(), callback)
    try:
        loop.run_forever()
    finally:
        unwatch(loop, pair[0].fileno())

    return calls


def test_a_timer_is_due_while_data_comes_without_end(
    loop: ServingLoop, pair: tuple[socket.socket, socket.socket]
) -> None:
    loop.call_later(0.05, loop.stop)
    assert run_busy(loop, pair) > 1


def test_a_signal_is_seen_while_data_comes_without_end(
    loop: ServingLoop, pair: tuple[socket.socket, socket.socket]
) -> None:
    loop.add_signal_handler(signal.SIGUSR1, loop.stop)
    loop.call_later(0.05, os.kill, os.getpid(), signal.SIGUSR1)
    assert run_busy(loop, pair) > 1
    loop.remove_signal_handler(signal.SIGUSR1)


def test_an_ordinary_reader_is_served_while_data_comes_without_end(
    loop: ServingLoop, pair: tuple[socket.socket, socket.socket]
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        loop.add_reader(listener.fileno(), loop.stop)
        with socket.create_connection(listener.getsockname()):
            assert run_busy(loop, pair) >= 1

        loop.remove_reader(listener.fileno())


def test_what_a_data_callback_schedules_runs(
    loop: ServingLoop, pair: tuple[socket.socket, socket.socket]
) -> None:
    def callback() -> None:
        pair[0].recv(100)
        loop.call_soon(loop.stop)

    watch(loop, pair[0].fileno(), callback)
    pair[1].send(b"x")
    loop.run_forever()
    unwatch(loop, pair[0].fileno())


def test_a_callback_that_raises_ends_nothing(
    loop: ServingLoop,
    pair: tuple[socket.socket, socket.socket],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def callback() -> None:
        loop.call_soon(loop.stop) if pair[0].recv(100) == b"stop" else 1 / 0

    watch(loop, pair[0].fileno(), callback)
    pair[1].send(b"x")
    pair[1].send(b"stop")
    loop.run_forever()
    unwatch(loop, pair[0].fileno())
    assert "ZeroDivisionError" in caplog.text


def test_the_rest_of_asyncio_works_on_it() -> None:
    async def work() -> str:
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        writer.write(b"ping\n")
        line = await asyncio.wait_for(reader.readline(), 5)
        writer.close()
        await writer.wait_closed()
        return line.decode()

    ours, theirs = socket.socketpair()
    with theirs, asyncio.Runner(loop_factory=ServingLoop) as runner:
        theirs.send(b"pong\n")
        assert runner.run(work()) == "pong\n"
        assert theirs.recv(100) == b"ping\n"
