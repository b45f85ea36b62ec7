"""No test starts while a request runs or the device is hot, and a stop ends whatever runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from fingerprint_daemon import (
    await_end,
    measuring_daemon,
    measuring_processes,
    result_of,
    until_phase,
    watch,
)
from raw_client import Control, RawSession, error_name
from sysfs_tree import add_zone, set_temperature

from switchgear.backends import generate
from switchgear.fingerprints.measurement import CPU, NPU_UTILISATION

# What measures runs when nobody else wants the CPU.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]
# The quickest test: it looks for a delegate, finds none, and says so.
QUICKEST = [NPU_UTILISATION]
NEVER_HANGS = "hang_s = 600"
REQUEST = "waiting: a request is queued or runs"


@contextmanager
def request_in_flight(control: Control) -> Iterator[tuple[RawSession, int]]:
    """A session with one request in its worker, which is stopped, and the worker's pid."""
    control.load(generate.identity((4,)), name="same")
    with control.open_session("same") as session:
        session.write(0, [1.0, 2.0, 3.0, 4.0])
        session.infer(1)
        assert error_name(session.receive()) == ""
        (pid,) = (worker["pid"] for worker in control.call("GetStatus")["workers"])
        os.kill(pid, signal.SIGSTOP)
        try:
            session.infer(2, 0, 0)
            yield session, pid
        finally:
            os.kill(pid, signal.SIGCONT)


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_no_test_starts_while_a_request_is_in_flight() -> None:
    with (
        measuring_daemon(workers=NEVER_HANGS) as daemon,
        Control(daemon.socket) as control,
        Control(daemon.socket) as other,
    ):
        with request_in_flight(control) as (session, pid):
            job = control.call("RunFingerprint", tests=QUICKEST)["job"]
            said = watch(other, job)
            until_phase(said, REQUEST)
            assert not measuring_processes(daemon)
            assert control.call("GetStatus")["fingerprint"]["measuring"] is True
            os.kill(pid, signal.SIGCONT)
            reply = session.receive()
            assert (reply.request_id, error_name(reply)) == (2, "")
            assert session.read(reply.output_slot, 4) == [1.0, 2.0, 3.0, 4.0]

        # Now it passes by itself.
        assert list(result_of(said)["measured"]) == QUICKEST


def test_when_the_patience_is_over_it_starts_and_keeps_still_during_requests() -> None:
    with (
        measuring_daemon(workers=NEVER_HANGS, fingerprint="patience_s = 0") as daemon,
        Control(daemon.socket) as control,
        Control(daemon.socket) as other,
        request_in_flight(control) as (session, pid),
    ):
        said = watch(other, control.call("RunFingerprint", tests=QUICKEST)["job"])
        while not (running := measuring_processes(daemon)):
            pass

        (test,) = running
        while state_of(test) != "T":
            pass

        assert session.is_silent(), "the request is in flight still"
        assert state_of(test) == "T"
        os.kill(pid, signal.SIGCONT)
        assert error_name(session.receive()) == ""
        assert list(result_of(said)["measured"]) == QUICKEST


def test_a_hot_device_is_not_measured_before_it_is_cool(tmp_path: Path) -> None:
    zone = add_zone(tmp_path, 0, "cpu-thermal", 90_000)
    with (
        measuring_daemon(sysfs=tmp_path, fingerprint="patience_s = 0") as daemon,
        Control(daemon.socket) as control,
        Control(daemon.socket) as other,
    ):
        job = control.call("RunFingerprint", tests=QUICKEST)["job"]
        said = watch(other, job)
        until_phase(said, "waiting: the cpu is at 90.0 C, tests run below 58 C")
        assert not measuring_processes(daemon)
        set_temperature(zone, 58_000)
        until_phase(said, "waiting: the cpu is at 58.0 C")
        assert not measuring_processes(daemon)
        set_temperature(zone, 57_900)
        assert list(result_of(said)["measured"]) == QUICKEST


