"""What a daemon holds, compared over a test, and a client that has to be served all along."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Final

from raw_client import Control

from switchgear.backends import generate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

    from daemon_process import DaemonProcess

# Connections that a test has closed are noticed by the daemon a moment later.
_SETTLE_LIMIT_S: Final = 10.0
_SETTLE_STEP_S: Final = 0.02
_WITNESS_MODEL: Final = "witness"
_WITNESS_LIMIT_S: Final = 30.0


def descriptors(pid: int) -> set[int]:
    """Numbers of a process's open descriptors.

    Raises PermissionError where the process is hardened and the caller is not root.
    """
    return {int(name) for name in os.listdir(f"/proc/{pid}/fd")}


def descriptor_targets(pid: int) -> dict[int, str]:
    """What each open descriptor of a process leads to, for a failure's text."""
    found = {}
    with contextlib.suppress(OSError):
        for number in descriptors(pid):
            with contextlib.suppress(OSError):
                found[number] = os.readlink(f"/proc/{pid}/fd/{number}")

    return found


def rss_kib(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmRSS:"):
                return int(line.split()[1])

    raise AssertionError("a process without VmRSS")


@dataclass(frozen=True, slots=True)
class Holdings:
    """`descriptors` is -1 where they cannot be counted (see `descriptors`)."""

    descriptors: int
    children: int
    connections: int
    sessions: int

    @classmethod
    def of(cls, daemon: DaemonProcess) -> Holdings:
        # The last part of a start, with a process and a socket of its own.
        while not (status := daemon.call("GetStatus")["parameters"])["devices"]:
            assert daemon.running

        try:
            count = len(descriptors(daemon.pid))
        except PermissionError:
            count = -1

        return cls(
            count, len(daemon.children()), status["connections"], len(status["sessions"])
        )

    def exceeds(self, other: Holdings) -> bool:
        """Whether anything is more than in the other: what was short-lived then may be gone."""
        return any(
            mine > theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)
        )


def settles_to(daemon: DaemonProcess, before: Holdings) -> None:
    """Waits until the daemon holds no more than before; fails when it never does."""
    deadline = time.monotonic() + _SETTLE_LIMIT_S
    while (now := Holdings.of(daemon)).exceeds(before):
        assert time.monotonic() < deadline, (
            f"held before: {before}, now: {now}; {descriptor_targets(daemon.pid)}"
        )
        # The daemon tells nobody of its descriptors and processes.
        time.sleep(_SETTLE_STEP_S)


@contextmanager
def leaves_nothing(daemon: DaemonProcess) -> Iterator[None]:
    """The daemon holds no more descriptors, children, ... after the block than before it."""
    before = Holdings.of(daemon)
    yield
    settles_to(daemon, before)


@contextmanager
def free_descriptors(daemon: DaemonProcess, count: int) -> Iterator[None]:
    """Leaves the daemon room for `count` more descriptors.

    Raises PermissionError where they cannot be counted.
    """
    used = descriptors(daemon.pid)
    limit, free = 0, 0
    while free < count or limit <= max(used):
        # Holes below the highest are free numbers too.
        free += limit not in used
        limit += 1
        if free == count and limit > max(used):
            break

    while free > count:
        limit -= 1
        free -= limit not in used

    soft, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (soft, hard))


class Witness:
    """Another app: it runs frames in a thread of its own and checks every result.

    Leaving the block fails when one was wrong, or when it was not served at all meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stop = threading.Event()
        self._served = threading.Condition()
        self.frames = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Witness:
        with Control(self._path) as control:
            control.load(generate.identity((4,)), name=_WITNESS_MODEL)

        self._thread.start()
        self.is_served()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.is_served()
        finally:
            self._stop.set()
            self._thread.join()

        if self._error is not None and kind is None:
            raise self._error

    def is_served(self, frames: int = 3) -> None:
        """Waits until some more frames came back right."""
        with self._served:
            wanted = self.frames + frames
            reached = self._served.wait_for(
                lambda: self.frames >= wanted or self._error is not None, _WITNESS_LIMIT_S
            )

        if self._error is not None:
            raise self._error

        assert reached, "the other client is not served any more"

    def _work(self) -> None:
        try:
            with (
                Control(self._path) as control,
                control.open_session(_WITNESS_MODEL) as session,
            ):
                while not self._stop.is_set():
                    number = self.frames + 1
                    values = [float(number + i) for i in range(4)]
                    session.write(0, values)
                    session.infer(number)
                    reply = session.receive()
                    assert reply.request_id == number
                    assert reply.status_domain == 0, f"status {reply.status_code}"
                    assert session.read(reply.output_slot, 4) == values
                    with self._served:
                        self.frames = number
                        self._served.notify_all()
        except BaseException as error:  # told by whoever waits
            with self._served:
                self._error = error
                self._served.notify_all()
