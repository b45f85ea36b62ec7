"""Chooses where a request runs.

A session has targets: the CPU, and each pair of its model that is ready and that it allows. A
target is used once its worker has loaded the model and mapped the session's arena, so that no
request waits for a load; until then the CPU answers.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from switchgear.daemon.failure import Failure
from switchgear.daemon.pair import lowest_allows
from switchgear.daemon.takeover import Takeovers, not_taken_over, own_lane_of
from switchgear.ipc.errors import (
    BackendFailed,
    NoBackend,
    NotPrepared,
    SwitchgearError,
    UnknownBackend,
    UnsupportedModel,
    WorkerDied,
)
from switchgear.ipc.record import Reason

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Iterable

    from switchgear.daemon.lane import Lane
    from switchgear.daemon.model import Model
    from switchgear.daemon.pair import Pair
    from switchgear.daemon.pool import Pool
    from switchgear.daemon.request import Request
    from switchgear.daemon.session import Session
    from switchgear.daemon.switchboard.board import Switchboard

_PINNED: Final = int(Reason.PINNED)
_REQUESTED: Final = int(Reason.REQUESTED)
_ONLY_READY: Final = int(Reason.ONLY_READY)
_POLICY: Final = int(Reason.POLICY)
# The order of preference among what is ready.
ORDER: Final = ("npu", "vulkan", "opencl", "cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One place for a session's requests; `pair` is None on the CPU, `precision` then 0."""

    backend: str
    precision: int
    lane: Lane
    pair: Pair | None

    @property
    def expected_load_s(self) -> float:
        """What the load took when the pair was prepared."""
        figures = self.pair.figures if self.pair is not None else {}
        names = ("warm_load_us", "warm_first_run_us")
        return float(sum(figures.get(name, 0) for name in names)) / 1e6

    def is_banned(self, session: Session) -> bool:
        """Whether the model has ended too many of the workers there."""
        return self.lane.blamed in session.model.quarantined

    def is_warm(self, session: Session) -> bool:
        """Whether a frame would run at once. The CPU's may wait for its worker."""
        worker = self.lane.worker
        return self.pair is None or (
            worker is not None and worker.has_loaded(session.instance, self.precision)
        )