@pytest.mark.parametrize("operator", ["cpu = 120", 'cpu = 65, "gpu" = 120'])
def test_the_operators_threshold_counts(tmp_path: Path, operator: str) -> None:
    add_zone(tmp_path, 0, "cpu-thermal", 50_000)
    add_zone(tmp_path, 1, "gpu-thermal", 90_000 if "gpu" in operator else 50_000)
    lines = f"thresholds_c = {{ {operator} }}"
    with (
        measuring_daemon(sysfs=tmp_path, fingerprint=lines) as daemon,
        Control(daemon.socket) as control,
        Control(daemon.socket) as other,
    ):
        job = control.call("RunFingerprint", tests=QUICKEST)["job"]
        assert list(result_of(watch(other, job))["measured"]) == QUICKEST
        devices = control.call("GetFingerprint")["fingerprint"]["devices"]
        (cpu,) = (device for device in devices if device["device_id"] == "cpu")
        assert cpu["threshold"]["source"] == "operator"


@pytest.mark.parametrize("reading", [-273_000, 0, None, "nonsense"])
def test_without_a_reading_nothing_is_known_to_be_hot(tmp_path: Path, reading: object) -> None:
    add_zone(tmp_path, 0, "cpu-thermal", reading)
    with (
        measuring_daemon(sysfs=tmp_path) as daemon,
        Control(daemon.socket) as control,
        Control(daemon.socket) as other,
    ):
        job = control.call("RunFingerprint", tests=QUICKEST)["job"]
        assert list(result_of(watch(other, job))["measured"]) == QUICKEST


def hot_daemon(root: Path) -> DaemonProcess:
    """One in which every run waits."""
    add_zone(root, 0, "cpu-thermal", 90_000)
    return measuring_daemon(sysfs=root)


def test_a_run_that_is_asked_for_twice_is_one(tmp_path: Path) -> None:
    with hot_daemon(tmp_path) as daemon, Control(daemon.socket) as control:
        first = control.call("RunFingerprint")["job"]
        with Control(daemon.socket) as other:
            until_phase(watch(other, first), "waiting: the cpu")

        assert control.call("RunFingerprint")["job"] == first
        assert control.call("RunFingerprint", tests=[CPU], quick=True)["job"] == first
        # More than what runs: a run of its own, after it.
        forced = control.call("RunFingerprint", force=True)["job"]
        full = control.call("RunFingerprint", quick=False)["job"]
        assert len({first, forced, full}) == 3
        for job in (forced, full):
            with Control(daemon.socket) as other:
                until_phase(watch(other, job), "waiting for another run")

        control.call("CancelJob", job=first)
        with Control(daemon.socket) as other:
            assert list(watch(other, first))[-1]["state"] == "cancelled"

        with Control(daemon.socket) as other:
            until_phase(watch(other, forced), "waiting: the cpu")

        # Leaving stops the daemon with a run that waits for the device and one for that run.


def test_a_cancelled_run_leaves_no_process() -> None:
    with measuring_daemon() as daemon, Control(daemon.socket) as control:
        # All tests: it is not over before this process gets to the cancel.
        job = control.call("RunFingerprint")["job"]
        with Control(daemon.socket) as other:
            said = watch(other, job)
            until_phase(said, f"{CPU}: ")
            while not (running := measuring_processes(daemon)):
                pass

            (test,) = running
            pidfd = os.pidfd_open(test)
            try:
                # It does not end by itself.
                os.kill(test, signal.SIGSTOP)
                control.call("CancelJob", job=job)
                assert list(said)[-1]["state"] == "cancelled"
                # What runs only where nobody else wants to needs a while to die, too.
                await_end(pidfd)
            finally:
                os.close(pidfd)

            assert not measuring_processes(daemon)
            known = control.call("GetFingerprint")
            assert known["measuring"] is False
            assert "fingerprint" not in known
