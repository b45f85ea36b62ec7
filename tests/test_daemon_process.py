"""The helper that other tests stand on: it notices what it promises to notice."""

from __future__ import annotations

import os
import signal

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
    for pid in children:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


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
