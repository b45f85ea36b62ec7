"""One test process, from its start to its end, whatever way it ends.

Standard library only. The process is started with exec and watched by its pidfd; its end takes
its whole process group along (drivers start compilers). Everything it can do wrong becomes a
`Failure`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from switchgear.fingerprints.measurement import (
    Failure,
    Report,
    Subject,
    Value,
    own_failure,
    report_from_json,
    subject_from_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from switchgear.fingerprints.measure.options import Options

_LINE_BYTES: Final = 1 << 20
_STDERR_BYTES: Final = 4096
# How often the limits are looked at while the process says nothing.
_CHECK_S: Final = 0.5
# A process that never got a CPU is ended all the same after this many times its limit.
_STARVED_FACTOR: Final = 10
# After SIGKILL: at the lowest priority it may wait for a CPU to die on. Half of what a stop of
# the daemon may take by default.
_REAP_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """`total_s` bounds the process, `silence_s` the time between two of its lines.

    Time in which it was ready to run and waited for a CPU does not count: it runs when nobody
    else wants to.
    """

    total_s: float = 60.0
    silence_s: float = 10.0


@dataclass(slots=True)
class Outcome:
    """What a test process left: its reports, and its death where it did not end by itself.

    `begun` is the device that it was at, None before the first one and between two.
    """

    reports: list[Report] = field(default_factory=list)
    death: Failure | None = None
    begun: Subject | None = None
    ended: bool = False


class TestProcess:
    """Runs one test process. Use once: `outcome = await TestProcess(...).run()`."""

    __test__ = False  # not a test case, whatever pytest makes of the name

    def __init__(
        self,
        test: str,
        options: Options,
        limits: Limits,
        *,
        environment: Mapping[str, str] | None = None,
        progress: Callable[[Subject | None, float, str], None] | None = None,
        started: Callable[[TestProcess], None] | None = None,
    ) -> None:
        self._test = test
        self._options = options
        self._limits = limits
        self._environment = dict(os.environ if environment is None else environment)
        self._progress = progress
        self._on_started = started
        self._process: subprocess.Popen[bytes] | None = None
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self._disturbed = False
        self._outcome = Outcome()
        self._text = "the start, before any device"
        self._line = bytearray()
        self._stderr = bytearray()
        self._garbage = ""
        self._changed = asyncio.Event()
        self._gone = asyncio.Event()
        self._expect_s = 0.0
        self._heard = self._started = 0.0
        self._heard_waiting = 0.0

    async def run(self) -> Outcome:
        """Blocks until the process is gone and reaped; its own errors are in the outcome.

        Raises `OSError` when no process can be started. Cancelling kills the process.
        """
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as owned:
            process, events, stderr = self._spawn(owned)
            pidfd = os.pidfd_open(process.pid)
            owned.callback(os.close, pidfd)
            loop.add_reader(events, self._read_events, events)
            owned.callback(loop.remove_reader, events)
            loop.add_reader(stderr, self._read_stderr, stderr)
            owned.callback(loop.remove_reader, stderr)
            loop.add_reader(pidfd, self._exited, pidfd)
            owned.callback(loop.remove_reader, pidfd)
            reason: Failure | None = None
            self._process = process
            try:
                if self._on_started is not None:
                    self._on_started(self)

                reason = await self._watch(process)
            finally:
                self._process = None
                # Before it is reaped its number, and so its group's, cannot be another's.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._gone.wait(), _REAP_S)

                status = process.poll()

            self._read_events(events)
            self._read_stderr(stderr)

        if reason is None and self._garbage:
            reason = own_failure(self._test, "ProtocolError", self._garbage)

        self._outcome.death = reason or self._ending(status)
        return self._outcome

    def pause(self) -> None:
        """Stops the process where it is; nothing when it does not run. Does not block.

        The time counts against none of its limits. What is measured across it is noisy.
        """
        if self._process is not None and self._paused_at is None:
            self._paused_at = time.monotonic()
            self._disturbed = True
            self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Ends `pause`."""
        if self._paused_at is not None:
            self._paused_s += time.monotonic() - self._paused_at
            self._paused_at = None
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            # Not reaped yet: the group's number is still its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _unable_s(self, process: subprocess.Popen[bytes]) -> float:
        """Time in which it could not run: it waited for a CPU, or was paused."""
        paused_s = self._paused_s
        if self._paused_at is not None:
            paused_s += time.monotonic() - self._paused_at

        return waited_for_cpu_s(process.pid) + paused_s

    def _spawn(self, owned: contextlib.ExitStack) -> tuple[subprocess.Popen[bytes], int, int]:
        events, events_child = os.pipe()
        owned.callback(os.close, events)
        try:
            stderr, stderr_child = os.pipe()
            owned.callback(os.close, stderr)
            try:
                command = [
                    *(sys.executable, "-m", "switchgear.fingerprints.measure", self._test),
                    *("--fd", str(events_child), "--parent", str(os.getpid())),
                    *("--json-args", self._options.to_json()),
                ]
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=stderr_child,
                    stderr=stderr_child,
                    env=self._environment,
                    pass_fds=(events_child,),
                    process_group=0,
                )
            finally:
                os.close(stderr_child)
        finally:
            os.close(events_child)

        if self._options.yield_cpu:
            # The process does this itself, and says so; but its start is to disturb nobody too.
            with contextlib.suppress(OSError):
                os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))

        os.set_blocking(events, False)
        os.set_blocking(stderr, False)
        self._started = self._heard = time.monotonic()
        return process, events, stderr

    async def _watch(self, process: subprocess.Popen[bytes]) -> Failure | None:
        """Returns when the process is gone or has to be ended; the reason for that."""
        while not self._gone.is_set():
            waiting_s = self._unable_s(process)
            late = self._late(waiting_s)
            if late:
                used_s = cpu_time_s(process.pid)
                text = f"{late} at: {self._text}; it used {used_s:.1f} s of CPU"
                return own_failure(self._test, "TimedOut", self._with_stderr(text))

            if self._garbage:
                return own_failure(self._test, "ProtocolError", self._garbage)

            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _CHECK_S)

        return None

    def _late(self, waiting_s: float) -> str:
        """Which limit is over, empty while none is."""
        now = time.monotonic()
        if self._heard_waiting < 0:
            self._heard_waiting = waiting_s

        total_s = self._limits.total_s
        if now - self._started - waiting_s > total_s:
            return f"the test ran longer than {total_s:g} s"

        if now - self._started > total_s * _STARVED_FACTOR:
            return f"the test got no CPU for {waiting_s:.0f} s"

        silence_s = max(self._limits.silence_s, self._expect_s)
        if now - self._heard - (waiting_s - self._heard_waiting) > silence_s:
            return f"no sign of life for {silence_s:g} s"

        return ""

    def _exited(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        self._gone.set()
        self._changed.set()

    def _read_events(self, fd: int) -> None:
        while not self._garbage:
            data = _read(fd)
            if not data:
                break

            # Only what is new is searched: a driver can write a byte at a time.
            *lines, rest = data.split(b"\n")
            if lines:
                lines[0] = bytes(self._line) + lines[0]
                self._line.clear()

            self._line += rest
            for line in lines:
                self._take(line)

            if len(self._line) > _LINE_BYTES:
                self._garbage = f"the test wrote a line of more than {_LINE_BYTES} bytes"

        self._changed.set()

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            self._understand(message)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            shown = line[:80].decode(errors="replace")
            self._garbage = f"the test wrote what is no message: {shown!r} ({error})"

    def _understand(self, message: dict[str, Any]) -> None:
        self._heard = time.monotonic()
        self._heard_waiting = -1.0
        self._expect_s = 0.0
        outcome = self._outcome
        if "expect_s" in message:
            self._expect_s = float(message["expect_s"])
        elif "begin" in message:
            outcome.begun = subject_from_json(message["begin"])
            self._disturbed = self._paused_at is not None
            self._tell(0.0, f"{outcome.begun.name}: starting")
        elif "progress" in message:
            done, text = float(message["progress"]["done"]), str(message["progress"]["text"])
            self._tell(done, text)
        elif "report" in message:
            report = report_from_json(message["report"])
            outcome.reports.append(_noisy(report) if self._disturbed else report)
            outcome.begun = None
        elif "end" in message:
            outcome.ended = True
        else:
            raise ValueError("none of the known keys")

    def _tell(self, done: float, text: str) -> None:
        self._text = text
        if self._progress is not None:
            self._progress(self._outcome.begun, min(max(done, 0.0), 1.0), text)

    def _read_stderr(self, fd: int) -> None:
        while data := _read(fd):
            self._stderr += data
            del self._stderr[:-_STDERR_BYTES]

    def _ending(self, status: int | None) -> Failure | None:
        if status is None:
            text = f"the process does not end after SIGKILL (a driver holds it): {self._text}"
            return own_failure(self._test, "TimedOut", text)

        if status < 0:
            number = -status
            text = f"the test process was killed at: {self._text}"
            if number == signal.SIGKILL:
                text += "; most likely for memory"

            return Failure(
                self._test, "signal", number, _signal_name(number), self._with_stderr(text)
            )

        if status or not self._outcome.ended:
            text = f"the test process exited with status {status} at: {self._text}"
            return own_failure(self._test, "WorkerDied", self._with_stderr(text))

        return None

    def _with_stderr(self, text: str) -> str:
        lines = [
            line.strip()
            for line in self._stderr.decode(errors="replace").splitlines()
            if line.strip(" ~^")
        ]
        return "; ".join([text, *lines[-3:]])


def waited_for_cpu_s(pid: int) -> float:
    """The longest time that one of a process's threads waited for a CPU, 0 if unknown."""
    waits = [0]
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with (
                contextlib.suppress(OSError, ValueError, IndexError),
                open(f"/proc/{pid}/task/{task}/schedstat") as schedstat,
            ):
                waits.append(int(schedstat.read().split()[1]))

    return max(waits) / 1e9


def cpu_time_s(pid: int) -> float:
    """User and system time of a process so far, 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            # After the name, which may hold spaces and brackets of its own.
            words = stat.read().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def _noisy(report: Report) -> Report:
    """The report with all its numbers flagged: it was paused while they were taken."""
    values = tuple(
        replace(value, noisy=True) if isinstance(value, Value) else value
        for value in report.values
    )
    return replace(report, values=values)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def _read(fd: int) -> bytes:
    """What is there now; empty when nothing is, and at the end, which is not read again."""
    try:
        data = os.read(fd, 65536)
    except BlockingIOError:
        return b""

    if not data:
        # A descriptor at its end stays readable: left registered, it would spin the loop.
        asyncio.get_running_loop().remove_reader(fd)

    return data
