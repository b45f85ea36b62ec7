"""What `switchgear top` shows, worked out of one answer after the other; no terminal here."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from switchgear.daemon.cli.status import headline, serves
from switchgear.daemon.cli.tables import amount
from switchgear.daemon.cli.top_figures import Figures, Zone, quantile, read_figures, since
from switchgear.daemon.telemetry.families import Distribution, Family

if TYPE_CHECKING:
    from switchgear.client import Status

# A minute of answers, one a second.
POINTS: Final = 60
EVENTS: Final = 200


@dataclass(frozen=True, slots=True)
class BackendLine:
    """One backend. Times in seconds, rates in requests a second; None: nothing to tell.
    `reason` says why it is not ready, empty where it is."""

    name: str
    state: str
    reason: str
    zone: Zone | None
    queued: int
    running: int
    rate: float | None
    median_s: float | None
    p99_s: float | None
    restarts: int


@dataclass(frozen=True, slots=True)
class QueueLine:
    backend: str
    lane: str
    group: str
    pid: int
    state: str
    queued: int
    running: int
    rss_mb: float


@dataclass(frozen=True, slots=True)
class Picture:
    """All of one moment. `latency` has the medians of each backend that served something, the
    oldest first, None where nothing ran. `good`: the headline says that all is fine."""

    headline: str
    good: bool
    line: str
    backends: Sequence[BackendLine] = ()
    queues: Sequence[QueueLine] = ()
    zones: Sequence[Zone] = ()
    latency: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    events: Sequence[str] = ()


class History:
    """Takes answers in and gives a picture of each. `events` are sentences, the newest last."""

    def __init__(self) -> None:
        self.events: deque[str] = deque(maxlen=EVENTS)
        self._latency: dict[str, deque[float | None]] = {}
        self._before: tuple[float, Status, Figures] | None = None

    def gone(self, reason: str, clock: str) -> Picture:
        """The daemon does not answer; what is known of it is of no use when it is back."""
        if self._before is not None or not self.events:
            self._tell(clock, reason)

        self._before = None
        self._latency.clear()
        return Picture(f"NOT FINE: {reason}", False, "", events=tuple(self.events))

    def add(
        self, status: Status, families: Sequence[Family], now_s: float, clock: str
    ) -> Picture:
        """`now_s` is a monotonic time, `clock` the time of day for events."""
        figures = read_figures(families)
        before = self._before
        if before is not None and before[1]["pid"] != status["pid"]:
            self._tell(clock, f"the daemon is another: pid {status['pid']}")
            before = None

        if before is not None:
            for event in _changes(before[1], before[2], status, figures):
                self._tell(clock, event)
        elif not self.events:
            self._tell(clock, f"watching since now: {headline(status, figures)}")

        backends = self._backends(status, figures, before, now_s)
        self._before = (now_s, status, figures)
        return Picture(
            headline(status, figures),
            serves(status) and headline(status, figures).startswith("fine"),
            f"switchgear {status['version']}   pid {status['pid']}   "
            f"{status['rss_mb']:.0f} MB   {amount(len(status['sessions']), 'session')}   "
            f"{amount(len(status['models']), 'model')}",
            backends,
            [
                QueueLine(
                    worker["backend"],
                    worker["lane"],
                    worker["group"],
                    worker["pid"],
                    worker["state"],
                    worker["queued"],
                    worker["running"],
                    worker["rss_mb"],
                )
                for worker in status["workers"]
            ],
            figures.zones,
            {name: tuple(points) for name, points in self._latency.items()},
            tuple(self.events),
        )

    def _tell(self, clock: str, text: str) -> None:
        self.events.append(f"{clock}  {text}")

    def _backends(
        self,
        status: Status,
        figures: Figures,
        before: tuple[float, Status, Figures] | None,
        now_s: float,
    ) -> list[BackendLine]:
        lines = []
        for backend in status["backends"]:
            name = backend["name"]
            workers = [worker for worker in status["workers"] if worker["backend"] == name]
            served = figures.latency.get(name)
            recent: Distribution | None = None
            rate = None
            if before is not None:
                recent = served and since(served, before[2].latency.get(name))
                rate = (recent.count if recent else 0) / max(1e-3, now_s - before[0])

            median_s = quantile(recent, 0.5) if recent else None
            if served is not None or name in self._latency:
                points = self._latency.setdefault(name, deque(maxlen=POINTS))
                if before is not None:
                    points.append(median_s)

            lines.append(
                BackendLine(
                    name,
                    figures.breaker_of(name) or backend["state"],
                    "" if backend["state"] == "ready" else backend["reason"],
                    figures.zone_of(name),
                    sum(worker["queued"] for worker in workers),
                    sum(worker["running"] for worker in workers),
                    rate,
                    median_s,
                    quantile(recent, 0.99) if recent else None,
                    sum(worker["restarts"] for worker in workers),
                )
            )

        return lines


def _changes(before: Status, was: Figures, now: Status, figures: Figures) -> list[str]:
    """Sentences on what is not as it was in the answer before."""
    found = []
    if before["state"] != now["state"]:
        found.append(f"the daemon is {now['state']}")

    states = {backend["name"]: backend["state"] for backend in before["backends"]}
    found += [
        f"{backend['name']} is {backend['state']}: {backend['reason']}"
        for backend in now["backends"]
        if states.get(backend["name"]) != backend["state"]
    ]

    restarts = {_lane(worker): worker["restarts"] for worker in before["workers"]}
    for worker in now["workers"]:
        if worker["restarts"] > restarts.get(_lane(worker), 0):
            name = f"{worker['backend']} {worker['lane']}"
            found.append(f"the {name} worker ended: {worker['last_end']}")

    for (level, subject), state in figures.breakers.items():
        old = was.breakers.get((level, subject), "closed")
        if old != state:
            found.append(f"breaker of {level} {subject}: {old} -> {state}")

    found += [text for text in now["problems"] if text not in before["problems"]]
    models = {model["model"]: model["name"] for model in before["models"]}
    for model in now["models"]:
        if model["model"] not in models:
            found.append(f"model {model['name']} was loaded")

    left = {model["model"] for model in now["models"]}
    found += [f"model {name} is gone" for digest, name in models.items() if digest not in left]
    found += _refusals(was, figures)
    return found


def _refusals(was: Figures, now: Figures) -> list[str]:
    """Requests that failed between the two answers, by backend and error."""
    found = []
    for (backend, outcome), count in now.outcomes.items():
        more = count - was.outcomes.get((backend, outcome), 0)
        if outcome != "ok" and more > 0:
            where = "" if backend == "none" else f" on {backend}"
            found.append(f"{more} x {outcome}{where}")

    return found


def _lane(worker: Mapping[str, object]) -> tuple[object, object, object]:
    return worker["backend"], worker["lane"], worker["group"]
