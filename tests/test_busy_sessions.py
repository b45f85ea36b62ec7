"""Requests that wait or run when something happens: cancels, deadlines, a busy backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from daemon_process import DaemonProcess
from held_worker import held
from raw_client import Control, error_name
from worker_deaths import interactive

from switchgear.backends import generate
from switchgear.ipc.record import Flag, Priority

if TYPE_CHECKING:
    from collections.abc import Iterator

    from raw_client import RawSession

    from switchgear.ipc.record import Record

# Runs of a third of a second on a quiet machine.
pytestmark = pytest.mark.timeout(60)

# So long that the daemon hands a worker no second request ahead.
SLOW_MS = 300.0
CHANNELS = 128
# A worker that is held for as long as a test needs it does not hang.
CONFIG = """
[cpu]
threads = 1
[limits]
queue = 3
[workers]
hang_s = 60.0
[validation]
time_limit_s = 30.0
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(config=CONFIG) as process:
        with Control(process.socket) as control:
            control.load(generate.slow(SLOW_MS), name="slow")
            control.load(generate.identity((4,)), name="quick")

        yield process


@pytest.fixture
def control(daemon: DaemonProcess) -> Iterator[Control]:
    with Control(daemon.socket) as connection:
        yield connection


@pytest.fixture
def session(control: Control) -> Iterator[RawSession]:
    """A session of the slow model, after a run that has taught the lane its time."""
    with control.open_session("slow") as opened:
        opened.infer(1000)
        assert error_name(opened.receive()) == ""
        yield opened


def worker_pid(control: Control) -> int:
    """Of the worker that runs what is no batch."""
    return int(interactive(control)["pid"])


def count(control: Control, what: str) -> int:
    """How many requests are `running` or `queued`."""
    return sum(int(row[what]) for row in control.call("GetStatus")["workers"])


def until(control: Control, what: str, wanted: int = 1) -> None:
    while count(control, what) < wanted:
        pass


def names(replies: dict[int, Record]) -> dict[int, str]:
    return {number: error_name(reply) for number, reply in replies.items()}


def test_a_cancelled_run_gives_a_spare_slot_and_never_touches_it(
    control: Control, session: RawSession
) -> None:
    session.write(0, [3.0] * CHANNELS)
    with held(worker_pid(control)):
        session.infer(1, 0, 0)
        until(control, "running")
        session.cancel(1)
        reply = session.receive()
        assert error_name(reply) == "Cancelled"
        spare = reply.output_slot
        assert spare in (2, 3)
        # Slot 0 is the running worker's until it is done.
        session.infer(2, 0, 0)
        assert error_name(session.receive()) == "BadSlot"
        mark = [7.0] * CHANNELS
        place = session.reply["layout"]["outputs"][spare][0]
        session.memory[place[1] : place[1] + 8] = b"untouch!"
        # What waits behind the cancelled run is served from the slot that was given.
        session.write(0, mark)
        session.infer(3, 0, 1)
        until(control, "queued")

    assert error_name(session.receive()) == ""
    assert session.memory[place[1] : place[1] + 8] == b"untouch!"
    assert session.header_id(spare) != 1
    # Now the worker is done with slot 0: it is a spare one, no longer the client's.
    session.infer(4, 0, 0)
    assert error_name(session.receive()) == "BadSlot"
    session.infer(5, 0, spare)
    reply = session.receive()
    assert (error_name(reply), reply.output_slot) == ("", spare)
    assert session.is_silent()


def test_cancels_beyond_the_spare_slots_wait_for_the_run(
    control: Control, session: RawSession
) -> None:
    """Two slots, two spare ones: the client always gets a slot that nobody else writes to."""
    owned = [0, 1]
    for number in range(1, 9):
        session.infer(number, 0, owned[0])
        while not count(control, "running") and not session.has_answer:
            pass

        session.cancel(number)
        reply = session.receive()
        assert reply.request_id == number
        assert error_name(reply) in ("Cancelled", "")
        owned[0] = reply.output_slot
        assert owned[0] != owned[1]

    session.infer(100, 0, owned[0])
    assert error_name(session.receive()) == ""


