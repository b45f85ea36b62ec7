"""The requests that wait in a lane: by priority and deadline, clients of one rank in turn."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import TYPE_CHECKING, Final

from switchgear.ipc.record import Priority

if TYPE_CHECKING:
    from switchgear.daemon.request import Request

# A heap of at most twice what waits, and this many.
SLACK: Final = 64
# Turns of clients that do not wait are forgotten beyond this many.
TURNS_KEPT: Final = 256
_LEAST: Final = int(Priority.BATCH)


class Waiting:
    """A heap. Its bound is the lane's: `len` counts what is still to be run.

    Among requests of one priority and deadline each client (a process) has its turn: one that
    sends sixteen at once waits behind the first of each other.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, int, Request]] = []
        self._count = 0
        self._sequence = 0
        self._round = 0
        self._turns: dict[int, int] = {}
        self._of_user: Counter[int] = Counter()
        # By user and priority.
        self._of_rank: Counter[tuple[int, int]] = Counter()

    def __len__(self) -> int:
        return self._count

    def of_user(self, uid: int) -> int:
        """How many requests of a user wait."""
        return self._of_user[uid]

    def push(self, request: Request) -> None:
        peer = request.session.peer
        turn = max(self._round, self._turns.get(peer.pid, 0))
        self._turns[peer.pid] = turn + 1
        if len(self._turns) > self._count + TURNS_KEPT:
            here = {item[-1].session.peer.pid for item in self._heap}
            self._turns = {pid: t for pid, t in self._turns.items() if pid in here}

        self._sequence += 1
        self._count += 1
        self._of_user[peer.uid] += 1
        self._of_rank[peer.uid, request.priority] += 1
        request.waiting = True
        order = (request.priority, request.deadline_ns, turn, self._sequence)
        heapq.heappush(self._heap, (*order, request))

    def withdraw(self, request: Request) -> None:
        """A waiting request is answered otherwise; it is dropped when its turn comes."""
        self._leave(request)
        # Dropped lazily; but a queue of withdrawn requests must not grow.
        if len(self._heap) > 2 * self._count + SLACK:
            self._heap = [item for item in self._heap if item[-1].waiting]
            heapq.heapify(self._heap)

    def least_urgent(self, priority: int, uid: int | None = None) -> Request | None:
        """The one to give up for a request of `priority`: among those of lower priority (of one
        user, where `uid` names it) the last in order. None where there is none."""
        if not any(rank > priority and uid in (None, user) for user, rank in self._of_rank):
            return None

        found = max(
            (
                item
                for item in self._heap
                if item[0] > priority
                and item[-1].waiting
                and uid in (None, item[-1].session.peer.uid)
            ),
            # The requests themselves have no order; each place is there once.
            key=lambda item: item[:4],
        )
        return found[-1]

    def pop(self, lowest: int = _LEAST) -> Request | None:
        """Takes the most urgent one out; None where nothing of priority `lowest` or a higher
        one waits."""
        heap = self._heap
        while heap:
            priority, _, turn, _, request = heap[0]
            if not request.waiting:
                heapq.heappop(heap)
            elif priority > lowest:
                return None
            else:
                heapq.heappop(heap)
                self._round = max(self._round, turn)
                self._leave(request)
                return request

        self._turns.clear()
        self._round = 0
        return None

    def take_all(self) -> list[Request]:
        """Takes all out, the most urgent first."""
        heap, self._heap = self._heap, []
        found = [item[-1] for item in sorted(heap) if item[-1].waiting]
        for request in found:
            self._leave(request)

        return found

    def _leave(self, request: Request) -> None:
        request.waiting = False
        self._count -= 1
        uid = request.session.peer.uid
        self._of_user[uid] -= 1
        if not self._of_user[uid]:
            del self._of_user[uid]

        rank = uid, request.priority
        self._of_rank[rank] -= 1
        if not self._of_rank[rank]:
            del self._of_rank[rank]
