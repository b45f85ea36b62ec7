"""Session sockets in the hands of clients that break the rules, while another one is served."""

from __future__ import annotations

import array
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from daemon_health import Witness, leaves_nothing
from daemon_process import DaemonProcess
from held_worker import held
from raw_client import Control, error_name

from switchgear.backends import generate
from switchgear.ipc.record import RECORD_BYTES, Kind, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from raw_client import RawSession

# A start with three models takes its time on a busy machine.
pytestmark = pytest.mark.timeout(60)

SLOW_MS = 150.0
# Tests hold the worker: that is no hang.
CONFIG = "[cpu]\nthreads = 1\n[workers]\nhang_s = 60.0\n"
GOOD = Record(Kind.INFER, 7, epoch=1, input_slot=0, output_slot=0).pack()


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(config=CONFIG) as process:
        with Control(process.socket) as control:
            control.load(generate.identity((4,)), name="quick")
            control.load(generate.slow(SLOW_MS), name="slow")
            control.load(generate.lookup(), name="lookup")

        with Witness(process.socket):
            yield process


@pytest.fixture
def control(daemon: DaemonProcess) -> Iterator[Control]:
    with leaves_nothing(daemon), Control(daemon.socket) as connection:
        yield connection


def worker(control: Control) -> dict[str, Any]:
    """What the daemon says of its only one."""
    (row,) = control.call("GetStatus")["workers"]
    assert isinstance(row, dict)
    return row


def changed(offset: int, value: bytes) -> bytes:
    return GOOD[:offset] + value + GOOD[offset + len(value) :]


BAD_RECORDS = {
    "one byte": b"\1",
    "127 bytes": GOOD[:127],
    "129 bytes": GOOD + b"\0",
    "100 kB": b"\1" * 100_000,
    "version 0": changed(1, b"\0"),
    "version 2": changed(1, b"\2"),
    "type 0": changed(0, b"\0"),
    "type 7": changed(0, b"\7"),
    "a reply": changed(0, b"\2"),
    "an event": changed(0, b"\4"),
    "a goaway": changed(0, b"\6"),
    "an unknown flag": changed(2, b"\4"),
    "LATE in a request": changed(2, b"\2"),
    "an unknown priority": changed(20, b"\4"),
    "an unknown clock": changed(21, b"\4"),
    "reserved byte 22": changed(22, b"\1"),
    "a status": changed(56, b"\1"),
    "a run time": changed(88, b"\1"),
    "a binding": changed(104, b"\1"),
    "reserved byte 108": changed(108, b"\1"),
    "a deadline": changed(112, b"\1"),
    "reserved byte 127": changed(127, b"\1"),
    "JSON": b'{"op":"probe"}' + b" " * 114,
    "random bytes": bytes((i * 37) % 256 for i in range(128)),
}


@pytest.mark.parametrize("data", BAD_RECORDS.values(), ids=BAD_RECORDS.keys())
def test_what_is_no_record_gets_one_error_and_the_end(control: Control, data: bytes) -> None:
    with control.open_session("quick") as session:
        session.sock.send(data)
        reply = session.receive()
        assert reply.kind == Kind.REPLY
        assert error_name(reply) == "BadRecord"
        if len(data) != RECORD_BYTES:
            assert reply.request_id == 0

        with pytest.raises(EOFError):
            session.receive()


def test_an_empty_record_ends_the_session(control: Control) -> None:
    """The socket delivers it like the end of the connection: there is nothing to answer."""
    with control.open_session("quick") as session:
        session.sock.send(b"")
        with pytest.raises(EOFError):
            session.receive()


def test_a_duplicate_id_ends_the_session(control: Control) -> None:
    with control.open_session("slow") as session, held(worker(control)["pid"]):
        session.infer(7, 0, 0)
        session.infer(7, 1, 1)
        assert error_name(session.receive()) == "BadRecord"
        with pytest.raises(EOFError):
            session.receive()


WRONG_SLOTS = {
    "an input beyond": (2, 0),
    "no input": (65535, 0),
    "an output beyond": (0, 4),
    "no output": (0, 65535),
    "a spare output": (0, 2),
    "another spare output": (0, 3),
}


@pytest.mark.parametrize(("source", "target"), WRONG_SLOTS.values(), ids=WRONG_SLOTS.keys())
def test_a_wrong_slot_is_an_error_and_the_session_goes_on(
    control: Control, source: int, target: int
) -> None:
    with control.open_session("quick") as session:
        session.infer(1, source, target)
        reply = session.receive()
        assert error_name(reply) == "BadSlot"
        assert reply.request_id == 1
        assert reply.output_slot == target
        assert_works(session, 2)


def assert_works(session: RawSession, request_id: int) -> None:
    values = [float(request_id + i) for i in range(4)]
    session.write(0, values)
    session.infer(request_id, 0, 0)
    reply = session.receive()
    assert (reply.request_id, error_name(reply)) == (request_id, "")
    assert session.read(reply.output_slot, 4) == values
    assert session.header_id(reply.output_slot) == request_id


def test_slots_in_use_are_refused(control: Control) -> None:
    with control.open_session("slow") as session:
        with held(worker(control)["pid"]):
            session.infer(1, 0, 0)
            session.infer(2, 0, 1)  # the input is in use
            assert error_name(session.receive()) == "SlotBusy"
            session.infer(3, 1, 0)  # the output is in use
            assert error_name(session.receive()) == "BadSlot"
            session.infer(4, 1, 1)
            session.infer(5, 1, 1)
            refused = session.receive()
            assert (refused.request_id, error_name(refused)) == (5, "SlotBusy")

        replies = session.replies(2)
        assert {i: error_name(r) for i, r in replies.items()} == {1: "", 4: ""}


