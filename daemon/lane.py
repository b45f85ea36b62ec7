"""A lane: one backend's queue for one isolation group, and the worker that empties it.

Requests wait ordered by priority and deadline. The worker gets the next one before it has
finished the present one when runs are short, so that it never waits for the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Final

from switchgear.daemon.deaths import count_death
from switchgear.daemon.failure import Failure
from switchgear.daemon.hang_watch import HangWatch
from switchgear.daemon.lane_settings import LaneSettings, Watcher
from switchgear.daemon.load_watch import LoadWatch
from switchgear.daemon.recovery import recover, run_elsewhere
from switchgear.daemon.request import Request
from switchgear.daemon.restarts import Restarts
from switchgear.daemon.waiting import Waiting
from switchgear.daemon.worker_process import Events, WorkerProcess
from switchgear.ipc.errors import (
    DOMAINS,
    Busy,
    ModelQuarantined,
    NoBackend,
)
from switchgear.ipc.record import (
    ID,
    ID_OFFSET,
    RUN_NS,
    RUN_OFFSET,
    STATUS,
    STATUS_OFFSET,
    Priority,
)
from switchgear.ipc.record import Backend as BackendNumber

if TYPE_CHECKING:
    from switchgear.daemon.instances import Instance
    from switchgear.daemon.session import Session
    from switchgear.ipc.worker import Packet

# Up to this mean run time a second request is handed to the worker ahead: a more urgent one
# then waits at most this much longer.
AHEAD_LIMIT_NS: Final = 10_000_000
AHEAD_DEPTH: Final = 2
# What is less urgent than a request of so long ago is not handed ahead: the next urgent one
# would wait for two runs instead of one.
URGENT_NS: Final = 5_000_000_000
# How often a place that is to be left is looked at again while requests are there.
LOOK_AGAIN_S: Final = 0.5
# A worker that was asked to end and hangs is ended after this long.
END_LIMIT_S: Final = 5.0
# The weight of the newest run in the running mean.
MEAN_WEIGHT: Final = 0.125
_OURS: Final = DOMAINS["switchgear"]
_LEAST: Final = int(Priority.BATCH)

log = logging.getLogger(__name__)


class Lane:
    """Owns at most one worker, started at the first need."""

    def __init__(self, backend: str, name: str, group: str, settings: LaneSettings) -> None:
        self.backend = backend
        self.number = getattr(BackendNumber, backend.upper(), BackendNumber.OTHER)
        self.name = name
        self.group = group
        self.worker: WorkerProcess | None = None
        self.restarts = 0
        self.last_end = ""
        self.absent: Failure | None = None
        self.used_ns = monotonic_ns()
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._queue = Waiting()
        self._running: deque[Request] = deque()
        # Output slots that a device may still write to, until it has answered again.
        self._stained: list[tuple[Session, int]] = []
        self._head_since_ns = 0
        self._mean_run_ns = 1_000_000.0
        self._depth = AHEAD_DEPTH
        # The highest priority of late, and the arrival of the last one that had it.
        self._urgent = _LEAST
        self._urgent_ns = 0
        self._restarts = Restarts(self._restart_due)
        self._hang_watch = HangWatch(self, settings.hang_s)
        self._load_watch = LoadWatch(self)
        self.stopping = False
        # Those that may send requests here; the state of stateful ones lives in the worker.
        self.sessions: set[Session] = set()
        self.watcher: Watcher | None = None
        # Who dies of a model here: the group on the CPU, on a device the pair of both.
        self.blamed = group if backend == "cpu" else f"{group} {backend}"
        # Hears of each request as it arrives; for what has to keep still meanwhile.
        self.on_request: Callable[[], None] | None = None

    @property
    def label(self) -> str:
        return f"{self.backend}/{self.name} of {self.group}"

    @property
    def threads(self) -> int:
        """The engine's threads in the worker; 1 where the backend has no such choice."""
        return int(self._settings.options.get("threads", 1))

    @property
    def start_limit_s(self) -> float:
        """What a worker may take to start, to answer a probe or to load a model, in seconds."""
        return self._settings.start_s

    @property
    def head(self) -> tuple[Request, float] | None:
        """The request that runs, and for how many ms it does; None where none does."""
        if not self._running:
            return None

        return self._running[0], (monotonic_ns() - self._head_since_ns) / 1e6

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._queue

    def wait_ms(self, now_s: float) -> float:
        """The wait of a request that joins the queue now, at the present mean run time.

        A run that is over its time is expected to take as long again as it is late.
        """
        running = len(self._running)
        if not running:
            return 0.0

        mean_ms = self._mean_run_ns / 1e6
        left_ms = abs(mean_ms - (now_s * 1e3 - self._head_since_ns / 1e6))
        return left_ms + (running - 1 + len(self._queue)) * mean_ms

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return len(self._running)

    def would_wait(self, request: Request) -> bool:
        """Whether a request sent now would wait in the queue."""
        worker = self.worker
        urgent = (
            request.priority <= self._urgent or request.arrival_ns > self._urgent_ns + URGENT_NS
        )
        return (
            worker is None
            or worker.state != "ready"
            or len(self._queue) > 0
            or len(self._running) >= (self._depth if urgent else 1)
        )

    def idle_ns(self, now_ns: int) -> int:
        """Time since the last reply at monotonic `now_ns`; 0 while a request waits or runs."""
        if self._queue or self._running:
            return 0

        return now_ns - self._head_since_ns

    def retry_after_ms(self) -> int:
        """When the queue has moved on by half, at the present mean run time."""
        return max(1, int((len(self._queue) / 2 + 1) * self._mean_run_ns / 1e6))

    # The queue.

    def submit(self, request: Request) -> None:
        """Takes a request; it is answered sooner or later, or at once when there is no room."""
        if self.on_request is not None:
            self.on_request()

        request.lane = self
        priority = request.priority
        if priority <= self._urgent or request.arrival_ns > self._urgent_ns + URGENT_NS:
            self._urgent = priority
            self._urgent_ns = request.arrival_ns

        worker = self.worker
        if (
            worker is not None
            and worker.state == "ready"
            and not self._queue
            and len(self._running) < (self._depth if priority <= self._urgent else 1)
            and self.blamed not in request.session.model.quarantined
        ):
            self._dispatch(worker, request)
        else:
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        if self.blamed in request.session.model.quarantined:
            request.session.refuse(request, ModelQuarantined)
        elif self.stopping:
            request.session.refuse(request, NoBackend)
        elif self._restart_is_far():
            request.session.refuse(request, NoBackend, retry_after_ms=self._restart_wait_ms())
        elif not self._make_room(request):
            request.session.refuse(request, Busy, retry_after_ms=self.retry_after_ms())
        else:
            self._queue.push(request)
            self._pump()

    def _make_room(self, request: Request) -> bool:
        """Whether a request may wait. Where the queue is full, the last one of lower priority
        is refused in its place; where its user's share is full, the last of that user's."""
        queue, uid = self._queue, request.session.peer.uid
        share_is_full = queue.of_user(uid) >= self._settings.user_limit
        if not share_is_full and len(queue) < self._settings.queue_limit:
            return True

        other = queue.least_urgent(request.priority, uid if share_is_full else None)
        if other is None:
            return False

        queue.withdraw(other)
        other.session.refuse(other, Busy, retry_after_ms=self.retry_after_ms())
        return True

    def wait_again(self, request: Request) -> None:
        """Takes a request back that its worker took with it, whether there is room or not."""
        self._queue.push(request)

    def withdraw(self, request: Request) -> None:
        """A waiting request is answered otherwise."""
        self._queue.withdraw(request)

    def _pump(self) -> None:
        worker = self.worker
        if worker is None:
            if not self._restarts.pending and not self.stopping:
                # Where it cannot be spawned now, a later try is due.
                with contextlib.suppress(NoBackend):
                    self.start()

            return

        if worker.state != "ready":
            return

        running = self._running
        while len(running) < self._depth:
            request = self._queue.pop(self._urgent if running else _LEAST)
            if request is None:
                return

            if self.blamed in request.session.model.quarantined:
                request.session.refuse(request, ModelQuarantined)
            else:
                self._dispatch(worker, request)

    def _dispatch(self, worker: WorkerProcess, request: Request) -> None:
        now_ns = monotonic_ns()
        request.dispatch_ns = now_ns
        if not self._running:
            self._head_since_ns = now_ns
            if self._hang_watch.timer is None:
                self._hang_watch.begin()

        self._running.append(request)
        worker.run(request)

    # The worker.

    def start(self) -> WorkerProcess:
        """The lane's worker, spawned when there is none. Does not wait until it is ready.

        :raises NoBackend: it is due for a restart later, the system has no process or
            descriptor for it now, or the lane was stopped.
        """
        if self.stopping:
            raise NoBackend("the backend is being stopped")

        self.used_ns = monotonic_ns()
        if self.worker is None:
            if self._restarts.pending:
                # Whoever asks does not shorten the delay after a death.
                wait_ms = self._restart_wait_ms()
                raise NoBackend(f"the worker ended: {self.last_end}", retry_after_ms=wait_ms)

            events = Events(self._ready, self._replied, self._ended)
            try:
                worker = WorkerProcess(self.backend, self._settings.options, self.label, events)
            except OSError as error:
                log.error("worker %s cannot be started: %s", self.label, error)
                self.last_end = f"not started: {error.strerror}"
                self.restarts += 1
                self._restarts.not_started()
                wait_ms = self._restart_wait_ms()
                if self._restarts.far:
                    self._refuse_waiting()

                raise NoBackend(
                    f"no worker can be started: {error.strerror}", retry_after_ms=wait_ms
                ) from None

            self.worker = worker
            self._loop.call_later(self._settings.start_s, self._check_start, worker)

        return self.worker

    def bind(
        self, session: Session, precision: int = 0, expected_s: float = 0.0
    ) -> asyncio.Future[Packet | Failure]:
        """Has the worker, which is started where there is none, load what a session needs and
        map its arena. One that takes much longer than `expected_s` is ended.

        :raises NoBackend: as `start`.
        """
        load = self.start().bind(session, precision)
        if not load.done():
            self._load_watch.begin(expected_s)

        return load

    def _check_start(self, worker: WorkerProcess) -> None:
        if worker.state == "starting":
            worker.kill(f"it did not start within {self._settings.start_s:g} s")

    def _ready(self, worker: WorkerProcess) -> None:
        self.absent = None
        log.info("worker %s ready: pid %d, %s", self.label, worker.pid, worker.engine)
        self._pump()
        if self.watcher is not None:
            self.watcher.changed(self)

    def _replied(self, worker: WorkerProcess, reply: bytearray) -> None:
        running = self._running
        if not running or running[0].identity != ID.unpack_from(reply, ID_OFFSET)[0]:
            worker.kill("it answered what nobody asked")
            return

        request = running.popleft()
        if self._stained:
            for session, slot in self._stained:
                session.clean(slot)

            self._stained.clear()

        now_ns = monotonic_ns()
        self._head_since_ns = now_ns
        self._restarts.streak = 0
        model = request.session.model
        if model.deaths:
            model.deaths.pop(self.blamed, None)

        run_ns = RUN_NS.unpack_from(reply, RUN_OFFSET)[0]
        mean_ns = self._mean_run_ns + MEAN_WEIGHT * (run_ns - self._mean_run_ns)
        self._mean_run_ns = mean_ns
        self._depth = AHEAD_DEPTH if mean_ns < AHEAD_LIMIT_NS else 1
        if run_ns > model.slowest_run_ns:
            model.slowest_run_ns = run_ns

        # The worker first: it may be idle, the client is served within the same wake-up.
        if self._queue:
            self._pump()

        domain = reply[STATUS_OFFSET]
        if self.watcher is not None:
            if not domain:
                self.watcher.answered(self, request, run_ns, now_ns)
            elif domain > _OURS:
                code = STATUS.unpack_from(reply, STATUS_OFFSET)[3]
                self.watcher.failed(self, request, domain, code)
                if run_elsewhere(self, self.watcher, request):
                    return

        request.session.finish(request, reply, run_ns, now_ns)

    def _ended(self, worker: WorkerProcess) -> None:
        self.worker = None
        self.last_end = worker.end_reason
        self._hang_watch.end()
        lost = list(self._running)
        self._running.clear()
        if worker.absent is not None:
            self.absent = worker.absent
            log.error("backend %s is absent: %s", self.label, worker.absent)
        elif worker.end_reason != "asked to":
            log.warning("worker %s (%d) ended: %s", self.label, worker.pid, worker.end_reason)

        self._load_watch.end()
        for session in list(self.sessions):
            if session.model.state:
                session.lose_state()

        count_death(self, worker, lost)
        if self.watcher is not None:
            if lost and not worker.killed_by_signal_9_from_outside:
                self.watcher.died(self, lost[0], worker.end_reason)

            self.watcher.changed(self)

        if not self.stopping:
            self.restarts += 1
            wanted = bool(lost or self._queue)
            self._restarts.ended(wanted=wanted, absent=self.absent is not None)

        for index, request in enumerate(lost):
            recover(self, request, was_running=index == 0, abandoned=worker.abandoned)

        if self._restart_is_far() or self.absent is not None:
            self._refuse_waiting()
        elif self._queue:
            self._pump()
        elif not self._restarts.pending and self.worker is None:
            # What was lost is done elsewhere; the next frames want it here again.
            self._restart_due()

    def _restart_due(self) -> None:
        self.absent = None
        # A device's is started at the next need: a driver is not asked for ever, for nothing.
        if not self.stopping and (self.backend == "cpu" or self.sessions or self._queue):
            with contextlib.suppress(NoBackend):
                self.start()

    def try_again(self) -> None:
        """What kept the backend from being there is gone: its worker is started now."""
        if self.absent is not None:
            self._restarts.hasten()

    def renew(self) -> None:
        """Ends its worker once nothing runs or waits there; the next need starts another."""
        if self.worker is not None:
            self._end_when_idle(self.worker)

    def _end_when_idle(self, worker: WorkerProcess) -> None:
        if self.worker is not worker or self.stopping:
            return

        if self.is_idle:
            log.info("worker %s is replaced", self.label)
            worker.close()
            self._loop.call_later(END_LIMIT_S, worker.force)
        else:
            self._loop.call_later(LOOK_AGAIN_S, self._end_when_idle, worker)

    def restart_wait_s(self) -> float:
        """Seconds until its next worker is due; 0 where it has one or needs none."""
        return 0.0 if self.worker is not None else self._restarts.wait_s

    def _restart_is_far(self) -> bool:
        """Whether no request should wait for it."""
        return self.worker is None and self._restarts.far

    def _restart_wait_ms(self) -> int:
        return int(self.restart_wait_s() * 1000)

    def _refuse_waiting(self) -> None:
        wait_ms = self._restart_wait_ms()
        for request in self._queue.take_all():
            request.session.refuse(request, NoBackend, retry_after_ms=wait_ms)

    def stain(self, session: Session, slot: int) -> None:
        """The device may still write to an output slot, until it answers again."""
        self._stained.append((session, slot))

    def forget(self, session: Session) -> None:
        """A session ended: its arena leaves the worker after what runs there."""
        self.sessions.discard(session)
        if self._stained:
            self._stained = [stain for stain in self._stained if stain[0] is not session]

        if self.worker is not None:
            self.worker.unbind(session.identity)

    def unload(self, instance: Instance) -> None:
        if self.worker is not None:
            self.worker.unload(instance.identity)

    def stop(self) -> WorkerProcess | None:
        """Takes no more work and asks the worker to end; returns it."""
        self.stopping = True
        self._restarts.cancel()
        self._refuse_waiting()
        worker = self.worker
        if worker is not None:
            worker.close()

        return worker
