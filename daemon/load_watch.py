"""Ends a worker that hangs while it loads a model."""

from __future__ import annotations

import asyncio
from time import monotonic_ns
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from switchgear.daemon.lane import Lane

# A load may take this many times what it took when it was prepared, or the start limit.
LOAD_FACTOR: Final = 5
CHECK_S: Final = 0.5


class LoadWatch:
    """Of one lane: `begin` with each load, `end` with the worker."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._limit_s = lane.start_limit_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, expected_s: float) -> None:
        """A load that took `expected_s` before was asked for."""
        self._limit_s = max(self._limit_s, LOAD_FACTOR * expected_s)
        if self._timer is None:
            self._timer = self._loop.call_later(self._limit_s, self._check)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        worker = self._lane.worker
        if worker is None or worker.loading is None:
            return

        model, since_ns = worker.loading
        left_s = self._limit_s - (monotonic_ns() - since_ns) / 1e9
        if left_s <= 0 and not self._lane.running and worker.state == "ready":
            worker.kill(f"it did not load {model.label} in {self._limit_s:g} s")
        else:
            # A start and a run before it have their own limits.
            self._timer = self._loop.call_later(max(left_s, CHECK_S), self._check)
