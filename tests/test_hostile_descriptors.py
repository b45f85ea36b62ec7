"""Descriptors: too many in a message, and none free in the daemon."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest
from daemon_health import Witness, free_descriptors, leaves_nothing
from daemon_process import DaemonProcess
from raw_client import CallFailed, Control, memfd, message

from switchgear.backends import generate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Two starts take their time on a busy machine.
pytestmark = pytest.mark.timeout(60)

INFO = message("GetInfo")


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as process:
        with Control(process.socket) as control:
            control.load(generate.identity((4,)))

        # A verdict on a new model is written in the background, with descriptors that come and
        # go: the next start knows it.
        process.stop()
        process.start()
        with Witness(process.socket):
            yield process


def failure_of(call: Callable[[], object]) -> str:
    """The name of the error that a call ends with; empty when it succeeds."""
    try:
        call()
    except CallFailed as failure:
        return failure.name

    return ""


def test_300_descriptors_in_one_message(daemon: DaemonProcess) -> None:
    fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with leaves_nothing(daemon), Control(daemon.socket) as control:
            # The kernel takes 253 at once.
            control.send(INFO[:10], [fd] * 253)
            with contextlib.suppress(BrokenPipeError):
                control.send(INFO[10:], [fd] * 47)

            assert "descriptors were lost" in control.refused()
    finally:
        os.close(fd)


def test_17_descriptors_over_two_parts_of_a_message(daemon: DaemonProcess) -> None:
    fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with leaves_nothing(daemon), Control(daemon.socket) as control:
            control.send(INFO[:10], [fd] * 9)
            control.send(INFO[10:20], [fd] * 8)
            assert "more than 16 descriptors" in control.refused()
    finally:
        os.close(fd)


def test_16_descriptors_that_nobody_asked_for_are_closed(daemon: DaemonProcess) -> None:
    fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with leaves_nothing(daemon), Control(daemon.socket) as control:
            for _ in range(3):
                assert control.call("GetInfo", [fd] * 16)["pid"] == daemon.pid
    finally:
        os.close(fd)


def test_16_descriptors_when_4_are_free(daemon: DaemonProcess) -> None:
    fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with leaves_nothing(daemon), Control(daemon.socket) as control:
            control.call("GetInfo")
            with free_descriptors(daemon, 4):
                control.send(INFO, [fd] * 16)
                assert "none free here" in control.refused()
    finally:
        os.close(fd)


@pytest.mark.parametrize("free", range(7))
def test_each_call_while_descriptors_are_short(daemon: DaemonProcess, free: int) -> None:
    """It works or says NoSpace; never a fault of the daemon, and nothing stays behind."""
    fd = memfd(generate.identity((4,)))
    try:
        with leaves_nothing(daemon), Control(daemon.socket) as control:
            control.call("GetInfo")
            with free_descriptors(daemon, free):
                # An arena, a pidfd, a pair of sockets and copies of two for the reply.
                failure = failure_of(lambda: control.open_session("witness").close())
                assert failure == ("" if free >= 6 else "NoSpace")
                failure = failure_of(lambda: control.load_fd(fd))
                # Where not even the model's descriptor can be received, the call is lost.
                assert failure in (("", "NoSpace") if free else ("ProtocolError",))

        with Control(daemon.socket) as control:
            control.open_session("witness").close()
    finally:
        os.close(fd)


def test_accepting_goes_on_after_descriptors_ran_out(daemon: DaemonProcess) -> None:
    with leaves_nothing(daemon), Control(daemon.socket) as old:
        old.call("GetInfo")
        with free_descriptors(daemon, 0):
            turned_away = [Control(daemon.socket) for _ in range(3)]
            # The first in the line is turned away, not left waiting.
            assert turned_away[0].at_end()
            assert old.call("GetInfo")["pid"] == daemon.pid

        for control in turned_away:
            control.close()

        with Control(daemon.socket) as new:
            assert new.call("GetInfo")["pid"] == daemon.pid
