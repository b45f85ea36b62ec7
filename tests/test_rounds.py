"""Many rounds of each bad input: the daemon holds what it held before, and serves others."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from daemon_health import Holdings, Witness, free_descriptors, rss_kib, settles_to
from daemon_process import DaemonProcess
from raw_client import CallFailed, Control, error_name, memfd, message

from switchgear.backends import generate
from switchgear.ipc.record import Kind, Record
from switchgear.ipc.varlink import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUNDS = 200
# Rounds that start a process each, in the quick version.
FEW_ROUNDS = 6
# Buffers of the allocator that the first rounds fill are no leak.
WARM_UP_ROUNDS = 20
RSS_LIMIT_KIB = 1024
GROWTHS = 2
SLOW_MS = 20.0
# Some hundred rounds, which take 10 s where nothing else runs.
LIMIT_S = 90


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    # Nothing here hangs, but a busy machine can keep a worker from its CPU for seconds.
    config = "[cpu]\nthreads = 1\n[workers]\nhang_s = 60\n[validation]\ntime_limit_s = 15\n"
    with DaemonProcess(config=config) as process:
        with Control(process.socket) as control:
            control.load(generate.identity((4,)), name="quick")
            control.load(generate.slow(SLOW_MS), name="slow")
            control.load(generate.accumulator(4), name="sum")

        yield process


@pytest.fixture(scope="module")
def witness(daemon: DaemonProcess) -> Iterator[Witness]:
    with Witness(daemon.socket) as other:
        yield other


def garbage(daemon: DaemonProcess, number: int) -> None:
    data = random.Random(number).randbytes(300).replace(b"\0", b"") + b"\0"
    with Control(daemon.socket) as control:
        control.send(data)
        control.refused()


def deep_nesting(daemon: DaemonProcess, number: int) -> None:
    with Control(daemon.socket) as control:
        control.send(b"[" * 50_000 + b"\0")
        control.refused()


def long_integer(daemon: DaemonProcess, number: int) -> None:
    with Control(daemon.socket) as control:
        control.send(b'{"method":"x","parameters":{"a":' + b"9" * 5000 + b"}}\0")
        control.refused()


def too_long(daemon: DaemonProcess, number: int) -> None:
    with Control(daemon.socket) as control:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            control.send(b"x" * (MAX_MESSAGE_BYTES + 200_000))

        control.refused()


def megabyte(daemon: DaemonProcess, number: int) -> None:
    with Control(daemon.socket) as control, pytest.raises(CallFailed):
        control.call("DescribeModel", model="x" * 1_000_000)


def many_descriptors(daemon: DaemonProcess, number: int) -> None:
    data = message("GetInfo")
    with Control(daemon.socket) as control:
        control.send(data[:9], [0] * 253)
        with contextlib.suppress(BrokenPipeError):
            control.send(data[9:], [0] * 47)

        control.refused()


def unused_descriptors(daemon: DaemonProcess, number: int) -> None:
    with Control(daemon.socket) as control:
        control.call("GetInfo", [0] * 16)


def no_descriptors_left(daemon: DaemonProcess, number: int) -> None:
    with Control(daemon.socket) as control:
        control.call("GetInfo")
        with free_descriptors(daemon, number % 6):
            with pytest.raises(CallFailed):
                control.open_session("quick")

            if number % 6 == 0:
                control.send(message("GetInfo"), [0] * 4)
                control.refused()


def silent_client(daemon: DaemonProcess, number: int) -> None:
    Control(daemon.socket).close()


def half_a_message(daemon: DaemonProcess, number: int) -> None:
    with Control(daemon.socket) as control:
        control.send(message("GetInfo")[: 1 + number % 40], [0, 1])


def death_in_a_call(daemon: DaemonProcess, number: int) -> None:
    with Control(daemon.socket) as control:
        control.send(message("OpenSession", {"model": "quick"}) * 2)


def replies_unread(daemon: DaemonProcess, number: int) -> None:
    with Control(daemon.socket) as control:
        control.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            control.sock.send(message("GetStatus") * 2000)


def no_record(daemon: DaemonProcess, number: int) -> None:
    size = (1, 127, 129, 4096)[number % 4]
    with Control(daemon.socket) as control, control.open_session("quick") as session:
        session.sock.send(bytes(size))
        assert error_name(session.receive()) == "BadRecord"
        with pytest.raises(EOFError):
            session.receive()


def wrong_slots(daemon: DaemonProcess, number: int) -> None:
    with Control(daemon.socket) as control, control.open_session("quick") as session:
        for request in range(8):
            session.infer(request, 2 + number, request)
            assert error_name(session.receive()) == "BadSlot"


def records_unread(daemon: DaemonProcess, number: int) -> None:
    data = Record(Kind.INFER, 1, epoch=1, input_slot=9).pack()
    with (
        Control(daemon.socket) as control,
        control.open_session("quick") as session,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        for _ in range(400):
            session.sock.send(data)


def death_in_a_request(daemon: DaemonProcess, number: int) -> None:
    with Control(daemon.socket) as control, control.open_session("slow") as session:
        session.infer(1, 0, 0)
        session.infer(2, 1, 1)


def cancelled_request(daemon: DaemonProcess, number: int) -> None:
    with Control(daemon.socket) as control, control.open_session("slow") as session:
        session.infer(1, 0, 0)
        session.infer(2, 1, 1)
        session.cancel(1)
        session.cancel(2)
        session.replies(2)


def expired_request(daemon: DaemonProcess, number: int) -> None:
    with Control(daemon.socket) as control, control.open_session("slow") as session:
        session.infer(1, 0, 0, timeout_us=1000)
        session.receive()


def changed_input(daemon: DaemonProcess, number: int) -> None:
    with Control(daemon.socket) as control, control.open_session("quick") as session:
        for request in range(10):
            session.infer(request)
            session.memory[0:16] = struct.pack("<4f", *range(request, request + 4))
            session.receive()


def state_and_no_more(daemon: DaemonProcess, number: int) -> None:
    with Control(daemon.socket) as control, control.open_session("sum") as session:
        session.infer(1)
        assert error_name(session.receive()) == ""


def no_file(daemon: DaemonProcess, number: int) -> None:
    ends = socket.socketpair()
    with Control(daemon.socket) as control, ends[0], ends[1], pytest.raises(CallFailed):
        control.call("LoadModel", [ends[0].fileno()], descriptor=0)


def shrunk_file(daemon: DaemonProcess, number: int) -> None:
    fd = os.memfd_create("shrinks", os.MFD_CLOEXEC)
    os.truncate(fd, 4 << 20)
    try:
        with Control(daemon.socket) as control:
            job = control.call("LoadModel", [fd], descriptor=0)["job"]
            os.truncate(fd, 0)
            assert control.watch(job)["state"] == "failed"
    finally:
        os.close(fd)


def no_model(daemon: DaemonProcess, number: int) -> None:
    fd = memfd(b"no model, number %d" % number)
    try:
        with Control(daemon.socket) as control, pytest.raises(CallFailed):
            control.load_fd(fd)
    finally:
        os.close(fd)


def flipped_model(daemon: DaemonProcess, number: int) -> None:
    data = bytearray(generate.two_inputs())
    data[random.Random(number).randrange(len(data))] ^= 0x40
    with Control(daemon.socket) as control, contextlib.suppress(CallFailed):
        model = control.load(bytes(data))
        control.call("UnloadModel", model=model["model"])


def dead_worker(daemon: DaemonProcess, number: int) -> None:
    with Control(daemon.socket) as control, control.open_session("slow") as session:
        session.infer(1, 0, 0)
        session.infer(2, 1, 1)
        pid = 0
        while not pid:
            rows = control.call("GetStatus")["workers"]
            pid = next((row["pid"] for row in rows if row["running"]), 0)

        os.kill(pid, (signal.SIGKILL, signal.SIGSEGV)[number % 2])
        # Until the daemon knows: no frame that comes from now on is given to that worker.
        while any(row["pid"] == pid for row in control.call("GetStatus")["workers"]):
            pass

        replies = session.replies(2)
        assert {error_name(reply) for reply in replies.values()} <= {"", "WorkerDied"}


@dataclass(frozen=True, slots=True)
class Abuse:
    play: Callable[[DaemonProcess, int], None]
    few: bool = False


ABUSES = [
    *map(Abuse, (garbage, deep_nesting, long_integer, megabyte, many_descriptors)),
    *map(Abuse, (unused_descriptors, silent_client, half_a_message, death_in_a_call)),
    *map(Abuse, (replies_unread, no_record, wrong_slots, records_unread, changed_input)),
    *map(Abuse, (death_in_a_request, cancelled_request, expired_request, no_file)),
    *map(Abuse, (state_and_no_more, shrunk_file, too_long)),
    Abuse(no_model, few=True),
    Abuse(flipped_model, few=True),
    Abuse(dead_worker, few=True),
]
QUICK = [
    pytest.param(a.play, FEW_ROUNDS if a.few else ROUNDS, id=a.play.__name__) for a in ABUSES
]
LONG = [pytest.param(a.play, ROUNDS, id=a.play.__name__) for a in ABUSES if a.few]


def play_one(
    daemon: DaemonProcess,
    witness: Witness,
    one: Callable[[DaemonProcess, int], None],
    number: int,
) -> None:
    one(daemon, number)
    if one is dead_worker:
        # A frame of the witness that died with the worker runs a second time, and must not meet
        # the next death.
        witness.is_served(1)


def play(
    daemon: DaemonProcess,
    witness: Witness,
    one: Callable[[DaemonProcess, int], None],
    rounds: int,
) -> None:
    for number in range(min(WARM_UP_ROUNDS, rounds)):
        play_one(daemon, witness, one, number)

    wait_for_quiet(daemon)
    settled = Holdings.of(daemon)
    grown_kib = []
    # A leak grows each time; an allocator that takes one more block does so once.
    for _ in range(GROWTHS):
        before_kib = rss_kib(daemon.pid)
        for number in range(rounds):
            play_one(daemon, witness, one, number)

        settles_to(daemon, settled)
        witness.is_served()
        grown_kib.append(rss_kib(daemon.pid) - before_kib)
        if grown_kib[-1] <= RSS_LIMIT_KIB:
            return

    pytest.fail(f"{grown_kib} KiB more after {rounds} rounds each")


def wait_for_quiet(daemon: DaemonProcess) -> None:
    """Until only the witness is connected."""
    while (now := Holdings.of(daemon)).connections > 2 or now.sessions > 1:
        pass


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(("one", "rounds"), QUICK)
def test_rounds(
    daemon: DaemonProcess,
    witness: Witness,
    one: Callable[[DaemonProcess, int], None],
    rounds: int,
) -> None:
    play(daemon, witness, one, rounds)


@pytest.mark.slow
@pytest.mark.parametrize(("one", "rounds"), LONG)
def test_as_many_rounds_of_what_takes_longer(
    daemon: DaemonProcess,
    witness: Witness,
    one: Callable[[DaemonProcess, int], None],
    rounds: int,
) -> None:
    play(daemon, witness, one, rounds)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.skipif(os.geteuid() != 0, reason="counting a hardened process's files takes root")
def test_rounds_without_descriptors(daemon: DaemonProcess, witness: Witness) -> None:
    play(daemon, witness, no_descriptors_left, 60)
