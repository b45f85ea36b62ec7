"""The helper that other tests stand on: it notices what it promises to notice."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from daemon_process import DaemonProcess


def test_it_is_ready_and_leaves_nothing() -> None:
    with DaemonProcess() as daemon:
        info = daemon.call("GetInfo")["parameters"]
        assert info["ready"] is True
        assert info["pid"] == daemon.pid
        children = daemon.children()
        assert children, "the cpu's worker is a child"
        folder = daemon.folder

    assert not folder.exists()
    assert not any(runs(pid) for pid in children)


def runs(pid: int) -> bool:
    """Whether it has not ended; who waits for it then may be late."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False

    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_a_wrong_configuration_is_reported_with_the_log() -> None:
    with pytest.raises(AssertionError, match=r"unknown key cpu\.thread"):
        DaemonProcess(config="[cpu]\nthread = 1\n").__enter__()


def test_a_daemon_that_died_is_noticed() -> None:
    daemon = DaemonProcess().start()
    try:
        os.kill(daemon.pid, signal.SIGKILL)
        os.waitid(os.P_PID, daemon.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(AssertionError, match="had ended already, with status -9"):
            daemon.stop()
    finally:
        daemon.remove()
