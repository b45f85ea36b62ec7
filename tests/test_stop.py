"""The daemon's end: within its limit whatever is going on, and nothing left of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest
from daemon_process import DaemonProcess
from held_worker import held
from raw_client import CallFailed, Control, error_name, memfd, message

from switchgear.backends import generate
from switchgear.ipc.record import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

STOP_LIMIT_S = 4.0
CONFIG = f"[daemon]\nstop_limit_s = {STOP_LIMIT_S}\n[cpu]\nthreads = 1\n"
# For a stop whose limits must not matter, and for workers that are stopped meanwhile.
PATIENT_CONFIG = CONFIG.replace(str(STOP_LIMIT_S), "60") + "[workers]\nhang_s = 600\n"
# What a busy machine may add to the limit, and the interpreter's own end.
MARGIN_S = 6.0


@contextmanager
def running(config: str = CONFIG) -> Iterator[DaemonProcess]:
    """A daemon that the test itself stops."""
    daemon = DaemonProcess(config=config)
    try:
        yield daemon.start()
    finally:
        daemon.kill()
        daemon.remove()


def worker_pids(control: Control) -> list[int]:
    return [row["pid"] for row in control.call("GetStatus")["workers"] if row["pid"]]


def hold_workers(control: Control) -> ExitStack:
    """All workers stand still, so that what they are given runs on, until it is closed."""
    pids = worker_pids(control)
    assert pids
    with ExitStack() as stack:
        for pid in pids:
            stack.enter_context(held(pid))

        return stack.pop_all()


def until_in_flight(control: Control, count: int) -> None:
    """Waits until the daemon has taken that many requests, all of stopped workers."""
    while True:
        rows = control.call("GetStatus")["workers"]
        if sum(row["running"] + row["queued"] for row in rows) == count:
            return


def stop_and_measure(daemon: DaemonProcess, signals: int = 1) -> float:
    """Stops it, with this many signals; the seconds that it took."""
    begin = time.monotonic()
    for _ in range(signals - 1):
        os.kill(daemon.pid, signal.SIGTERM)
        until_stopping(daemon)

    daemon.stop()
    return time.monotonic() - begin


def until_stopping(daemon: DaemonProcess) -> None:
    """Signals of one kind that are pending at once are one: wait until this one is seen."""
    while "stopping" not in daemon.log_text():
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_idle_clients_do_not_delay_it(number: signal.Signals) -> None:
    with running(PATIENT_CONFIG) as daemon:
        silent = [Control(daemon.socket) for _ in range(20)]
        half = Control(daemon.socket)
        half.send(message("GetInfo")[:9])
        half.sock.settimeout(15)
        begin = time.monotonic()
        daemon.stop(number)
        # Nothing is in flight, so nothing is waited for: not even a part of the limit.
        assert time.monotonic() - begin < 10.0
        for control in (*silent, half):
            assert control.at_end()
            control.close()


def test_what_runs_is_answered_and_new_frames_are_not_taken() -> None:
    with running(PATIENT_CONFIG) as daemon, Control(daemon.socket) as control:
        control.load(generate.identity((4,)), name="quick")
        with control.open_session("quick", slots=3) as session:
            still = hold_workers(control)
            session.infer(1, 0, 0)
            session.infer(2, 1, 1)
            until_in_flight(control, 2)
            os.kill(daemon.pid, signal.SIGTERM)
            until_stopping(daemon)
            session.infer(3, 2, 2)
            refused = session.receive()
            assert (refused.request_id, error_name(refused)) == (3, "ShuttingDown")
            still.close()
            replies = session.replies(2)
            assert {i: error_name(r) for i, r in replies.items()} == {1: "", 2: ""}
            last = session.receive()
            assert (last.kind, error_name(last)) == (Kind.GOAWAY, "ShuttingDown")
            with pytest.raises(EOFError):
                session.receive()

        daemon_ended(daemon)


def daemon_ended(daemon: DaemonProcess) -> None:
    """Waits for the end of a daemon that was signalled; its status is 0."""
    _, status = os.waitpid(daemon.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert "Traceback" not in daemon.log_text(), daemon.log_text()


def test_new_work_is_refused_while_it_drains() -> None:
    with running(PATIENT_CONFIG) as daemon, Control(daemon.socket) as control:
        control.load(generate.identity((4,)), name="quick")
        with control.open_session("quick") as session:
            still = hold_workers(control)
            session.infer(1)
            until_in_flight(control, 1)
            os.kill(daemon.pid, signal.SIGTERM)
            until_stopping(daemon)
            assert control.call("GetInfo")["state"] == "stopping"
            for method in ("OpenSession", "CheckModel"):
                with pytest.raises(CallFailed) as caught:
                    control.call(method, model="quick")

                assert caught.value.name == "ShuttingDown"

            still.close()
            assert error_name(session.receive()) == ""

        daemon_ended(daemon)


def test_a_worker_that_does_not_end_is_ended() -> None:
    """Stopped, with requests in it: the daemon's limit holds all the same."""
    with running(CONFIG + "[workers]\nhang_s = 60\n") as daemon:  # noqa: SIM117
        with Control(daemon.socket) as control:
            control.load(generate.identity((4,)), name="quick")
            with control.open_session("quick") as session, hold_workers(control):
                session.infer(1)
                until_in_flight(control, 1)
                assert stop_and_measure(daemon) < STOP_LIMIT_S + MARGIN_S
                last = session.receive()
                assert error_name(last) == "ShuttingDown"


