"""Records what happens to requests, while somebody watches.

Without a watcher a request costs one test of a flag. With one, a row of integers is appended to
that watcher's own bounded ring; names are sent once, in tables that the rows point into. Times
are CLOCK_MONOTONIC in nanoseconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

from switchgear.ipc.errors import DOMAINS, ConnectionLost, QuotaExceeded
from switchgear.ipc.record import STATUS, STATUS_OFFSET

if TYPE_CHECKING:
    from switchgear.daemon.lane import Lane
    from switchgear.daemon.request import Request
    from switchgear.daemon.session import Session
    from switchgear.daemon.worker_process import WorkerProcess

# A watcher that reads every EVERY_S keeps up with 20000 requests a second.
RING_ROWS: Final = 8192
# An answer of this many rows is some 100 KiB, a tenth of what may wait unsent.
ROWS_PER_ANSWER: Final = 1024
MAX_WATCHERS: Final = 4
# Names of sessions, lanes and models that one watcher is told.
MAX_NAMES: Final = 4096
# Of a request's row, in this order; `dispatch_ns` and `run_ns` are 0 where it never ran.
COLUMNS: Final = (
    "session", "request", "lane", "arrival_ns", "dispatch_ns", "run_ns", "reply_ns",
    "domain", "code", "attempts", "priority",
)  # fmt: skip
NO_LANE: Final = -1
_CLIENT_GONE: Final = (DOMAINS["switchgear"], ConnectionLost.code)

Row = tuple[int, ...]


class Watcher:
    """One trace that runs: its rows, and the names that it has not sent yet.

    `uid` is whose rows it sees; None: everybody's. Its owner calls `take` and, at the end,
    `Recorder.unwatch`."""

    def __init__(self, uid: int | None) -> None:
        self.uid = uid
        self.dropped = 0
        self._rows: deque[Row] = deque()
        self._events: deque[dict[str, Any]] = deque()
        self._counters: deque[dict[str, Any]] = deque()
        self._lanes: dict[tuple[str, str, str, int], int] = {}
        self._workers: dict[WorkerProcess, int] = {}
        self._sessions: set[int] = set()
        self._names: list[tuple[str, dict[str, Any]]] = []
        self.wakeup = asyncio.Event()

    def sees(self, uid: int) -> bool:
        return self.uid is None or self.uid == uid

    def add(self, request: Request, run_ns: int, reply_ns: int, domain: int, code: int) -> None:
        """One request's row; see COLUMNS."""
        rows = self._rows
        session = request.session
        if len(rows) >= RING_ROWS or (
            session.identity not in self._sessions and not self._introduce(session)
        ):
            self.dropped += 1
            return

        lane = request.lane
        dispatch_ns = request.dispatch_ns
        number = NO_LANE
        if lane is not None and dispatch_ns:
            worker = lane.worker
            known = None if worker is None else self._workers.get(worker)
            number = self._number(lane) if known is None else known

        rows.append(
            (
                session.identity,
                request.identity,
                number,
                request.arrival_ns,
                dispatch_ns,
                run_ns,
                reply_ns,
                domain,
                code,
                request.attempts,
                request.priority,
            )
        )
        if len(rows) == ROWS_PER_ANSWER:
            self.wakeup.set()

    def _introduce(self, session: Session) -> bool:
        if len(self._sessions) >= MAX_NAMES:
            return False

        self._sessions.add(session.identity)
        peer = session.peer
        name = {
            "session": session.identity,
            "pid": peer.pid,
            "uid": peer.uid,
            "model": session.model.label,
        }
        self._names.append(("sessions", name))
        return True

    def _number(self, lane: Lane) -> int:
        worker = lane.worker
        key = (lane.backend, lane.name, lane.group, worker.pid if worker is not None else 0)
        number = self._lanes.get(key)
        if number is None:
            if len(self._lanes) >= MAX_NAMES:
                return NO_LANE

            number = self._lanes[key] = len(self._lanes)
            if worker is not None:
                self._workers[worker] = number

            backend, name, group, pid = key
            fields = {
                "number": number,
                "backend": backend,
                "lane": name,
                "group": group,
                "pid": pid,
            }
            self._names.append(("lanes", fields))

        return number

    def add_event(self, event: dict[str, Any]) -> None:
        if len(self._events) >= RING_ROWS:
            self.dropped += 1
        else:
            self._events.append(event)

    def add_counter(self, counter: dict[str, Any]) -> None:
        if len(self._counters) >= RING_ROWS:
            self.dropped += 1
        else:
            self._counters.append(counter)

    @property
    def waiting(self) -> bool:
        """Whether `take` has something to give."""
        return bool(self._rows or self._events or self._counters or self._names)

    def take(self) -> dict[str, Any]:
        """The next answer of `WatchTrace`: what has come since the last one, bounded."""
        answer: dict[str, Any] = {"sessions": [], "lanes": []}
        for table, fields in self._names:
            answer[table].append(fields)

        self._names.clear()
        answer["requests"] = self.take_rows()
        answer["events"] = _drain(self._events)
        answer["counters"] = _drain(self._counters)
        answer["dropped"] = self.dropped
        self.wakeup.clear()
        return answer

    def take_rows(self) -> list[Row]:
        """The oldest rows, at most ROWS_PER_ANSWER."""
        return _drain(self._rows)


def _drain(rows: deque[Any]) -> list[Any]:
    return [rows.popleft() for _ in range(min(len(rows), ROWS_PER_ANSWER))]


class Recorder:
    """`on` while somebody watches; tested before anything else is done."""

    def __init__(self) -> None:
        self.on = False
        self._watchers: list[Watcher] = []

    def watch(self, uid: int | None) -> Watcher:
        """Begins to record for a user, or for all (None).

        :raises QuotaExceeded: as many traces as may run do.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            raise QuotaExceeded(f"{MAX_WATCHERS} traces run already, the most that may")

        watcher = Watcher(uid)
        self._watchers.append(watcher)
        self.on = True
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        self._watchers.remove(watcher)
        self.on = bool(self._watchers)

    def finished(
        self, request: Request, reply: bytes | bytearray, run_ns: int, now_ns: int
    ) -> None:
        """A request was answered; an empty reply means that its client is gone."""
        domain, code = _CLIENT_GONE
        if reply:
            domain, _, _, code = STATUS.unpack_from(reply, STATUS_OFFSET)

        uid = request.session.peer.uid
        for watcher in self._watchers:
            if watcher.uid is None or watcher.uid == uid:
                watcher.add(request, run_ns, now_ns, domain, code)

    def event(
        self, track: str, name: str, uid: int | None = None, **details: str | int | float
    ) -> None:
        """Something that happened at this moment: a breaker's transition, a worker's end.

        `track` groups events of one kind. With a `uid` only that user's traces and those of
        operators have it.
        """
        event = {
            "time_ns": monotonic_ns(),
            "track": track,
            "name": name,
            "details": {key: str(value) for key, value in details.items()},
        }
        for watcher in self._watchers:
            if uid is None or watcher.sees(uid):
                watcher.add_event(event)

    def counter(self, track: str, unit: str, value: float, uid: int | None = None) -> None:
        """A value at this moment: a temperature, the length of a queue."""
        counter = {
            "time_ns": monotonic_ns(),
            "track": track,
            "unit": unit,
            "value": float(value),
        }
        for watcher in self._watchers:
            if uid is None or watcher.sees(uid):
                watcher.add_counter(counter)
