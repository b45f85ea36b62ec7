"""What `WatchTrace` streams, put together: the whole of a trace before it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from switchgear.ipc.errors import BY_CODE, DOMAIN_NAMES, DOMAINS, ProtocolError


@dataclass(frozen=True, slots=True)
class TracedSession:
    session: int
    pid: int
    uid: int
    model: str


@dataclass(frozen=True, slots=True)
class TracedLane:
    """A worker; `pid` 0: none was there when the request was answered."""

    number: int
    backend: str
    lane: str
    group: str
    pid: int

    @property
    def label(self) -> str:
        return f"{self.backend}/{self.lane}"


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """Times are CLOCK_MONOTONIC in nanoseconds; `dispatch_ns` is 0 where no worker had it, and
    `run_ns` where none finished it. `lane` -1: it was given to none."""

    session: int
    request: int
    lane: int
    arrival_ns: int
    dispatch_ns: int
    run_ns: int
    reply_ns: int
    domain: int
    code: int
    attempts: int
    priority: int
    reason: int

    @property
    def outcome(self) -> str:
        """`ok`, the error's name, or domain and code of a driver's."""
        if self.domain == DOMAINS["ok"]:
            return "ok"

        if self.domain == DOMAINS["switchgear"] and self.code in BY_CODE:
            return BY_CODE[self.code].__name__

        return f"{DOMAIN_NAMES.get(self.domain, str(self.domain))}:{self.code}"


@dataclass(frozen=True, slots=True)
class TracedEvent:
    time_ns: int
    track: str
    name: str
    details: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TracedCounter:
    time_ns: int
    track: str
    unit: str
    value: float


@dataclass(slots=True)
class Rows:
    """A trace as far as it has come. `dropped`: rows that the daemon had no room for."""

    sessions: dict[int, TracedSession] = field(default_factory=dict)
    lanes: dict[int, TracedLane] = field(default_factory=dict)
    requests: list[TracedRequest] = field(default_factory=list)
    events: list[TracedEvent] = field(default_factory=list)
    counters: list[TracedCounter] = field(default_factory=list)
    dropped: int = 0

    def add(self, answer: Mapping[str, Any]) -> None:
        """Takes one reply of `WatchTrace`.

        :raises ProtocolError: it is of another interface.
        """
        try:
            names = list(TracedRequest.__dataclass_fields__)
            places = [answer["columns"].index(name) for name in names]
            for row in answer["requests"]:
                self.requests.append(TracedRequest(*(int(row[place]) for place in places)))

            for fields in answer["sessions"]:
                session = TracedSession(**fields)
                self.sessions[session.session] = session

            for fields in answer["lanes"]:
                lane = TracedLane(**fields)
                self.lanes[lane.number] = lane

            self.events += [TracedEvent(**fields) for fields in answer["events"]]
            self.counters += [TracedCounter(**fields) for fields in answer["counters"]]
            self.dropped = int(answer["dropped"])
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise ProtocolError(f"the daemon's trace cannot be read: {error!r}") from None
