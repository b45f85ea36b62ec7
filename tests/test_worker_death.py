"""Workers that are killed, stopped or crash with requests in them: each is answered once."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from daemon_health import leaves_nothing
from daemon_process import DaemonProcess
from raw_client import ANSWER_LIMIT_S, CallFailed, Control, error_name
from worker_deaths import (
    interactive,
    killed_in_a_run,
    lost_four_times,
    lost_twice,
    ready_pid,
    until_gone,
)

from switchgear.backends import generate
from switchgear.ipc.record import Backend, Flag, Reason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from raw_client import RawSession

# Some tests wait for several of the limits below.
pytestmark = pytest.mark.timeout(60)

# Far above a slow run, though the machine does other work.
HANG_S = 4.0
START_S = 6.0
SLOW_MS = 250.0
# Deaths in a row after which the next worker is due later than a request waits, and how often a
# test that is held up tries to be there in time.
MANY_DEATHS = 6
MOST_TRIES = 5
CONFIG = f"""
[cpu]
threads = 1
[workers]
hang_s = {HANG_S}
start_s = {START_S}
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(config=CONFIG) as process:
        with Control(process.socket) as control:
            control.load(generate.slow(SLOW_MS), name="slow")
            control.load(generate.identity((4,)), name="quick")
            control.load(generate.accumulator(4), name="sum")

        yield process


@pytest.fixture
def control(daemon: DaemonProcess) -> Iterator[Control]:
    with Control(daemon.socket) as connection:
        # A request that succeeds ends the memory of earlier deaths.
        with connection.open_session("quick") as session:
            ready_pid(connection)
            run(session, 1, [1.0, 2.0, 3.0, 4.0])

        yield connection


