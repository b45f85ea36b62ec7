"""Counts requests: the part of the metrics that is on every frame's way.

A result adds to three histograms: three searches in a table and a few integer additions, under
a microsecond. Everything else (names, sums, text) is done when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Final

from switchgear.daemon.telemetry.families import Distribution, Family
from switchgear.daemon.telemetry.recorder import Recorder
from switchgear.ipc.errors import BY_CODE, DOMAINS, InternalError
from switchgear.ipc.record import STATUS, STATUS_OFFSET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from switchgear.daemon.model import Model
    from switchgear.daemon.request import Request

# 1, 2 and 5 a decade from 0.1 ms, a null request's round trip, to 10 s, twice the hang limit.
BOUNDS_NS: Final = (
    *(step * 10**decade for decade in range(5, 10) for step in (1, 2, 5)),
    10**10,
)
BOUNDS_S: Final = tuple(bound / 1e9 for bound in BOUNDS_NS)
# What is counted apart: models, pairs of model and backend, and outcomes of each. What has no
# room counts under the model "other", so that hostile names cost a bound amount of memory.
MAX_MODELS: Final = 64
MAX_PAIRS: Final = 96
MAX_OUTCOMES: Final = 512
OTHER: Final = "other"
NO_BACKEND: Final = "none"
GONE: Final = "ClientGone"
_SWITCHGEAR: Final = DOMAINS["switchgear"]
HISTOGRAMS: Final = (
    (
        "switchgear_request_duration_seconds",
        "From a request's arrival to its reply, in the daemon.",
        "total",
    ),
    (
        "switchgear_request_queue_seconds",
        "From a request's arrival until its worker got it.",
        "queue",
    ),
    (
        "switchgear_request_run_seconds",
        "A worker's run of a request, as the worker measured it.",
        "run",
    ),
)


class Times:
    """One histogram: requests per bucket, and the sum of their times."""

    __slots__ = ("counts", "total_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_NS) + 1)
        self.total_ns = 0

    def merge(self, other: Times) -> None:
        for index, count in enumerate(other.counts):
            self.counts[index] += count

        self.total_ns += other.total_ns


class Served:
    """The times of one pair of model and backend."""

    __slots__ = ("queue", "run", "total")

    def __init__(self) -> None:
        self.queue = Times()
        self.run = Times()
        self.total = Times()

    def merge(self, other: Served) -> None:
        self.queue.merge(other.queue)
        self.run.merge(other.run)
        self.total.merge(other.total)


class ModelCounts:
    """One model's; `meters` counts the sessions that add to it."""

    __slots__ = ("meters", "name", "outcomes", "served")

    def __init__(self, name: str) -> None:
        self.name = name
        self.meters = 0
        self.served: dict[str, Served] = {}
        # By backend and error.
        self.outcomes: Counter[tuple[str, str]] = Counter()

    def merge(self, other: ModelCounts) -> None:
        for backend, served in other.served.items():
            self.served.setdefault(backend, Served()).merge(served)

        self.outcomes.update(other.outcomes)

    def copy(self) -> ModelCounts:
        twin = ModelCounts(self.name)
        twin.merge(self)
        return twin


class Meter:
    """A session's way to its model's counts, and to the recorder while a trace runs."""

    __slots__ = ("_counts", "_owner", "_recorder", "_served")

    def __init__(self, owner: RequestCounts, counts: ModelCounts, recorder: Recorder) -> None:
        self._owner = owner
        self._counts = counts
        self._served: dict[str, Served] = {}
        self._recorder = recorder
        counts.meters += 1

    def close(self) -> None:
        """The session is at its end."""
        self._counts.meters -= 1

    def finished(self, request: Request, reply: bytearray, run_ns: int, now_ns: int) -> None:
        """A worker's reply went out; `now_ns` is the time of that."""
        backend = request.lane.backend  # type: ignore[union-attr]
        if reply[STATUS_OFFSET] or reply[STATUS_OFFSET + 1]:
            self._owner.failed(self._counts, backend, _outcome(reply))
        else:
            served = self._served.get(backend)
            if served is None:
                served = self._served[backend] = self._owner.pair(self._counts, backend)

            arrival_ns = request.arrival_ns
            queue_ns = request.dispatch_ns - arrival_ns
            total_ns = now_ns - arrival_ns
            times = served.queue
            times.counts[bisect_left(BOUNDS_NS, queue_ns)] += 1
            times.total_ns += queue_ns
            times = served.run
            times.counts[bisect_left(BOUNDS_NS, run_ns)] += 1
            times.total_ns += run_ns
            times = served.total
            times.counts[bisect_left(BOUNDS_NS, total_ns)] += 1
            times.total_ns += total_ns

        if self._recorder.on:
            self._recorder.finished(request, reply, run_ns, now_ns)

    def refused(self, request: Request, reply: bytes | bytearray, now_ns: int) -> None:
        """The daemon answered itself, or (an empty reply) nobody is left to answer."""
        lane = request.lane
        outcome = _outcome(reply) if reply else GONE
        # One that a worker had counts for its backend.
        backend = lane.backend if lane is not None and request.dispatch_ns else NO_BACKEND
        self._owner.failed(self._counts, backend, outcome)
        if self._recorder.on:
            self._recorder.finished(request, reply, 0, now_ns)

    def rejected(self, code: int) -> None:
        """A record was answered with an error before it was a request."""
        name = BY_CODE.get(code, InternalError).__name__
        self._owner.failed(self._counts, NO_BACKEND, name)


