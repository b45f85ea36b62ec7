"""A daemon that is killed while it measures or stores: the old or the new profile is there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
from typing import TYPE_CHECKING

import pytest
from fingerprint_daemon import (
    await_end,
    measuring_daemon,
    measuring_processes,
    profile_file,
    result_of,
    store_profile,
    stored,
    watch,
)
from raw_client import Control

from switchgear.fingerprints.measurement import CPU, NPU_UTILISATION
from switchgear.fingerprints.store import LOCK_NAME

if TYPE_CHECKING:
    from daemon_process import DaemonProcess

# What measures runs under SCHED_IDLE: on a busy machine it takes its time.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]
QUICKEST = [NPU_UTILISATION]


def kill_alone(daemon: DaemonProcess) -> None:
    """SIGKILL to the daemon and to none of its children; it is not reaped yet."""
    os.kill(daemon.pid, signal.SIGKILL)
    os.waitid(os.P_PID, daemon.pid, os.WEXITED | os.WNOWAIT)


def held_in_a_test(daemon: DaemonProcess) -> int:
    """Stops the test process that runs, so that it does not end by itself; its pidfd."""
    while True:
        for pid in measuring_processes(daemon):
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                try:
                    signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
                    # One that has ended meanwhile holds nothing up.
                    if not select.select([pidfd], [], [], 0)[0]:
                        return pidfd
                except ProcessLookupError:
                    pass

                os.close(pidfd)


def test_killed_in_the_middle_of_a_test() -> None:
    daemon = measuring_daemon()
    before = store_profile(daemon)
    with daemon:
        with Control(daemon.socket) as control:
            # Not the quick one: it lasts far longer than anybody stands still.
            control.call("RunFingerprint", tests=[CPU], force=True, quick=False)
            pidfd = held_in_a_test(daemon)

        try:
            kill_alone(daemon)
            # Held before it had asked to die with the daemon, it has to see for itself.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)

            await_end(pidfd)
        finally:
            os.close(pidfd)

        assert stored(daemon) == before
        daemon.kill()
        daemon.start()
        with Control(daemon.socket) as control, Control(daemon.socket) as other:
            known = control.call("GetFingerprint")
            assert (known["problems"], known["stale"]) == ([], {})
            # The lease of the dead one holds nobody up.
            job = control.call("RunFingerprint", tests=QUICKEST, force=True)["job"]
            assert result_of(watch(other, job))["saved"] is True


def test_killed_in_the_middle_of_a_write() -> None:
    daemon = measuring_daemon()
    before = store_profile(daemon)
    folder = profile_file(daemon).parent
    with daemon:
        lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # Whoever has the lock writes: the daemon waits until it is given away.
            fcntl.flock(lock, fcntl.LOCK_EX)
            with Control(daemon.socket) as control, Control(daemon.socket) as other:
                job = control.call("RunFingerprint", tests=QUICKEST, force=True)["job"]
                for state in watch(other, job):
                    if state["done"] == 1000:
                        break

                fcntl.flock(lock, fcntl.LOCK_UN)
                temporary = folder / f".fingerprint.json.{daemon.pid}.tmp"
                while not temporary.exists() and stored(daemon) == before:
                    pass

                kill_alone(daemon)
        finally:
            os.close(lock)

        there = stored(daemon)
        assert there is not None
        if there != before:
            assert there.measured_at > before.measured_at

        daemon.kill()
        daemon.start()
        with Control(daemon.socket) as control, Control(daemon.socket) as other:
            known = control.call("GetFingerprint")
            assert (known["problems"], known["stale"]) == ([], {})
            assert known["fingerprint"]["measured_at"] == there.measured_at
            # What the dead one left is cleared away by the next write.
            job = control.call("RunFingerprint", tests=QUICKEST, force=True)["job"]
            assert result_of(watch(other, job))["saved"] is True
            assert not list(folder.glob(".fingerprint.json.*"))
