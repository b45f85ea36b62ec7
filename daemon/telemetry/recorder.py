"""Records what happens to requests, while somebody watches.

Without a watcher a request costs one test of a flag. With one, a row of integers is appended to
that watcher's own bounded ring; names are sent once, in tables that the rows point into. Times
are CLOCK_MONOTONIC in nanoseconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

from switchgear.ipc.errors import DOMAINS, ConnectionLost, QuotaExceeded
from switchgear.ipc.record import STATUS, STATUS_OFFSET

if TYPE_CHECKING:
    from switchgear.daemon.lane import Lane
    from switchgear.daemon.request import Request
    from switchgear.daemon.session import Session
    from switchgear.daemon.worker_process import WorkerProcess

# Rows that a watcher may be behind with: 2 s of 4000 requests a second.
RING_ROWS: Final = 8192
# All of them together are less than a message's values may be (ipc.varlink.MAX_VALUES).
ROWS_PER_ANSWER: Final = 512
OTHERS_PER_ANSWER: Final = 128
MAX_DETAILS: Final = 8
MAX_WATCHERS: Final = 4
# Names of sessions, lanes and models that one watcher is told.
MAX_NAMES: Final = 4096
# Of a request's row, in this order; `dispatch_ns` and `run_ns` are 0 where it never ran.
COLUMNS: Final = (
    "session", "request", "lane", "arrival_ns", "dispatch_ns", "run_ns", "reply_ns",
    "domain", "code", "attempts", "priority", "reason",
)  # fmt: skip
NO_LANE: Final = -1
MAX_TEXT: Final = 512
_CLIENT_GONE: Final = (DOMAINS["switchgear"], ConnectionLost.code)

_SIGN: Final = 1 << 63

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
        self._values: dict[str, float] = {}
        self._lanes: dict[tuple[str, str, str, int], int] = {}
        self._workers: dict[WorkerProcess, int] = {}
        self._sessions: set[int] = set()
        self._names: deque[tuple[str, dict[str, Any]]] = deque()
        self.wakeup = asyncio.Event()

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
                # The client chose it: what varlink's integers have no room for wraps around.
                (request.identity ^ _SIGN) - _SIGN,
                number,
                request.arrival_ns,
                dispatch_ns,
                # The worker's word.
                run_ns if run_ns < _SIGN else _SIGN - 1,
                reply_ns,
                domain,
                code,
                request.attempts,
                request.priority,
                request.reason,
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

    def add_event(self, track: str, name: str, details: Mapping[str, object]) -> None:
        """Something that happened at this moment."""
        if len(self._events) >= RING_ROWS:
            self.dropped += 1
            return

        event = {
            "time_ns": monotonic_ns(),
            "track": track,
            "name": name,
            "details": {
                key: str(value)[:MAX_TEXT]
                for key, value in islice(details.items(), MAX_DETAILS)
            },
        }
        self._events.append(event)

    def add_counter(self, track: str, unit: str, value: float) -> None:
        """A value at this moment; one that is as it was is not told again."""
        if self._values.get(track) == value:
            return

        if len(self._counters) >= RING_ROWS or (
            track not in self._values and len(self._values) >= MAX_NAMES
        ):
            self.dropped += 1
            return

        self._values[track] = value
        counter = {
            "time_ns": monotonic_ns(),
            "track": track,
            "unit": unit,
            "value": float(value),
        }
        self._counters.append(counter)

    @property
    def left(self) -> int:
        """How many rows, events and counters have not been taken."""
        return len(self._rows) + len(self._events) + len(self._counters)

    @property
    def waiting(self) -> bool:
        """Whether `take` has something to give."""
        return bool(self.left or self._names)

    def take(self) -> dict[str, Any]:
        """The next answer of `WatchTrace`: what has come since the last one, bounded."""
        answer: dict[str, Any] = {"columns": list(COLUMNS), "sessions": [], "lanes": []}
        for table, fields in _drain(self._names, OTHERS_PER_ANSWER):
            answer[table].append(fields)

        answer["requests"] = self.take_rows()
        answer["events"] = _drain(self._events, OTHERS_PER_ANSWER)
        answer["counters"] = _drain(self._counters, OTHERS_PER_ANSWER)
        answer["dropped"] = self.dropped
        self.wakeup.clear()
        return answer

    def take_rows(self) -> list[Row]:
        """The oldest rows, at most ROWS_PER_ANSWER."""
        return _drain(self._rows, ROWS_PER_ANSWER)


def _drain(rows: deque[Any], most: int) -> list[Any]:
    return [rows.popleft() for _ in range(min(len(rows), most))]


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
        """Ends its recording; what its ring holds can still be taken. Twice is harmless."""
        if watcher in self._watchers:
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
        self,
        track: str,
        name: str,
        sees: Callable[[int], bool] | None = None,
        **details: object,
    ) -> None:
        """Something that happened at this moment: a breaker's transition, a worker's end.

        `track` groups events of one kind. `sees` tells whether an ordinary user may know of it;
        without it everybody may.
        """
        for watcher in self._watchers:
            if sees is None or watcher.uid is None or sees(watcher.uid):
                watcher.add_event(track, name, details)
