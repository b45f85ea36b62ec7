"""A daemon that is killed while it measures or stores: the old or the new profile is there."""

from __future__ import annotations

import fcntl
import os
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

pytestmark = pytest.mark.engine
QUICKEST = [NPU_UTILISATION]


def kill_alone(daemon: DaemonProcess) -> None:
    """SIGKILL to the daemon and to none of its children; it is not reaped yet."""
    os.kill(daemon.pid, signal.SIGKILL)
    os.waitid(os.P_PID, daemon.pid, os.WEXITED | os.WNOWAIT)


def test_killed_in_the_middle_of_a_test() -> None:
    daemon = measuring_daemon()
    before = store_profile(daemon)
    with daemon:
        with Control(daemon.socket) as control:
            control.call("RunFingerprint", tests=[CPU], force=True)
            while not (running := measuring_processes(daemon)):
                pass

        pidfds = [os.pidfd_open(pid) for pid in running]
        try:
            kill_alone(daemon)
            for pidfd in pidfds:
                await_end(pidfd)
        finally:
            for pidfd in pidfds:
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
