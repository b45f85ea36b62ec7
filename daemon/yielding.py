"""Keeps what works in the background still while requests run.

SCHED_IDLE alone does not: a CPU that runs such a task counts as busy to the scheduler's
balancing, so that a second thread of a worker can wait for a tick (4 ms at 250 Hz) beside it. A
p99 was seen to grow threefold.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from switchgear.daemon.pool import Pool

# After the last reply the test goes on this much later: a client that sends the next request at
# once is not worth a stop and a start for each.
QUIET_S: Final = 0.005
# A client that never rests cannot hold a run up for longer than this in all.
PAUSED_LIMIT_S: Final = 120.0


class Pausable(Protocol):
    """A process in the background."""

    def pause(self) -> None:
        """Stops it; harmless once it has ended."""

    def go_on(self) -> None:
        """Lets it run again."""


class Yielding:
    """Pauses a process in the background during requests. For `with`, on a running loop."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._process: Pausable | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._paused_at = 0.0
        self._paused_s = 0.0

    def __enter__(self) -> Yielding:
        self._pool.watch_requests(self._request)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.unwatch_requests(self._request)
        self._go_on()
        self._process = None

    def started(self, process: Pausable) -> None:
        """A process that has just started; it takes the place of the one before."""
        self._go_on()
        self._process = process
        if self._pool.idle_s() <= 0:
            self._request()

    def _request(self) -> None:
        """Called for each request as it arrives."""
        if self._timer is None and self._process is not None:
            if self._paused_s >= PAUSED_LIMIT_S:
                return

            self._process.pause()
            self._paused_at = self._loop.time()
            self._timer = self._loop.call_later(QUIET_S, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        left_s = QUIET_S - self._pool.idle_s()
        if left_s <= 0 or self._paused_s + now - self._paused_at >= PAUSED_LIMIT_S:
            self._go_on()
        else:
            self._timer = self._loop.call_later(left_s, self._look)

    def _go_on(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._paused_s += self._loop.time() - self._paused_at
            if self._process is not None:
                self._process.go_on()