def test_arena_add_is_not_supported_and_the_session_goes_on(control: Control) -> None:
    with control.open_session("quick") as session:
        session.sock.send(changed(0, b"\5"))
        assert error_name(session.receive()) == "BadRequest"
        assert_works(session, 8)


def test_a_cancel_of_nothing_is_ignored(control: Control) -> None:
    with control.open_session("quick") as session:
        for number in range(50):
            session.cancel(number)

        assert_works(session, 100)
        session.cancel(100)
        assert_works(session, 101)


def test_descriptors_sent_with_a_record_are_dropped(control: Control) -> None:
    with control.open_session("quick") as session:
        session.write(0, [1.0, 2.0, 3.0, 4.0])
        numbers = array.array("i", [session.sock.fileno()] * 50)
        session.sock.sendmsg([GOOD], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])
        assert error_name(session.receive()) == ""


def is_cut_off(session: RawSession, send: Callable[[int], object]) -> bool:
    """Sends without reading until the daemon ends the session."""
    try:
        for number in range(1, 100_000):
            send(number)
    except (BrokenPipeError, ConnectionResetError):
        return True

    return False


def test_a_client_that_never_reads_its_replies(daemon: DaemonProcess, control: Control) -> None:
    """Wrong slots cost nothing to send: replies fill the socket, then the session ends."""
    with Witness(daemon.socket) as witness, control.open_session("quick") as session:
        wrong = Record(Kind.INFER, 1, epoch=1, input_slot=99, output_slot=0).pack()
        assert is_cut_off(session, lambda number: session.sock.send(wrong))
        witness.is_served()


def test_frames_and_cancels_without_reading(daemon: DaemonProcess, control: Control) -> None:
    with Witness(daemon.socket) as witness, control.open_session("quick") as session:

        def infer_and_cancel(number: int) -> None:
            session.infer(number, 0, 0)
            session.cancel(number)

        assert is_cut_off(session, infer_and_cancel)
        witness.is_served()


@pytest.mark.parametrize("requests", [1, 2])
def test_a_session_closed_with_requests_in_it(
    daemon: DaemonProcess, control: Control, requests: int
) -> None:
    with control.open_session("slow") as session:
        for number in range(requests):
            session.infer(number + 1, number, number)

    # The worker is free for others once the running one has ended.
    with control.open_session("quick") as other:
        assert_works(other, 9)

    sessions = daemon.call("GetStatus")["parameters"]["sessions"]
    assert "slow" not in [session["model"] for session in sessions]


def test_an_input_that_changes_while_it_runs(control: Control) -> None:
    """A lookup's indices are checked and used from a copy: no crash, and all answered."""
    stop = threading.Event()
    with control.open_session("lookup", slots=1) as session:
        restarts = worker(control)["restarts"]

        def scribble() -> None:
            good, bad = struct.pack("<i", 1), struct.pack("<i", 2**31 - 1)
            while not stop.is_set():
                session.memory[0:4] = bad
                session.memory[0:4] = good

        thread = threading.Thread(target=scribble)
        thread.start()
        try:
            for number in range(1, 400):
                session.infer(number)
                reply = session.receive()
                # An index that is out of range is the engine's error.
                assert reply.request_id == number
                assert reply.status_domain in (0, 4)
        finally:
            stop.set()
            thread.join()

        assert worker(control)["restarts"] == restarts


def test_an_arena_with_its_pages_taken_away(control: Control) -> None:
    """Sealed against shrinking, it can still have holes: they read as zeros."""
    reply, fds = control.call_with_fds("OpenSession", model="quick")
    arena = fds[reply["arena"]]
    size = reply["layout"]["size_bytes"]
    with pytest.raises(PermissionError):
        os.ftruncate(arena, 0)

    with socket.socket(fileno=fds[reply["socket"]]) as sock:
        sock.settimeout(15)
        for number in range(1, 50):
            # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
            assert libc_fallocate(arena, 3, 0, size) == 0
            sock.send(Record(Kind.INFER, number, epoch=1, input_slot=0, output_slot=0).pack())
            assert error_name(Record.unpack(sock.recv(RECORD_BYTES))) == ""

    os.close(arena)


def libc_fallocate(fd: int, mode: int, offset: int, length: int) -> int:
    import ctypes

    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return int(call(fd, mode, offset, length))


CHILD = """
import os, socket, sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from raw_client import Control
control = Control(Path(sys.argv[1]))
sessions = [control.open_session("slow") for _ in range(2)]
for session in sessions:
    session.infer(1, 0, 0)
    session.infer(2, 1, 1)
    os.set_inheritable(session.sock.fileno(), True)
keeper = os.fork()
if keeper == 0:
    # Holds copies of every socket and outlives the app.
    os.set_inheritable(control.sock.fileno(), True)
    print("keeper", os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def test_an_app_that_is_killed_while_another_process_keeps_its_sockets(
    daemon: DaemonProcess, control: Control, tmp_path: Path
) -> None:
    app = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(daemon.socket), os.path.dirname(__file__)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert app.stdout is not None
    with app, app.stdout:
        keeper = int(app.stdout.readline().split()[1])
        keeper_end = os.pidfd_open(keeper)
        try:
            sessions = control.call("GetStatus")["sessions"]
            assert sum(s["pid"] == app.pid for s in sessions) == 2
            app.kill()
            app.wait()
            while any(s["pid"] == app.pid for s in control.call("GetStatus")["sessions"]):
                pass

            os.kill(keeper, 0)  # still there, and with it the other ends
            with control.open_session("quick") as session:
                assert_works(session, 1)
        finally:
            signal.pidfd_send_signal(keeper_end, signal.SIGKILL)
            os.close(keeper_end)