def _outcome(reply: bytes | bytearray) -> str:
    """The error's name; those of engines and drivers are one, so that no worker makes up
    names."""
    domain, _, _, code = STATUS.unpack_from(reply, STATUS_OFFSET)
    if domain == _SWITCHGEAR:
        return BY_CODE.get(code, InternalError).__name__

    return "BackendFailed"


class RequestCounts:
    """All models' counts, bounded: see MAX_MODELS, MAX_PAIRS, MAX_OUTCOMES.

    A model that nobody has a session with makes room for a new one; its counts go on under
    `other`, and begin at 0 when it comes back.
    """

    def __init__(self) -> None:
        self._models: OrderedDict[str, ModelCounts] = OrderedDict()
        self._other = ModelCounts(OTHER)
        self.recorder = Recorder()

    def meter(self, model: Model) -> Meter:
        """For a session that opens; its `close` is called at the session's end."""
        key = model.digest
        counts = self._models.get(key)
        if counts is not None:
            self._models.move_to_end(key)
            counts.name = model.label
        elif len(self._models) < MAX_MODELS or self._evict():
            counts = self._models[key] = ModelCounts(model.label)
        else:
            counts = self._other

        return Meter(self, counts, self.recorder)

    def _evict(self) -> bool:
        for key, counts in self._models.items():
            if not counts.meters:
                self._other.merge(counts)
                del self._models[key]
                return True

        return False

    def pair(self, counts: ModelCounts, backend: str) -> Served:
        served = counts.served.get(backend)
        if served is None:
            if sum(len(model.served) for model in self._models.values()) >= MAX_PAIRS:
                counts = self._other

            served = counts.served.setdefault(backend, Served())

        return served

    def failed(self, counts: ModelCounts, backend: str, outcome: str) -> None:
        key = (backend, outcome)
        if key not in counts.outcomes and self._outcomes() >= MAX_OUTCOMES:
            counts = self._other

        counts.outcomes[key] += 1

    def _outcomes(self) -> int:
        return sum(len(model.outcomes) for model in self._models.values())

    # At a scrape.

    def families(self, name_of: Callable[[str], str | None] | None) -> Iterator[Family]:
        """`name_of` gives the name of a model (by its hash) for the viewer, None where it is
        none of the viewer's: that counts under `other`. Without it, all names are given."""
        rows: list[tuple[str, str, ModelCounts]] = []
        rest = self._other.copy()
        for digest, counts in self._models.items():
            name = counts.name if name_of is None else name_of(digest)
            if name is None:
                rest.merge(counts)
            else:
                rows.append((name, digest[:12], counts))

        if rest.served or rest.outcomes:
            rows.append((OTHER, "", rest))

        yield self._requests(rows)
        for metric, text, part in HISTOGRAMS:
            family = Family(metric, "histogram", text, ("model", "hash", "backend"))
            for name, digest, counts in rows:
                for backend, served in counts.served.items():
                    times: Times = getattr(served, part)
                    value = Distribution(BOUNDS_S, list(times.counts), times.total_ns / 1e9)
                    family.set(value, name, digest, backend)

            yield family

    @staticmethod
    def _requests(rows: list[tuple[str, str, ModelCounts]]) -> Family:
        family = Family(
            "switchgear_requests_total",
            "counter",
            "Requests that were answered; the outcome is ok or the error's name.",
            ("model", "hash", "backend", "outcome"),
        )
        for name, digest, counts in rows:
            for backend, served in counts.served.items():
                family.set(sum(served.total.counts), name, digest, backend, "ok")

            for (backend, outcome), count in counts.outcomes.items():
                family.set(count, name, digest, backend, outcome)

        return family
