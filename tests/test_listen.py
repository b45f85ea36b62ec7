"""The daemon's own socket: one daemon on it, and what lay there before."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from daemon_process import DaemonProcess

from switchgear.daemon import listen
from switchgear.ipc.errors import BadConfiguration


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


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(BadConfiguration, match="written to by others"):
        listen.own(tmp_path / "s")


def test_a_sticky_folder_is_taken(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    listen.own(tmp_path / "s").close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadConfiguration, match="file"):
        listen.own(tmp_path / "file" / "s")


def test_the_socket_is_for_the_user_and_the_group(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        listener = listen.own(tmp_path / "s")
    finally:
        os.umask(before)

    with closing(listener):
        assert stat.S_IMODE(os.lstat(listener.path).st_mode) == 0o660


def test_a_lock_that_is_held_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "LOCK_LIMIT_S", 0.05)
    holder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(BadConfiguration, match="holds the lock"):
            listen.own(tmp_path / "s")
    finally:
        os.close(holder)
