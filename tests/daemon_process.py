"""A daemon of its own for a test: `python -m switchgear serve` in a folder that goes with it.

    with DaemonProcess(config="[cpu]\\nthreads = 1\\n") as daemon:
        connect(daemon.socket)

At the end it is stopped, and has to end by itself with status 0 and leave nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

READY_LIMIT_S: Final = 30.0
STOP_LIMIT_S: Final = 20.0
# Between two questions to a daemon that starts; its end wakes at once.
_POLL_MS: Final = 20
_CALL_LIMIT_S: Final = 15.0
# A child that was killed a moment ago is there until it gets a CPU to die on.
_CHILDREN_END_LIMIT_MS: Final = 5000
_LOG_LINES: Final = 30
# Variables of whoever runs the tests that would reach into the daemon.
_FOREIGN: Final = ("LISTEN_", "NOTIFY_", "WATCHDOG_", "ANDROID_SOCKET_", "SWITCHGEAR_")


class DaemonProcess:
    """A running daemon; use it with `with`, or call `start` and `stop`.

    `config` is the text of its configuration file. `environment` is added to what it inherits,
    less all `SWITCHGEAR_*`. `wait` is what `start` waits for: "ready", "listening" or "" for
    nothing. `folder` holds all that it writes: the socket, `state`, `stderr.log`. With
    `own_session` the kernel's autogroups, where they are on, give it a share of the CPU of its
    own: what it runs under SCHED_IDLE then yields to itself alone, not to the tests beside it.
    """

    def __init__(
        self,
        *,
        config: str = "",
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        wait: str = "ready",
        own_session: bool = False,
    ) -> None:
        # A short path: a socket's address has room for 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="sg-"))
        self.socket = self.folder / "run" / "switchgear.sock"
        self.state_dir = self.folder / "state"
        self.cache_dir = self.folder / "cache"
        self.config = self.folder / "switchgear.toml"
        self.log = self.folder / "stderr.log"
        self.config.write_text(config)
        self._arguments = list(arguments)
        self._added = dict(environment or {})
        self._wait = wait
        self._own_session = own_session
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the daemon was not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def environment(self) -> dict[str, str]:
        """What the daemon runs with; its folders are all in `folder`."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        xdg = ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
        private = {name: str(self.folder / name.lower()) for name in xdg}
        # The tests of the fingerprint and of other backends ask for them: elsewhere they would
        # take the CPUs.
        measuring = {
            "SWITCHGEAR_FINGERPRINT__ENABLED": "false",
            "SWITCHGEAR_PREPARE__ENABLED": "false",
        }
        return {**kept, **private, **measuring, **self._added}

    def start(self) -> DaemonProcess:
        """Starts it and waits; may be repeated after `stop` or `kill`, with the same state.

        Raises AssertionError with the end of its log when it ends instead.
        """
        assert not self.running, "the daemon runs already"
        command = [
            *(sys.executable, "-W", "error", "-m", "switchgear", "serve"),
            *("--socket", str(self.socket), "--config", str(self.config)),
            *("--state-dir", str(self.state_dir), "--cache-dir", str(self.cache_dir)),
            *self._arguments,
        ]
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=self.environment,
                cwd=self.folder,
                start_new_session=self._own_session,
            )

        try:
            self._await_ready()
        except BaseException:
            self.kill()
            raise

        return self

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """One varlink call on a connection of its own: the raw reply, error or not."""
        message = {"method": f"io.switchgear.{method}", "parameters": parameters}
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(_CALL_LIMIT_S)
            sock.connect(str(self.socket))
            sock.sendall(json.dumps(message).encode() + b"\0")
            data = b""
            while not data.endswith(b"\0"):
                part = sock.recv(65536)
                assert part, f"{method}: the daemon closed the connection"
                data += part

        reply: dict[str, Any] = json.loads(data[:-1])
        return reply

    def children(self) -> dict[int, str]:
        """The processes that this daemon started, by their command lines: pid and command."""
        mark = f"\0--parent\0{self.pid}\0"
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    line = (entry / "cmdline").read_text(errors="replace")
                    if mark in line:
                        found[int(entry.name)] = line.replace("\0", " ").strip()

        return found

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Stops it with a signal; the folder stays.

        Raises AssertionError when it does not end in time, ends with another status than 0, or
        leaves its socket or a process behind.
        """
        if self._process is None:
            return

        status = self._process.poll()
        if status is not None:
            self.kill()
            raise AssertionError(
                f"the daemon had ended already, with status {status}{self._end_of_log()}"
            )

        self._process.send_signal(number)
        try:
            status = self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"the daemon did not stop within {STOP_LIMIT_S:.0f} s{self._end_of_log()}"
            ) from None

        left = {pid: line for pid, line in self.children().items() if not _has_ended(pid)}
        self._end(left)
        assert status == 0, f"the daemon ended with status {status}{self._end_of_log()}"
        assert not left, f"the daemon left processes behind: {left}"
        assert not self.socket.exists(), "the daemon left its socket behind"
        # Its own; those of workers, some of which are killed in tests, stand behind a prefix.
        assert "\nTraceback" not in self.log_text(), self._end_of_log()

    def kill(self) -> None:
        """SIGKILL to it, and to its children where they do not notice."""
        if self._process is None:
            return

        self._process.kill()
        self._process.wait()
        self._end(self.children())

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> DaemonProcess:
        try:
            return self.start()
        except BaseException:
            self.remove()
            raise

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            if kind is not None:
                # The test's own failure is the one to report.
                self.kill()
            else:
                self.stop()
        finally:
            self.remove()

    def _end(self, children: Mapping[int, str]) -> None:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

        self._process = None

    def _await_ready(self) -> None:
        deadline = time.monotonic() + READY_LIMIT_S
        with self._wakes_on_end() as ended:
            while self._wait and not self._has_come():
                assert not ended.poll(_POLL_MS), f"the daemon ended{self._end_of_log()}"
                assert time.monotonic() < deadline, (
                    f"the daemon was not {self._wait} within {READY_LIMIT_S:.0f} s"
                    f"{self._end_of_log()}"
                )

    def _has_come(self) -> bool:
        try:
            info = self.call("GetInfo")["parameters"]
        except (FileNotFoundError, ConnectionRefusedError):
            return False

        return bool(info["ready"]) or self._wait == "listening"

    @contextlib.contextmanager
    def _wakes_on_end(self) -> Iterator[select.poll]:
        pidfd = os.pidfd_open(self.pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            yield poll
        finally:
            os.close(pidfd)

    def _end_of_log(self) -> str:
        lines = self.log_text().splitlines()[-_LOG_LINES:]
        return "".join(f"\n    {line}" for line in lines)


def _has_ended(pid: int) -> bool:
    """Waits a little for the end of a process that need not be a child of this one."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True

    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(_CHILDREN_END_LIMIT_MS))
    finally:
        os.close(pidfd)
