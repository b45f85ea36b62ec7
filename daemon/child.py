"""Child processes: started by exec, watched and killed through a pidfd."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Final

from switchgear.daemon.listen import HAND_OVER_VARIABLES

STDERR_KEPT_BYTES: Final = 8192
# After SIGKILL; what takes longer hangs inside the kernel and is left behind.
REAP_LIMIT_S: Final = 2.0
# What is meant for the daemon alone.
_PRIVATE_VARIABLES: Final = (
    *HAND_OVER_VARIABLES,
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
)


def environment() -> dict[str, str]:
    """The daemon's environment for a child, less what is meant for the daemon alone."""
    result = {
        name: value
        for name, value in os.environ.items()
        if name not in _PRIVATE_VARIABLES and not name.startswith("ANDROID_SOCKET_")
    }
    # numpy's own pool is never used here, but its threads would each take memory.
    result["OPENBLAS_NUM_THREADS"] = "1"
    return result


def describe_end(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"exit status {returncode}"

    try:
        return f"signal:{-returncode} {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal:{-returncode}"


class Child:
    """A process running `python -m MODULE ARGUMENTS`.

    `on_exit(returncode)` is called on the loop once it is reaped. The last of its stderr is
    kept. Its stdout is discarded, or collected up to `capture_limit_bytes`: whole, or by line
    where `on_stdout_line` takes them; then the limit is on one line."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        fds: Sequence[int],
        on_exit: Callable[[int], None],
        *,
        capture_limit_bytes: int = 0,
        on_stderr_line: Callable[[str], None] | None = None,
        on_stdout_line: Callable[[bytes], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self._on_stderr_line = on_stderr_line
        self._on_stdout_line = on_stdout_line
        self._stderr = bytearray()
        self._line = bytearray()
        self._stdout = bytearray()
        self._capture_limit = capture_limit_bytes
        self._reaped = asyncio.Event()
        # A session of its own: a terminal's signals are for the daemon.
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", module, "--parent", str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if capture_limit_bytes else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=fds,
            cwd="/",
            env=environment(),
            start_new_session=True,
        )
        self.pid = self._popen.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            # No descriptor is free: one that cannot be watched must not run.
            self._popen.kill()
            self._popen.wait()
            for pipe in (self._popen.stderr, self._popen.stdout):
                if pipe is not None:
                    pipe.close()

            raise

        self._pipes: dict[int, bytearray] = {}
        if self._popen.stderr is not None:
            self._watch(self._popen.stderr.fileno(), self._read_stderr)

        if self._popen.stdout is not None:
            self._watch(self._popen.stdout.fileno(), self._read_stdout)

        self._loop.add_reader(self._pidfd, self._reap)

    def _watch(self, fd: int, callback: Callable[[], bool]) -> None:
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, callback)

    def _read(self, fd: int) -> bytes:
        """What the pipe has, at most 64 KiB; unwatches it at end-of-file."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""

        if not data:
            self._loop.remove_reader(fd)

        return data

    def _read_stderr(self) -> bool:
        if self._popen.stderr is None or self._popen.stderr.closed:
            return False

        data = self._read(self._popen.stderr.fileno())
        self._stderr += data
        del self._stderr[:-STDERR_KEPT_BYTES]
        if self._on_stderr_line is not None:
            self._line += data
            *lines, self._line = self._line.split(b"\n")
            del self._line[:-STDERR_KEPT_BYTES]
            for line in lines:
                self._on_stderr_line(line.decode(errors="replace"))

        return bool(data)

    def _read_stdout(self) -> bool:
        if self._popen.stdout is None or self._popen.stdout.closed:
            return False

        data = self._read(self._popen.stdout.fileno())
        self._stdout += data
        if len(self._stdout) > self._capture_limit:
            del self._stdout[self._capture_limit :]
            self.kill()

        if self._on_stdout_line is not None:
            *lines, self._stdout = self._stdout.split(b"\n")
            for line in lines:
                self._on_stdout_line(bytes(line))

        return bool(data)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._kill_group()
        returncode = self._popen.wait()
        for pipe, read in (
            (self._popen.stderr, self._read_stderr),
            (self._popen.stdout, self._read_stdout),
        ):
            if pipe is not None:
                while read():
                    pass

                self._loop.remove_reader(pipe.fileno())
                pipe.close()

        os.close(self._pidfd)
        self._pidfd = -1
        self._reaped.set()
        self._on_exit(returncode)

    def _kill_group(self) -> None:
        """Ends what it started and left behind; until it is reaped, its group is no other's."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def stderr(self) -> str:
        """The end of what it wrote to stderr."""
        return self._stderr.decode(errors="replace").strip()

    @property
    def stdout(self) -> bytes:
        return bytes(self._stdout)

    @property
    def running(self) -> bool:
        return self._pidfd >= 0

    def kill(self) -> None:
        """SIGKILL; the exit arrives through `on_exit`. Harmless once it has ended."""
        self._signal(signal.SIGKILL)

    async def end(self) -> bool:
        """Kills it, if it runs, and waits until it is reaped and `on_exit` was called. False
        for one that SIGKILL does not end within `REAP_LIMIT_S`: it is left behind."""
        if self.running:
            self.kill()
            try:
                async with asyncio.timeout(REAP_LIMIT_S):
                    await self._reaped.wait()
            except TimeoutError:
                self.abandon()
                return False

        return True

    def pause(self) -> None:
        """Stops it until `go_on`. Harmless once it has ended."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._pidfd >= 0:
            # Reaped a moment ago, it is no process any more.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def abandon(self) -> None:
        """Waits no longer for a process that SIGKILL has not ended: it hangs in the kernel, or
        has had no processor since. Should it end after all, it leaves no zombie."""
        if self._pidfd < 0:
            return

        for pipe in (self._popen.stderr, self._popen.stdout):
            if pipe is not None:
                self._loop.remove_reader(pipe.fileno())
                pipe.close()

        pidfd, self._pidfd = self._pidfd, -1
        self._loop.add_reader(pidfd, self._bury, pidfd)
        # Its object must not complain that nobody waits for it.
        self._popen.returncode = -signal.SIGKILL

    def _bury(self, pidfd: int) -> None:
        """One that was abandoned has ended."""
        self._loop.remove_reader(pidfd)
        self._kill_group()
        os.waitpid(self.pid, os.WNOHANG)
        os.close(pidfd)