def parent_of(pid: int) -> int:
    """0 when it has ended meanwhile."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0

    return int(stat.rpartition(")")[2].split()[1])


@contextlib.contextmanager
def open_pidfd(pid: int) -> Iterator[int]:
    """Readable once the process has ended."""
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def run(
    session: RawSession, request_id: int, values: list[float], **fields: int
) -> list[float]:
    session.write(0, values)
    session.infer(request_id, 0, 0, **fields)
    reply = session.receive()
    assert (reply.request_id, error_name(reply)) == (request_id, "")
    return session.read(reply.output_slot, len(values))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_requests_in_a_worker_that_dies_are_run_again(
    daemon: DaemonProcess, control: Control, number: signal.Signals
) -> None:
    with leaves_nothing(daemon), control.open_session("slow") as session:
        pid = ready_pid(control)
        restarts = interactive(control)["restarts"]
        session.write(0, [1.0])
        session.write(1, [1.0])
        for first in count(1, 2):
            session.infer(first, 0, 0)
            session.infer(first + 1, 1, 1)
            if killed_in_a_run(control, session, number):
                break

            # Answered before this test could kill: once more.
            assert {error_name(r) for r in session.replies(2).values()} == {""}

        replies = session.replies(2)
        assert {i: error_name(r) for i, r in replies.items()} == {first: "", first + 1: ""}
        # Nothing silent: what ran it, what was tried before, and why.
        assert replies[first].retries == 1
        assert replies[first].reason == Reason.RETRIED
        assert replies[first].tried == 1 << Backend.CPU
        assert replies[first + 1].retries == 0
        assert {r.output_slot for r in replies.values()} == {0, 1}
        assert session.is_silent()
        row = interactive(control)
        assert row["pid"] != pid
        assert row["restarts"] == restarts + 1
        assert f"signal:{number.value} {number.name}" in str(row["last_end"])


def test_a_request_whose_second_worker_dies_too_gets_the_error(control: Control) -> None:
    with control.open_session("slow") as session:
        reply = lost_twice(control, session, signal.SIGSEGV)
        assert error_name(reply) == "WorkerDied"
        assert reply.retries == 2
        assert reply.output_slot == 0
        assert session.is_silent()
        session.infer(2, 0, 0)
        assert error_name(session.receive()) == ""


@pytest.mark.parametrize("twice", [False, True])
def test_a_worker_that_stops_is_ended_by_the_watchdog(control: Control, twice: bool) -> None:
    with control.open_session("quick") as session:
        session.write(0, [1.0, 2.0, 3.0, 4.0])
        pid = ready_pid(control)
        os.kill(pid, signal.SIGSTOP)
        session.infer(1, 0, 0)
        session.infer(2, 1, 1)
        if twice:
            until_gone(control, pid)
            os.kill(ready_pid(control), signal.SIGSTOP)

        replies = session.replies(2)
        assert set(replies) == {1, 2}
        assert all(error_name(r) in ("", "WorkerDied") for r in replies.values())
        if not twice:
            assert error_name(replies[1]) == ""
            assert "hung" in str(interactive(control)["last_end"])

        assert session.is_silent()
        assert run(session, 3, [5.0, 6.0, 7.0, 8.0]) == [5.0, 6.0, 7.0, 8.0]


def test_a_worker_that_stops_while_it_loads_a_model(control: Control) -> None:
    """No request runs in it: the load itself has a limit, and the next worker serves it."""
    os.kill(ready_pid(control), signal.SIGSTOP)
    assert control.load(generate.identity((6,)), name="late")["status"] == "ready"


def test_restarts_come_later_and_later(control: Control) -> None:
    """The first at once; then the waits double until a request succeeds again."""
    with control.open_session("quick") as session:
        for _ in range(MOST_TRIES):
            for _ in range(MANY_DEATHS):
                pid = ready_pid(control)
                os.kill(pid, signal.SIGKILL)
                until_gone(control, pid)

            # 0, 0.1, 0.2, 0.4, 0.8 and now 1.6 s: longer than a request may wait, unless it
            # comes after 0.6 s of them. It is answered then, and the waits begin again.
            session.infer(1, 0, 0)
            reply = session.receive()
            if error_name(reply):
                break

        assert error_name(reply) == "NoBackend"
        assert 1000 < reply.retry_after_ms <= 1600
        ready_pid(control)
        assert run(session, 2, [1.0, 2.0, 3.0, 4.0]) == [1.0, 2.0, 3.0, 4.0]
        os.kill(ready_pid(control), signal.SIGKILL)
        assert run(session, 3, [1.0, 2.0, 3.0, 4.0]) == [1.0, 2.0, 3.0, 4.0]


def test_a_model_that_crashes_its_workers_is_quarantined(control: Control) -> None:
    with control.open_session("slow") as bad, control.open_session("quick") as good:
        answered = lost_four_times(control, bad, signal.SIGSEGV)
        assert answered == ("WorkerDied", "ModelQuarantined")
        bad.infer(9, 0, 0)
        assert error_name(bad.receive()) == "ModelQuarantined"
        assert control.call("DescribeModel", model="slow")["model"]["status"] == "quarantined"
        ready_pid(control)
        assert run(good, 1, [1.0, 2.0, 3.0, 4.0]) == [1.0, 2.0, 3.0, 4.0]
        # The operator's way back.
        control.wait_for(control.call("CheckModel", model="slow")["job"])
        bad.infer(10, 0, 0)
        assert error_name(bad.receive()) == ""


def test_deaths_from_outside_do_not_blame_the_model(control: Control) -> None:
    with control.open_session("slow") as session:
        for _ in range(3):
            reply = lost_twice(control, session, signal.SIGKILL)
            assert error_name(reply) == "WorkerDied"

        assert control.call("DescribeModel", model="slow")["model"]["status"] == "ready"


def test_a_stateful_session_loses_its_state_once_and_goes_on(control: Control) -> None:
    with control.open_session("sum") as session:
        ones = [1.0] * 4
        assert run(session, 1, ones) == [1.0] * 4
        assert run(session, 2, ones) == [2.0] * 4
        os.kill(ready_pid(control), signal.SIGSTOP)
        session.infer(3, 0, 0)
        session.infer(4, 1, 1)
        replies = session.replies(2)
        assert {i: error_name(r) for i, r in replies.items()} == {
            3: "StateLost",
            4: "StateLost",
        }
        assert {r.epoch for r in replies.values()} == {2}
        assert {r.output_slot for r in replies.values()} == {0, 1}
        # Still with the old epoch: it may not know yet.
        session.infer(5, 0, 0)
        assert error_name(session.receive()) == "StateLost"
        session.epoch = 2
        # A fresh state, and both slots are the client's again.
        assert run(session, 6, ones) == [1.0] * 4
        session.write(1, ones)
        session.infer(7, 1, 1)
        reply = session.receive()
        assert error_name(reply) == ""
        assert session.read(reply.output_slot, 4) == [2.0] * 4
        assert session.is_silent()


def test_a_death_between_two_frames_loses_the_state_too(control: Control) -> None:
    with control.open_session("sum") as session, control.open_session("sum") as other:
        assert run(session, 1, [1.0] * 4) == [1.0] * 4
        pid = ready_pid(control)
        os.kill(pid, signal.SIGKILL)
        until_gone(control, pid)
        for each in (session, other):
            each.infer(2, 0, 0)
            reply = each.receive()
            assert error_name(reply) == "StateLost"
            each.epoch = reply.epoch
            assert run(each, 3, [2.0] * 4) == [2.0] * 4


def test_reset_starts_a_frame_from_a_fresh_state(control: Control) -> None:
    with control.open_session("sum") as session, control.open_session("sum") as other:
        for frame in range(3):
            assert run(session, frame, [1.0] * 4) == [float(frame + 1)] * 4

        # The state is the session's own.
        assert run(other, 1, [5.0] * 4) == [5.0] * 4
        assert run(session, 9, [1.0] * 4, flags=int(Flag.RESET)) == [1.0] * 4
        assert run(session, 10, [1.0] * 4) == [2.0] * 4
        assert run(other, 2, [5.0] * 4) == [10.0] * 4


def test_at_most_eight_instances_of_a_stateful_model(
    daemon: DaemonProcess, control: Control
) -> None:
    with leaves_nothing(daemon):
        sessions = [control.open_session("sum") for _ in range(8)]
        try:
            with pytest.raises(CallFailed) as caught:
                control.open_session("sum")

            assert caught.value.name == "Overloaded"
            assert caught.value.details["retry_after_ms"] > 0
            for number, session in enumerate(sessions):
                assert run(session, 1, [float(number)] * 4) == [float(number)] * 4

            sessions.pop().close()
            while control.call("DescribeModel", model="sum")["model"]["sessions"] == 8:
                pass

            sessions.append(control.open_session("sum"))
        finally:
            for session in sessions:
                session.close()


def test_a_worker_whose_own_child_outlives_it(tmp_path: Path) -> None:
    """The child holds the worker's sockets open: no end of file comes from them."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'switchgear.backends.worker' in sys.orig_argv and os.fork() == 0:\n"
        "    import time\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
    )
    environment = {"PYTHONPATH": str(tmp_path)}
    with DaemonProcess(config=CONFIG, environment=environment) as daemon:  # noqa: SIM117
        with Control(daemon.socket) as control:
            control.load(generate.identity((4,)), name="quick")
            with control.open_session("quick") as session:
                pid = ready_pid(control)
                before = {child for child in daemon.children() if parent_of(child) == pid}
                (child,) = before
                before.add(pid)
                with open_pidfd(child) as pidfd:
                    os.kill(pid, signal.SIGKILL)
                    assert run(session, 1, [1.0, 2.0, 3.0, 4.0]) == [1.0, 2.0, 3.0, 4.0]
                    # The child ends with the worker that had started it, long before it would
                    # by itself; it may be a moment behind the daemon's signal.
                    assert select.select([pidfd], [], [], ANSWER_LIMIT_S)[0]

                assert not before & set(daemon.children())
