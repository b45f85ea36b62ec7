"""The daemon's life: start, ready, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import switchgear
from switchgear.backends import driver_caches, registry
from switchgear.daemon import reload, status, warming
from switchgear.daemon.config import Configuration
from switchgear.daemon.events import Events
from switchgear.daemon.instances import Instances
from switchgear.daemon.interface import Interface
from switchgear.daemon.jobs import Job, Jobs
from switchgear.daemon.listen import Listener
from switchgear.daemon.model_store import ModelStore
from switchgear.daemon.models import Model, Models
from switchgear.daemon.notify import Announcer, Condition, Notifier
from switchgear.daemon.pool import Pool
from switchgear.daemon.preparing import Preparing
from switchgear.daemon.resident import Residents
from switchgear.daemon.router import Router
from switchgear.daemon.session_events import SessionEvents
from switchgear.daemon.sessions import Sessions
from switchgear.daemon.takeover import own_prefix
from switchgear.daemon.telemetry.metrics import Metrics
from switchgear.daemon.validation import Validation
from switchgear.daemon.varlink_server import Peer, Server
from switchgear.ipc.errors import (
    BadConfiguration,
    DriverError,
    NoBackend,
    ShuttingDown,
    UnknownModel,
)
from switchgear.ipc.process import raise_descriptor_limit, set_not_dumpable
from switchgear.ipc.record import Priority

if TYPE_CHECKING:
    from switchgear.daemon.fingerprinting import Fingerprinting
    from switchgear.daemon.pair import Pair
    from switchgear.daemon.switchboard.operation import Operation

FINGERPRINTING: Final = "switchgear.daemon.fingerprinting"
SWITCHBOARD: Final = "switchgear.daemon.switchboard.operation"
# Of the stop's limit, the share in which running requests may end.
DRAIN_SHARE: Final = 0.5
DRAIN_CHECK_S: Final = 0.01

log = logging.getLogger(__name__)


class Service:
    """One daemon on one listening socket. Create it on the running loop."""

    def __init__(
        self,
        configuration: Configuration,
        listener: Listener,
        state_dir: Path,
        cache_dir: Path,
        read_again: Callable[[], Configuration] | None = None,
    ) -> None:
        """`read_again` is what a reload reads; it raises `BadConfiguration`."""
        self._read_again = read_again
        self._configuration = configuration
        self._listener = listener
        self._started = monotonic()
        self.version = switchgear.__version__
        self.state = "starting"
        self.probed: dict[str, str] = {}
        self._machine_problems: list[str] = []
        try:
            driver_caches.make_folders(cache_dir)
            os.environ.update(driver_caches.environment(cache_dir))
        except DriverError as error:
            # Drivers then keep their caches where they like, or none.
            self._machine_problems.append(f"caches of drivers: {error.text}")

        self._reload_problems: list[str] = []
        self._reloaded = ""
        if missing := set(configuration.cpu.affinity) - os.sched_getaffinity(0):
            absent = min(missing)
            self._machine_problems.append(f"cpu.affinity: there is no processor {absent} here")

        limits = configuration.limits
        self.jobs = Jobs(limits.jobs_per_user)
        self.pool = Pool(configuration)
        installed = registry.installed()
        self.router = Router(self.pool, installed)
        instances = Instances(limits.instances_per_model, limits.instances_mib << 20)
        store = ModelStore(state_dir / "models", limits.store_mib << 20, limits.model_mib << 20)
        validation = Validation(
            configuration.validation, state_dir, configuration.cpu.interactive_threads()
        )
        self.preparing = Preparing(
            configuration,
            state_dir,
            self.pool,
            cache_dir,
            list(installed),
            lambda: self.models.all_for(0),
            self._pair_has_changed,
        )
        self.preparing.on_present = self._backend_has_come
        self.router.on_load_failed = self.preparing.load_failed
        self.models = Models(
            configuration,
            store,
            validation,
            instances,
            self.pool,
            cache_dir / "models",
            self._model_is_loaded,
            self._model_is_gone,
        )
        self.sessions = Sessions(limits, self.models, self.pool, self.router)
        self.metrics = Metrics(self)
        self.sessions.meter = self.metrics.requests.meter
        self.residents = Residents(self.models, self.jobs)
        self._proof_failed = False
        self.operation: Operation | None = None
        self.events = Events()
        self.session_events = SessionEvents(self.router)
        self.events.listeners += [self.metrics.switchboard.heard, self.session_events.heard]
        self._announcer = Announcer(Notifier.from_environment(os.environ), self.condition)
        self._reloads = asyncio.Lock()
        self._state_dir = state_dir
        self._fingerprinting: asyncio.Future[Fingerprinting] = (
            asyncio.get_running_loop().create_future()
        )
        self._force = asyncio.Event()
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.server = Server(
            listener.socket, Interface(self).dispatch, limits.connections_per_user
        )

    @property
    def stopping(self) -> bool:
        return self.state == "stopping"

    @property
    def ready(self) -> bool:
        return self.state == "serving"

    @property
    def problems(self) -> list[str]:
        """What the configuration asks for and is not there, in sentences."""
        return [
            *self._machine_problems,
            *self.residents.problems,
            *self._reload_problems,
            *self.metrics.problems,
        ]

    def condition(self) -> Condition:
        """What systemd is told."""
        if self.state == "starting" and self._proof_failed:
            return Condition("failed", "the cpu backend does not run; see the log")

        if self.state == "starting":
            done, total = self.residents.done, self.residents.total
            return Condition(self.state, f"starting: {done} of {total} models are loaded")

        if self.stopping:
            return Condition(self.state, f"stopping: {self.sessions.in_flight} requests run")

        problems = self.problems
        return Condition(
            self.state,
            (f"serves, but: {problems[0]}" if problems else "serving")
            + f"; {len(self.models.all_for(0))} models, {len(self.sessions.all())} sessions"
            + self._reloaded,
        )

    def info(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "pid": os.getpid(),
            "ready": self.ready,
            "state": self.state,
            "uptime_s": round(monotonic() - self._started, 3),
        }

    def is_operator(self, uid: int) -> bool:
        """Who sees what belongs to other users: root and the daemon's own user."""
        return uid in (0, os.geteuid())

    def status(self, peer: Peer) -> dict[str, Any]:
        return status.collect(self, peer)

    def counters(self) -> dict[str, int]:
        return {
            "sessions_opened": self.sessions.opened,
            "requests_answered": self.sessions.answered
            + sum(session.answered for session in self.sessions.all()),
            "worker_restarts": sum(lane.restarts for lane in self.pool.lanes()),
        }

    def load_model(self, fd: int, name: str | None, uid: int) -> Job:
        """Starts loading a model; takes over `fd`.

        :raises SwitchgearError: what can be said at once.
        """
        try:
            size = self.models.check_load(fd, name, uid)

            async def work(job: Job) -> dict[str, object]:
                model = await self.models.load(job, fd, size, name, uid)
                return model.to_json(uid)

            return self.jobs.start("load", name or "model", uid, work)
        except BaseException:
            os.close(fd)
            raise

    def prepare_model(
        self,
        model: Model,
        uid: int,
        backends: tuple[str, ...],
        precision: str,
        *,
        tune_s: int,
        again: bool,
    ) -> Job:
        """Prepares a model on these backends (default: all), before what else is queued.

        :raises UnknownBackend: one of them is not installed.
        :raises NoBackend: the configuration wants none but the CPU.
        :raises QuotaExceeded: the user has too many running jobs.
        """
        self.router.check(backends, strict=True)
        if not self.preparing.enabled:
            raise NoBackend("nothing but the CPU serves: prepare.enabled is false")

        async def work(job: Job) -> dict[str, object]:
            await self.preparing.follow_all(
                job, model, backends, precision, tune_s=tune_s, again=again
            )
            return model.to_json(uid)

        return self.jobs.start("prepare", model.label, uid, work)

    def unload_model(self, model: Model, uid: int, *, force: bool) -> None:
        """:raises ModelInUse: the configuration keeps it, or the user's sessions use it and
        `force` is not set."""
        operator = force and self.is_operator(uid)
        self.models.check_unload(model, resident_too=operator)
        if force:
            # Others keep a model that they loaded themselves.
            everybody = uid == 0 or model.resident
            self.sessions.end_all_of(model, None if everybody else uid, UnknownModel)

        self.models.unload(model, uid, resident_too=operator)

    # Life.

    async def run(self) -> None:
        """Serves until `request_stop`, then stops within the configured limit."""
        start = asyncio.get_running_loop().create_task(self._start())
        self._tasks.add(start)
        start.add_done_callback(self._tasks.discard)
        self._announcer.start()
        await self.metrics.open(self._configuration.metrics.listen)
        try:
            await self._stop.wait()
        finally:
            for task in list(self._tasks):
                task.cancel()

            await self._shut_down()
            self._announcer.close()

    def request_stop(self) -> None:
        """Stops orderly; a second time, at once."""
        if self._stop.is_set():
            self._force.set()

        self._stop.set()

    async def _start(self) -> None:
        """Proves the CPU and loads the resident models; the socket answers meanwhile."""
        uid = os.geteuid()
        proof = asyncio.create_task(warming.prove(self.pool.lane(uid, "cpu", Priority.NORMAL)))
        resident = asyncio.create_task(self._apply_models())
        answer = await proof
        if answer.get("ok") is True:
            self.probed["cpu"] = str(answer.get("text"))
        else:
            log.error("the cpu backend does not run: %s", answer.get("text"))
            self._proof_failed = True

        await resident
        if not self.stopping and self.probed:
            self.state = "serving"
            log.info("ready after %.2f s", monotonic() - self._started)

        self._announcer.update()
        await self._read_fingerprint()

    async def _apply_models(self) -> None:
        async with self._reloads:
            await self.residents.apply(self._configuration.models)

    async def fingerprinting(self) -> Fingerprinting:
        """What measures the device; waits until the stored profile is read."""
        return await asyncio.shield(self._fingerprinting)

    def fingerprint_summary(self) -> dict[str, Any]:
        """The part of `GetStatus`, whatever is known yet."""
        if self._fingerprinting.done():
            return self._fingerprinting.result().summary()

        return {"stale": [], "measuring": False}

    async def _read_fingerprint(self) -> None:
        # Imported behind the start: its modules take longer than all the rest until the first
        # answer may.
        module = await asyncio.to_thread(importlib.import_module, FINGERPRINTING)
        fingerprinting: Fingerprinting = module.Fingerprinting(
            self._configuration,
            self._state_dir,
            self.jobs,
            self.pool,
            self.preparing.idle,
        )
        await fingerprinting.read()
        self._fingerprinting.set_result(fingerprinting)
        self.preparing.trials.hot = fingerprinting.hot
        if self.ready:
            self.preparing.begin()
            fingerprinting.begin()

        try:
            await self._start_switchboard()
        except Exception:
            # The fixed order of before goes on.
            log.exception("the switchboard cannot be started")
            self._machine_problems.append("no routing by protocol; the log says more")

    async def _start_switchboard(self) -> None:
        """Once it is known which backends run here. Imported late, as above."""
        module = await asyncio.to_thread(importlib.import_module, SWITCHBOARD)
        await self.preparing.proven()
        self.operation = module.Operation(
            self._configuration, self._state_dir, self.pool, self.models, self.events.tell
        )
        identities: dict[str, Mapping[str, str]] = {"cpu": {}}
        for name, facts in self.preparing.backends.items():
            if facts.state == "present":
                identities[name] = facts.identity

        self.operation.on_reading = self.session_events.measured
        self.router.board = await self.operation.start(identities)
        for name, facts in self.preparing.backends.items():
            if facts.state == "present":
                # It came while the board was made.
                self.operation.add_backend(name, facts.identity)

        for session in self.sessions.all():
            self.router.refresh(session)

        self.session_events.changed()

    def _backend_has_come(self, name: str) -> None:
        """It was absent at the start. Its pairs come once they are prepared."""
        if self.operation is not None:
            self.operation.add_backend(name, self.preparing.backends[name].identity)

    def _model_is_loaded(self, model: Model) -> None:
        if self.router.board is not None:
            self.router.board.add_model(model)

        self.preparing.model_loaded(model)

    def _model_is_gone(self, model: Model) -> None:
        if self.router.board is not None:
            self.router.board.drop_model(model.digest)

        self.preparing.model_gone(model)
        self.pool.end_own(own_prefix(model))

    def _pair_has_changed(self, model: Model, pair: Pair) -> None:
        """Its sessions may use it from now on, their workers load it first; or not any more."""
        if self.router.board is not None and pair.ready:
            self.router.board.add_pair(model, pair)

        self.router.pair_changed(model, pair, self.sessions.all())
        self.session_events.changed(model.digest)

    def request_reload(self) -> None:
        """Reads the configuration again, and applies what can change without a restart; has
        backends that are absent tried again."""
        self.preparing.proofs.ask_all()
        task = asyncio.get_running_loop().create_task(self._reload())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload(self) -> None:
        if self._read_again is None or self.stopping:
            return

        async with self._reloads:
            self._announcer.reloading()
            try:
                wanted = await asyncio.to_thread(self._read_again)
            except BadConfiguration as error:
                text = f"reload failed, the old configuration holds: {error.text}"
                log.error("%s", text)
                self._reload_problems = [text]
            else:
                result = reload.merge(self._configuration, wanted)
                self._configuration = result.configuration
                reload.set_log_level(result.configuration.daemon.log_level)
                await self.residents.apply(result.configuration.models)
                self._reload_problems = result.problems
                self._reloaded = f"; {result.text}"
                log.info("%s", "; ".join([result.text, *result.problems]))

            self._announcer.reloaded()

    async def _shut_down(self) -> None:
        """Not ready, drain, close clients, end workers; within the limit."""
        limit_s = self._configuration.daemon.stop_limit_s
        deadline = monotonic() + limit_s
        self.state = "stopping"
        self._announcer.update()
        log.info("stopping: %d requests in flight", self.sessions.in_flight)
        self.server.stop_accepting()
        if self._fingerprinting.done():
            self._fingerprinting.result().stop()

        for session in self.sessions.all():
            session.accepting = False

        await self.preparing.stop()
        if self.operation is not None:
            await self.operation.stop()

        await self._drain(monotonic() + DRAIN_SHARE * limit_s)
        await self._unless_forced(self.jobs.stop(), (deadline - monotonic()) / 3)
        self.sessions.close(ShuttingDown)
        self.metrics.close()
        self.server.close()
        await self.pool.stop(self._force, max(0.1, (deadline - monotonic()) / 2))
        self.models.close()
        self._listener.close()
        log.info("stopped")

    async def _unless_forced(self, work: Coroutine[Any, Any, None], limit_s: float) -> None:
        """Waits for `work` until its limit or the second signal."""
        waits = [asyncio.create_task(work), asyncio.create_task(self._force.wait())]
        await asyncio.wait(
            waits, timeout=max(0.0, limit_s), return_when=asyncio.FIRST_COMPLETED
        )
        for wait in waits:
            wait.cancel()

    async def _drain(self, until: float) -> None:
        while self.sessions.in_flight and monotonic() < until and not self._force.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_CHECK_S):
                    await self._force.wait()


async def serve(
    configuration: Configuration,
    open_listener: Callable[[], Listener],
    state_dir: Path,
    cache_dir: Path,
    on_listening: Callable[[Service], None] | None = None,
    read_again: Callable[[], Configuration] | None = None,
) -> None:
    """Runs a daemon until SIGTERM or SIGINT; a second signal stops at once.

    SIGHUP reads the configuration again with `read_again`.

    :raises AlreadyRunning: another daemon has the socket.
    :raises BadConfiguration: the socket or a folder is not usable.
    """
    set_not_dumpable()
    raise_descriptor_limit()
    # Before anybody can connect: who sees the socket may also send the signal.
    loop = asyncio.get_running_loop()
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.append, number)

    listener = open_listener()
    try:
        service = Service(configuration, listener, state_dir, cache_dir, read_again)
    except BaseException:
        listener.close()
        raise

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.request_stop)

    loop.add_signal_handler(signal.SIGHUP, service.request_reload)
    if signals:
        service.request_stop()

    if on_listening is not None:
        on_listening(service)

    await service.run()
