"""Starts a daemon for the length of a `with` block. Standard library only."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_READY_LIMIT_S: Final = 20.0
_STOP_LIMIT_S: Final = 15.0
_POLL_S: Final = 0.02
_LOG_LINES: Final = 20


class DaemonError(Exception):
    """The daemon ended or did not listen in time; the text has the end of its log."""


@contextmanager
def running_daemon(folder: Path, *, report: Callable[[str], None]) -> Iterator[Path]:
    """Yields the socket of a new daemon that keeps everything it writes under `folder`.

    Blocks until it listens and, at the end, until it is gone: also when the block raises, on
    Ctrl-C, and on SIGTERM or SIGHUP (which raise SystemExit meanwhile). Call it in the main
    thread. Raises DaemonError.
    """
    # A socket's path may have 107 bytes only; a temporary folder's is short.
    path = folder / "switchgear.sock"
    log = folder / "daemon.log"
    command = [sys.executable, "-m", "switchgear", "serve", "--socket", str(path)]
    report(f"starting a daemon: python {' '.join(command[1:])}")

    with _signals_as_exit(), log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=_environment(folder),
        )

        try:
            _wait_until_it_listens(process, path, log)
            report(f"the daemon is ready (pid {process.pid})")
            yield path
        finally:
            _stop(process)
            report(f"the daemon has stopped (status {process.returncode})")


def _environment(folder: Path) -> dict[str, str]:
    """Folders and configuration of its own: the usual ones belong to the system's daemon."""
    private = {}

    for name in ("RUNTIME", "STATE", "CACHE"):
        place = folder / name.lower()
        place.mkdir(mode=0o700)
        private[f"SWITCHGEAR_{name}_DIR"] = str(place)

    configuration = folder / "switchgear.toml"
    configuration.write_text("")
    return {**os.environ, **private, "SWITCHGEAR_CONFIG": str(configuration)}


def _wait_until_it_listens(process: subprocess.Popen[bytes], path: Path, log: Path) -> None:
    deadline = time.monotonic() + _READY_LIMIT_S

    while not _listens(path):
        if process.poll() is not None:
            raise DaemonError(f"the daemon ended with status {process.returncode}{_end(log)}")

        if time.monotonic() > deadline:
            raise DaemonError(f"no daemon on {path} within {_READY_LIMIT_S:.0f} s{_end(log)}")

        time.sleep(_POLL_S)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False

    return True


def _end(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "".join(f"\n    {line}" for line in lines)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()

    try:
        process.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _signals_as_exit() -> Iterator[None]:
    """By default SIGTERM and SIGHUP end a process without running any `finally`."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {
        number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)
    }

    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
