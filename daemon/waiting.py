"""The requests that wait in a lane: ordered by priority, deadline and arrival."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from switchgear.daemon.request import Request

# A heap of at most twice what waits, and this many.
SLACK = 64


class Waiting:
    """A heap. Its bound is the lane's: `len` counts what is still to be run."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, int, Request]] = []
        self._count = 0
        self._sequence = 0

    def __len__(self) -> int:
        return self._count

    def push(self, request: Request) -> None:
        self._sequence += 1
        self._count += 1
        request.waiting = True
        order = (request.priority, request.deadline_ns, request.arrival_ns)
        heapq.heappush(self._heap, (*order, self._sequence, request))

    def withdraw(self, request: Request) -> None:
        """A waiting request is answered otherwise; it is dropped when its turn comes."""
        request.waiting = False
        self._count -= 1
        # Dropped lazily; but a queue of withdrawn requests must not grow.
        if len(self._heap) > 2 * self._count + SLACK:
            self._heap = [item for item in self._heap if item[-1].waiting]
            heapq.heapify(self._heap)

    def pop(self) -> Request | None:
        """Takes the most urgent one out; None where nothing waits."""
        while self._heap:
            request = heapq.heappop(self._heap)[-1]
            if request.waiting:
                request.waiting = False
                self._count -= 1
                return request

        return None

    def take_all(self) -> list[Request]:
        """Takes all out, the most urgent first."""
        heap, self._heap, self._count = self._heap, [], 0
        found = [item[-1] for item in sorted(heap) if item[-1].waiting]
        for request in found:
            request.waiting = False

        return found