def test_a_waiting_request_is_cancelled_at_once(control: Control, session: RawSession) -> None:
    with held(worker_pid(control)):
        session.infer(1, 0, 0)
        session.infer(2, 1, 1)
        session.cancel(2)
        first = session.receive()
        assert (first.request_id, error_name(first), first.output_slot) == (2, "Cancelled", 1)

    assert error_name(session.receive()) == ""


def test_a_deadline_ends_what_waits_and_what_runs(
    control: Control, session: RawSession
) -> None:
    with held(worker_pid(control)):
        session.infer(1, 0, 0, timeout_us=50_000)
        session.infer(2, 1, 1, timeout_us=20_000)
        replies = session.replies(2)

    assert names(replies) == {1: "DeadlineExceeded", 2: "DeadlineExceeded"}
    assert replies[2].output_slot == 1
    assert replies[2].run_ns == 0
    assert replies[1].output_slot in (2, 3)
    session.infer(3, 1, 1)
    assert error_name(session.receive()) == ""
    assert session.is_silent()


def test_a_long_deadline_changes_nothing(session: RawSession) -> None:
    for number, timeout_us in enumerate((60_000_000, 2**53, 2**64 - 1)):
        session.infer(number, 0, 0, timeout_us=timeout_us)
        reply = session.receive()
        assert error_name(reply) == ""
        assert not reply.flags & Flag.LATE


def test_on_busy_reject(control: Control, session: RawSession) -> None:
    with control.open_session("slow", on_busy="reject") as other:
        with held(worker_pid(control)):
            session.infer(1, 0, 0)
            until(control, "running")
            other.infer(1, 0, 0)
            reply = other.receive()

        assert error_name(reply) == "Busy"
        assert reply.retry_after_ms > 0
        assert reply.output_slot == 0
        assert error_name(session.receive()) == ""
        other.infer(2, 0, 0)
        assert error_name(other.receive()) == ""


def test_on_busy_wait_is_bounded(control: Control, session: RawSession) -> None:
    with control.open_session("slow", slots=8) as other:
        with held(worker_pid(control)):
            session.infer(1, 0, 0)
            until(control, "running")
            for number in range(5):
                other.infer(number, number, number)

            replies = other.replies(2)
            assert names(replies) == {3: "Busy", 4: "Busy"}

        assert replies[3].retry_after_ms > 0
        assert names(other.replies(3)) == {0: "", 1: "", 2: ""}
        assert error_name(session.receive()) == ""


def test_on_busy_replace_oldest(control: Control, session: RawSession) -> None:
    """A camera's newest frame: what it has waiting is answered Superseded."""
    with control.open_session("slow", slots=4, on_busy="replace_oldest") as camera:
        with held(worker_pid(control)):
            session.infer(1, 0, 0)
            until(control, "running")
            for number in range(4):
                camera.infer(number, number, number)

            superseded = dict.fromkeys(range(3), "Superseded")
            assert names(camera.replies(3)) == superseded

        assert names(camera.replies(1)) == {3: ""}
        # Another session's requests are nobody else's to replace.
        assert error_name(session.receive()) == ""


def test_urgent_requests_pass_and_the_batch_lane_stands_aside(
    control: Control, session: RawSession
) -> None:
    with control.open_session("slow", slots=4) as other:
        with held(worker_pid(control)):
            other.infer(1, 0, 0)
            until(control, "running")
            other.infer(2, 1, 1)
            other.infer(3, 2, 2, priority=int(Priority.HIGH))
            until(control, "queued", 2)

        order = [other.receive().request_id for _ in range(3)]
        assert order == [1, 3, 2]

    with control.open_session("quick") as quick:
        quick.infer(1, 0, 0, priority=int(Priority.BATCH))
        assert error_name(quick.receive()) == ""
        lanes = {row["lane"] for row in control.call("GetStatus")["workers"]}
        assert lanes == {"interactive", "batch"}


def test_every_slot_in_flight_and_one_answer_each(control: Control) -> None:
    with control.open_session("quick", slots=16) as session:
        owned = list(range(16))
        for frame in range(20):
            for slot in range(16):
                session.infer(frame * 16 + slot, slot, owned[slot])

            replies = session.replies(16)
            assert set(names(replies).values()) <= {"", "Busy"}
            owned = [reply.output_slot for reply in replies.values()]
            assert len(set(owned)) == 16