class Router:
    """`installed` are the backends whose workers can be started here."""

    def __init__(self, pool: Pool, installed: Collection[str]) -> None:
        self._pool = pool
        self.installed = frozenset(installed)
        # Named ones first, then what third parties bring, the CPU at last.
        others = sorted(self.installed - set(ORDER))
        self._order = tuple(
            name for name in (*ORDER[:-1], *others, "cpu") if name in self.installed
        )
        pool.watcher = self
        self._takeovers = Takeovers(pool)
        # Chooses by estimates and the protocol, once it is up.
        self.board: Switchboard | None = None
        # Hears when a worker cannot load a pair that was ready.
        self.on_load_failed: Callable[[Model, Pair, Failure], None] = lambda *_: None

    def check(self, wanted: tuple[str, ...], *, strict: bool) -> tuple[str, ...]:
        """The backends that a session may use, in order of preference: the wanted ones, and
        behind them the CPU unless the session is strict.

        :raises UnknownBackend: one of `wanted` is not installed and the session is strict.
        :raises NoBackend: none of `wanted` is there.
        """
        unknown = [name for name in wanted if name not in self.installed]
        if unknown and (strict or len(unknown) == len(wanted)):
            known = ", ".join(sorted(self.installed))
            raise UnknownBackend(f"no backend {unknown[0][:64]!r} here; there is {known}")

        if not self._order:
            raise NoBackend("no backend is installed")

        usable = tuple(name for name in wanted or self._order if name in self.installed)
        if strict or "cpu" in usable or "cpu" not in self.installed:
            return usable

        return (*usable, "cpu")

    # Targets.

    def check_ready(self, model: Model, backends: tuple[str, ...], lowest: str) -> None:
        """For a session that has no CPU to stand in.

        :raises SwitchgearError: no pair of `backends` is ready, with the reason.
        """
        if "cpu" in backends:
            return

        pairs = [pair for pair in model.pairs.values() if pair.backend in backends]
        ready = [pair for pair in pairs if pair.ready]
        if any(lowest_allows(lowest, pair) for pair in ready):
            return

        if ready:
            found = ", ".join(pair.label for pair in ready)
            raise NotPrepared(f"model {model.label} is prepared as {found}, not in {lowest}")

        raise _not_ready(model, backends, pairs)

    def targets(self, session: Session) -> tuple[Target, ...]:
        """Where a session's requests may go, in its order of preference."""
        options, model, uid = session.options, session.model, session.peer.uid
        found = []
        # What was asked for in two ways may be one in the end.
        known: set[tuple[str, int]] = set()
        for backend in options.backends:
            if backend == "cpu":
                lane = self._pool.lane(uid, "cpu", options.priority)
                found.append(Target("cpu", 0, lane, None))
            elif not model.state and not session.instance.shapes:
                # What is prepared is the model in its own shapes.
                for pair in model.pairs.values():
                    if (
                        pair.backend == backend
                        and pair.ready
                        and lowest_allows(options.precision, pair)
                        and (backend, pair.number) not in known
                    ):
                        known.add((backend, pair.number))
                        own = own_lane_of(model, pair) if pair.own_worker else ""
                        lane = self._pool.lane(uid, backend, options.priority, own)
                        found.append(Target(backend, pair.number, lane, pair))

        return tuple(found)

    def refresh(self, session: Session) -> list[asyncio.Future[Any]]:
        """Finds a session's targets anew, and loads and maps ahead of its frames where a worker
        is up or can be started; the futures are those of the loads. Does not block."""
        session.targets = self._takeovers.places(session, self.targets(session))
        session.routes.clear()
        if self.board is not None:
            session.seat = self.board.seat(session)

        loads: list[asyncio.Future[Any]] = []
        for target in (*session.targets, *self._takeovers.coming(session)):
            session.lanes.add(target.lane)
            target.lane.sessions.add(session)
            loads += self._bind(session, target)

        return loads

    def _bind(self, session: Session, target: Target) -> list[asyncio.Future[Any]]:
        """Has a target's worker load the model and map the arena; the load's future, if any."""
        if target.pair is not None and target.is_banned(session):
            return []

        # Without a worker now, the first frame asks again, and gets the answer.
        with contextlib.suppress(NoBackend):
            load = target.lane.bind(session, target.precision, target.expected_load_s)
            self._choose_anew_after(load, session, target)
            return [load]

        return []

    def pair_changed(self, model: Model, pair: Pair, sessions: Iterable[Session]) -> None:
        """A pair is ready, or is not any more: sessions may use it from now on, or must not."""
        if pair.ready and model.instance is not None:
            for lane in self._pool.lanes():
                if lane.backend == pair.backend:
                    # What was not there, or could not be loaded, may be there now.
                    lane.try_again()
                    if lane.worker is not None:
                        lane.worker.forget_failure(model.instance, pair.number)

            if pair.generation != pair.taken_over:
                pair.taken_over = pair.generation
                self._takeovers.renewed(model, pair)

        for session in sessions:
            if session.model is model and not session.ended:
                self.refresh(session)

    def _choose_anew_after(
        self, load: asyncio.Future[Any], session: Session, target: Target
    ) -> None:
        if load.done():
            return

        def loaded(future: asyncio.Future[Any]) -> None:
            session.routes.clear()
            pair = target.pair
            result = None if future.cancelled() else future.result()
            died = isinstance(result, Failure) and result.code == WorkerDied.code
            coming = target in self._takeovers.coming(session)
            if isinstance(result, Failure):
                if pair is not None and pair.ready and not died:
                    if coming:
                        not_taken_over(session.model, pair, result)
                    else:
                        self.on_load_failed(session.model, pair, result)
            elif coming and pair is not None and not session.ended:
                self._takeovers.say(target.lane, session.model, pair, result or {})
                self.refresh(session)

        load.add_done_callback(loaded)

    def changed(self, lane: Lane) -> None:
        """A lane's worker is ready, or has ended: what its sessions may use is another."""
        worker = lane.worker
        for session in list(lane.sessions):
            session.routes.clear()
            if worker is not None and worker.state == "ready" and not session.ended:
                for target in (*session.targets, *self._takeovers.coming(session)):
                    if target.lane is lane and target.pair is not None:
                        self._bind(session, target)

    # Requests.

    def route(self, session: Session, request: Request) -> Lane | None:
        """The lane for a request; sets its reason and precision. None where no backend may have
        it now. Does not block."""
        seat = session.seat
        if seat is not None and self.board is not None and seat.rows:
            row = self.board.choose(session, seat, request)
            if row is None:
                return self._cold(session, request)

            target = row.target
            request.precision = target.precision
            if request.priority != session.options.priority:
                # The CPU has lanes by priority.
                second = request.second
                if target.pair is None:
                    return self._pool.lane(session.peer.uid, "cpu", request.priority)

                if second is not None and second.place.is_cpu:
                    lane = self._pool.lane(session.peer.uid, "cpu", request.priority)
                    request.second = second._replace(lane=lane)

            return target.lane

        if not session.targets:
            # Strict, and what was ready at the open is not any more.
            return None

        known = session.routes.get(request.priority)
        if known is None:
            known = session.routes[request.priority] = self._choose(session, request.priority)

        lane, request.reason, request.precision = known
        return lane

    def _cold(self, session: Session, request: Request) -> Lane | None:
        """The lane of a strict session whose worker has ended or still loads: a restart that is
        near is waited for there, and what stands against it is said there."""
        assert self.board is not None
        for target in session.targets:
            if target.pair is None or target.is_warm(session):
                continue

            if target.is_banned(session):
                return target.lane

            if self.board.admits(session, target, request):
                request.precision = target.precision
                return target.lane

        return None

    def _choose(self, session: Session, priority: int) -> tuple[Lane, int, int]:
        """Lane, reason and precision; they hold until something changes."""
        targets = session.targets
        warm = [target for target in targets if target.is_warm(session)]
        # Where none is, the first one's lane starts its worker, or says why not.
        target = (warm or targets)[0]
        lane = target.lane
        if session.model.state:
            # Its state lives in one lane, whatever the priority of a single frame.
            return lane, _PINNED, 0

        if target.pair is None:
            lane = self._pool.lane(session.peer.uid, "cpu", priority)

        if len(session.options.backends) == 1 and len(self.installed) > 1:
            reason = _REQUESTED
        else:
            reason = _POLICY if len(warm) > 1 else _ONLY_READY

        return lane, reason, target.precision

    def elsewhere(self, request: Request, lane: Lane) -> Lane | None:
        """Another lane for a request whose backend failed; sets its precision."""
        session = request.session
        session.routes.clear()
        if session.model.state or session.ended:
            return None

        if session.seat is not None and self.board is not None:
            row = self.board.elsewhere(session, session.seat, request, lane)
            if row is None:
                return None

            request.precision = row.target.precision
            return row.target.lane

        for target in session.targets:
            tried = request.tried >> target.lane.number & 1
            if target.lane is not lane and not tried and target.is_warm(session):
                request.precision = target.precision
                return target.lane

        return None

    # What became of them.

    def answered(self, lane: Lane, request: Request, run_ns: int, now_ns: int) -> None:
        if self.board is not None:
            self.board.answered(lane, request, run_ns, now_ns)

    def failed(self, lane: Lane, request: Request, domain: int, code: int) -> None:
        if self.board is not None:
            self.board.failed(lane, request, domain, code)

    def died(self, lane: Lane, request: Request, reason: str) -> None:
        if self.board is not None:
            self.board.died(lane, request, reason)

    def ended(self, session: Session) -> None:
        """A session is over."""
        self._takeovers.forget(session)
        if self.board is not None:
            self.board.drop_session(session)

    def retry_after_ms(self, session: Session) -> int:
        """When a session that has no backend now may have one."""
        return self.board.retry_after_ms(session) if self.board is not None else 0


def _not_ready(model: Model, backends: tuple[str, ...], pairs: list[Pair]) -> SwitchgearError:
    """The error of a session whose backends cannot serve the model, or not yet."""
    where = ", ".join(backends)
    if model.state:
        return UnsupportedModel(f"model {model.label} keeps a state: it runs on the CPU only")

    if not pairs:
        return NotPrepared(f"model {model.label} is not prepared for {where}")

    pair = pairs[0]
    text = f"model {model.label} on {pair.label}: {pair.reason or pair.step or pair.state}"
    if pair.state in ("waiting", "preparing"):
        return NotPrepared(f"{text}; it is {pair.state}")

    if pair.state == "unsupported":
        return UnsupportedModel(text)

    return NoBackend(text) if pair.state == "absent" else BackendFailed(text)
