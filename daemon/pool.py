"""The pool: every lane of every isolation group, and the end of those that nobody uses."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from math import inf
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

from switchgear.daemon.config import Configuration
from switchgear.daemon.lane import END_LIMIT_S, Lane
from switchgear.daemon.lane_settings import LaneSettings, Watcher
from switchgear.ipc.record import Priority

if TYPE_CHECKING:
    from switchgear.daemon.worker_process import WorkerProcess

IDLE_CHECK_S: Final = 30.0
LANES: Final = {
    Priority.HIGH: "interactive",
    Priority.NORMAL: "interactive",
    Priority.BATCH: "batch",
}
DEVICE_LANE: Final = "device"

log = logging.getLogger(__name__)


class Pool:
    """Lanes are made at the first need. A group is a user id, or all users together."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._lanes: dict[tuple[str, str, str], Lane] = {}
        self._watchers: list[Callable[[], None]] = []
        # Those of lanes that are gone.
        self._ending: set[WorkerProcess] = set()
        # Who decides where requests go; set before the first lane is made.
        self.watcher: Watcher | None = None
        self._loop = asyncio.get_running_loop()
        self._idle = self._loop.call_later(IDLE_CHECK_S, self._end_idle)

    def group_of(self, uid: int) -> str:
        """The isolation group of a user."""
        return "shared" if self._configuration.daemon.isolation == "shared" else str(uid)

    def lane(self, uid: int, backend: str, priority: int, own: str = "") -> Lane:
        """The lane for a user's requests. The CPU has two; a device has one, and further ones
        for what needs a worker of its own, by its name."""
        name = LANES[Priority(priority)] if backend == "cpu" else own or DEVICE_LANE
        key = (self.group_of(uid), backend, name)
        lane = self._lanes.get(key)
        if lane is None:
            settings = self._settings(name) if backend == "cpu" else self._of_device(backend)
            lane = Lane(backend, name, key[0], settings)
            lane.on_request = self._heard if self._watchers else None
            lane.watcher = self.watcher
            self._lanes[key] = lane

        return lane

    def _of_device(self, backend: str) -> LaneSettings:
        workers = self._configuration.workers
        return LaneSettings(
            self._configuration.backend_options(backend),
            self._configuration.limits.queue,
            self._configuration.limits.queue_per_user,
            workers.hang_s,
            workers.start_s,
        )

    def _settings(self, name: str) -> LaneSettings:
        cpu = self._configuration.cpu
        interactive = name == "interactive"
        threads = cpu.interactive_threads()
        options: dict[str, Any] = {
            "threads": threads if interactive else (cpu.batch_threads or threads),
            "niceness": cpu.niceness if interactive else cpu.batch_niceness,
            "affinity": list(cpu.affinity),
        }
        workers = self._configuration.workers
        limits = self._configuration.limits
        return LaneSettings(
            options, limits.queue, limits.queue_per_user, workers.hang_s, workers.start_s
        )

    def lanes(self) -> list[Lane]:
        return list(self._lanes.values())

    def watch_requests(self, callback: Callable[[], None]) -> None:
        """Calls `callback` for each request as it arrives, on any lane."""
        self._watchers.append(callback)
        self._tell_watchers()

    def unwatch_requests(self, callback: Callable[[], None]) -> None:
        self._watchers.remove(callback)
        self._tell_watchers()

    def _tell_watchers(self) -> None:
        # None where nobody listens: a request then pays nothing for it.
        for lane in self._lanes.values():
            lane.on_request = self._heard if self._watchers else None

    def _heard(self) -> None:
        for callback in self._watchers:
            callback()

    def idle_s(self) -> float:
        """Time since the last reply of any lane; 0 while a request waits or runs anywhere."""
        now_ns = monotonic_ns()
        return min((lane.idle_ns(now_ns) / 1e9 for lane in self._lanes.values()), default=inf)

    def _end_idle(self) -> None:
        """Ends workers of users who have not used them for a while; the daemon's own stay."""
        self._idle = self._loop.call_later(IDLE_CHECK_S, self._end_idle)
        own = self.group_of(os.geteuid())
        limit_ns = int(self._configuration.workers.idle_s * 1e9)
        for key, lane in list(self._lanes.items()):
            if lane.sessions or lane.queued or lane.running:
                lane.used_ns = monotonic_ns()
            elif key[0] != own and monotonic_ns() - lane.used_ns > limit_ns:
                log.info("worker %s is idle: ended", lane.label)
                self._end(key)

    def end_own(self, own: str) -> None:
        """Ends the lanes that `lane` made for what needs a worker of its own, by how their
        names begin. Does not wait."""
        for key in [key for key in self._lanes if key[1] != "cpu" and key[2].startswith(own)]:
            self._end(key)

    def end(self, lane: Lane) -> None:
        """Ends one lane, if it is still one of these. Does not wait."""
        key = (lane.group, lane.backend, lane.name)
        if self._lanes.get(key) is lane:
            log.info("worker %s was replaced: ended", lane.label)
            self._end(key)

    def renew(self, backend: str) -> None:
        """Replaces a backend's workers, each once nothing runs there. Does not wait."""
        for lane in self.lanes():
            if lane.backend == backend:
                lane.renew()

    def _end(self, key: tuple[str, str, str]) -> None:
        worker = self._lanes.pop(key).stop()
        if worker is not None:
            self._ending.add(worker)
            worker.ended.add_done_callback(lambda _: self._ending.discard(worker))
            self._loop.call_later(END_LIMIT_S, worker.force)

    async def stop(self, force: asyncio.Event, limit_s: float) -> None:
        """Asks every worker to end, then ends them: after `limit_s`, or when `force` is set.

        Takes at most twice as long, where a worker hangs in the kernel.
        """
        self._idle.cancel()
        workers = [worker for lane in self.lanes() if (worker := lane.stop()) is not None]
        workers += self._ending
        if not workers:
            return

        ended: asyncio.Future[Any] = asyncio.gather(*(worker.ended for worker in workers))
        forced: asyncio.Future[Any] = asyncio.create_task(force.wait())
        await asyncio.wait(
            [ended, forced], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
        )
        forced.cancel()
        if not ended.done():
            for worker in workers:
                worker.force()

            await asyncio.wait([ended], timeout=limit_s)