def test_a_second_signal_ends_it_at_once() -> None:
    with running(PATIENT_CONFIG) as daemon, Control(daemon.socket) as control:
        control.load(generate.identity((4,)), name="quick")
        with control.open_session("quick") as session, hold_workers(control):
            session.infer(1)
            until_in_flight(control, 1)
            # One signal would take a minute.
            assert stop_and_measure(daemon, signals=2) < 10.0


def test_jobs_are_cancelled() -> None:
    """A model being tried, another waiting for its turn, and a large one being copied."""
    with running() as daemon, Control(daemon.socket) as control:
        data = generate.slow(4000.0)
        fds = [memfd(data + bytes(number + 1)) for number in range(3)]
        large = os.memfd_create("large", os.MFD_CLOEXEC)
        os.truncate(large, 3 << 30)
        fds.append(large)
        jobs = [control.call("LoadModel", [fd], descriptor=0)["job"] for fd in fds]
        for fd in fds:
            os.close(fd)

        control.send(message("WatchJob", {"job": jobs[0]}, more=True))
        control.receive()
        assert stop_and_measure(daemon) < STOP_LIMIT_S + MARGIN_S


def test_it_can_be_stopped_while_it_starts() -> None:
    daemon = DaemonProcess(config=CONFIG, wait="listening")
    try:
        daemon.start().stop()
    finally:
        daemon.kill()
        daemon.remove()


def test_nothing_outlives_a_daemon_that_is_killed() -> None:
    """Workers, and a validator at work, end with it."""
    with running() as daemon, Control(daemon.socket) as control:
        fd = memfd(generate.slow(5000.0))
        try:
            control.call("LoadModel", [fd], descriptor=0)
        finally:
            os.close(fd)

        while not any("validator" in line for line in daemon.children().values()):
            pass

        ends = [os.pidfd_open(pid) for pid in daemon.children()]
        try:
            assert len(ends) >= 2
            os.kill(daemon.pid, signal.SIGKILL)
            for end in ends:
                # Readable once the process has ended.
                assert wait_readable(end)
        finally:
            for end in ends:
                os.close(end)


def wait_readable(fd: int) -> bool:
    import select

    ready, _, _ = select.select([fd], [], [], 15.0)
    return bool(ready)


def serve_on(
    sock: socket.socket, folder: Path, prepare: Callable[[int], str]
) -> subprocess.Popen[bytes]:
    """A daemon that gets a listening socket by exec; `prepare` writes what runs before it."""
    script = (
        "import os, sys\n"
        f"{prepare(sock.fileno())}\n"
        "os.execv(sys.executable, [sys.executable, '-W', 'error', '-m', 'switchgear', 'serve',"
        f" '--socket', {str(folder / 'unused.sock')!r}, '--config', {str(folder / 'c')!r},"
        f" '--state-dir', {str(folder / 'state')!r}])"
    )
    (folder / "c").write_text(CONFIG)
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", script], pass_fds=[sock.fileno()], stdout=log, stderr=log
        )


def as_systemd(fd: int) -> str:
    return (
        f"os.dup2({fd}, 3)\n"
        "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1', LISTEN_FDNAMES='x')"
    )


def as_android(fd: int) -> str:
    return f"os.set_inheritable({fd}, True)\nos.environ['ANDROID_SOCKET_switchgear'] = '{fd}'"


@pytest.mark.parametrize("prepare", [as_systemd, as_android])
@pytest.mark.parametrize("abstract", [False, True])
def test_a_socket_that_is_handed_over(
    tmp_path: Path, prepare: Callable[[int], str], abstract: bool
) -> None:
    path = f"\0switchgear-test-{os.getpid()}" if abstract else str(tmp_path / "given.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        if prepare is as_systemd:
            listener.listen()

        process = serve_on(listener, tmp_path, prepare)
        log = tmp_path / "log"
        try:
            while True:
                try:
                    client = Control(path)
                    break
                except ConnectionRefusedError:
                    # Android's init leaves the call of listen to the service.
                    assert process.poll() is None, log.read_text()

            with client:
                assert client.call("GetInfo")["pid"] == process.pid
                while not (pids := worker_pids(client)):
                    pass

                for pid in pids:
                    # What is meant for the daemon alone does not reach its children.
                    with open(f"/proc/{pid}/environ", "rb") as file:
                        environment = file.read()

                    assert b"LISTEN_" not in environment
                    assert b"ANDROID_SOCKET" not in environment

            assert not (tmp_path / "unused.sock").exists()
            process.send_signal(signal.SIGTERM)
            assert process.wait(15) == 0, log.read_text()
            # It is not the daemon's to remove.
            assert abstract or os.path.exists(path)
        finally:
            process.kill()
            process.wait()


WRONG_HAND_OVERS = {
    "two sockets": "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='2')",
    "no number": "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='x')",
    "not open": (
        "os.closerange(3, 99); os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1')"
    ),
    "a file": (
        "os.dup2(os.open('/dev/null', 0), 3); "
        "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1')"
    ),
    "no descriptor": "os.environ['ANDROID_SOCKET_switchgear'] = 'x'",
    "a wrong descriptor": "os.environ['ANDROID_SOCKET_switchgear'] = '77'",
}


@pytest.mark.parametrize("code", WRONG_HAND_OVERS.values(), ids=WRONG_HAND_OVERS.keys())
def test_a_wrong_hand_over_is_an_error(tmp_path: Path, code: str) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        process = serve_on(other, tmp_path, lambda _: code)
        assert process.wait(15) == 2
        text = (tmp_path / "log").read_text()
        assert "BadConfiguration" in text
        assert "Traceback" not in text
