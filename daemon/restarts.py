"""When the next worker of a lane is due after one has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

# Restarts: the first at once, then doubling from FIRST to LAST.
RESTART_FIRST_S: Final = 0.1
RESTART_LAST_S: Final = 30.0
# Keeps the power within a float, however long the streak is.
MAX_DOUBLINGS: Final = 16
# Requests wait for a restart that is at most this far away.
RESTART_PATIENCE_S: Final = 1.0


class Restarts:
    """Of one lane, on a running loop. Calls `due` when a restart is; does not block.

    `streak` counts the ends since a worker last answered; who hears an answer sets it to 0.
    """

    def __init__(self, due: Callable[[], None]) -> None:
        self.streak = 0
        self._due = due
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pending(self) -> bool:
        """Whether one is due later."""
        return self._timer is not None

    @property
    def wait_s(self) -> float:
        """Seconds until the next one is due; 0 where none is pending."""
        if self._timer is None:
            return 0.0

        return max(1e-3, self._timer.when() - self._loop.time())

    @property
    def far(self) -> bool:
        """Whether the next one is too far away to wait for."""
        return self.wait_s > RESTART_PATIENCE_S

    def ended(self, *, wanted: bool, absent: bool) -> None:
        """A worker ended. One without a streak before it may be followed at once: by its owner
        where that wants it (`wanted`), else at the loop's next turn. After `absent` (what it
        drives is not there) the delay is the longest."""
        delay_s = 0.0
        if self.streak:
            doublings = min(self.streak - 1, MAX_DOUBLINGS)
            delay_s = min(RESTART_LAST_S, RESTART_FIRST_S * 2**doublings)

        self.streak += 1
        if absent:
            delay_s = RESTART_LAST_S

        if delay_s or not wanted:
            self._timer = self._loop.call_later(delay_s, self._now)

    def not_started(self) -> None:
        """The system had nothing for a new process: the next try is not at once."""
        self.streak = max(1, self.streak)
        self.ended(wanted=False, absent=False)

    def hasten(self) -> None:
        """What the delay was for is over: a pending one is due now."""
        if self._timer is not None:
            self._timer.cancel()
            self._now()

    def cancel(self) -> None:
        """None is due any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _now(self) -> None:
        self._timer = None
        self._due()
