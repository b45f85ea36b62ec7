"""The daemon's own socket: one daemon on it, and what lay there before."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from daemon_process import DaemonProcess


def run_second(daemon: DaemonProcess) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "switchgear", "serve", "--socket", str(daemon.socket)),
            *("--config", str(daemon.config), "--state-dir", str(daemon.state_dir)),
        ],
        env=daemon.environment,
        capture_output=True,
        text=True,
        timeout=15,
        check=False,
    )


def test_a_second_daemon_names_the_first() -> None:
    with DaemonProcess() as daemon:
        result = run_second(daemon)
        assert result.returncode == 1
        assert f"pid {daemon.pid}" in result.stderr
        assert "Traceback" not in result.stderr
        assert daemon.call("GetInfo")["parameters"]["pid"] == daemon.pid


def test_a_socket_that_nobody_serves_is_replaced() -> None:
    daemon = DaemonProcess()
    daemon.socket.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(daemon.socket))

    with daemon:
        assert daemon.call("GetInfo")["parameters"]["pid"] == daemon.pid


def test_a_daemon_that_was_killed_is_started_again() -> None:
    with DaemonProcess() as daemon:
        daemon.kill()
        assert daemon.socket.is_socket()
        daemon.start()
        assert daemon.call("GetInfo")["parameters"]["ready"] is True


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_left_alone(kind: str) -> None:
    daemon = DaemonProcess()
    try:
        daemon.socket.parent.mkdir(mode=0o700)
        if kind == "file":
            daemon.socket.write_text("mine")
        elif kind == "folder":
            daemon.socket.mkdir()
        else:
            daemon.socket.symlink_to("/dev/null")

        result = run_second(daemon)
        assert result.returncode == 2
        assert "exists and is no socket" in result.stderr
        assert "Traceback" not in result.stderr
        assert os.path.lexists(daemon.socket)
    finally:
        daemon.remove()
