"""Ends a worker that hangs in a run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from switchgear.daemon.lane import Lane

# A model's own slow runs raise the limit to this many times its slowest run.
HANG_FACTOR: Final = 20


class HangWatch:
    """Of one lane: `begin` with a run where no `timer` is set, `end` with the worker.

    The timer outlives the run that began it, so that short runs do not set one each.
    """

    def __init__(self, lane: Lane, limit_s: float) -> None:
        self.timer: asyncio.TimerHandle | None = None
        self._lane = lane
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()

    def begin(self) -> None:
        self.timer = self._loop.call_later(self._limit_s, self._check)

    def end(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _check(self) -> None:
        self.timer = None
        head, worker = self._lane.head, self._lane.worker
        if head is None or worker is None:
            return

        request, age_ms = head
        model = request.session.model
        limit_s = max(self._limit_s, HANG_FACTOR * model.slowest_run_ns / 1e9)
        left_s = limit_s - age_ms / 1e3
        if left_s <= 0:
            worker.kill(f"hung: model {model.label} ran for over {limit_s:g} s")
        else:
            self.timer = self._loop.call_later(left_s, self._check)
