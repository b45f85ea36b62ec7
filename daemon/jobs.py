"""Jobs: long work that a client started, watches and may cancel."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any, Final

from switchgear.daemon.shortage import as_no_space
from switchgear.daemon.varlink_server import error_fields
from switchgear.ipc.errors import (
    Cancelled,
    InternalError,
    QuotaExceeded,
    SwitchgearError,
    UnknownJob,
)

# Each user's last ended jobs stay known, so that a client can still ask how they ended.
KEPT_PER_USER: Final = 64

log = logging.getLogger(__name__)

Work = Callable[["Job"], Coroutine[Any, Any, dict[str, object]]]


def without_frames(error: SwitchgearError) -> SwitchgearError:
    """An error that can be kept: its traceback would keep all that its frames name."""
    error.__context__ = None
    error.__cause__ = None
    return error.with_traceback(None)


class Job:
    """One piece of work. `state` is running, done, failed or cancelled."""

    def __init__(self, identity: int, kind: str, subject: str, uid: int) -> None:
        self.identity = identity
        self.kind = kind
        self.subject = subject
        self.uid = uid
        self.state = "running"
        self.phase = "waiting"
        self.done = 0
        self.total = 0
        self.result: dict[str, object] | None = None
        self.error: SwitchgearError | None = None
        self.ended_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._begun = False
        self._cancelled = False
        self._changed = asyncio.Event()
        self._version = 0

    def progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Tells the watchers; does not block."""
        self.phase, self.done, self.total = phase, done, total
        self._tell()

    def _tell(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self.state != "running"

    async def changed(self, version: int) -> int:
        """Waits until there is news after `version`; returns the version of now."""
        while self._version == version and not self.ended:
            await self._changed.wait()

        return self._version

    @property
    def version(self) -> int:
        return self._version

    def to_json(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "state": self.state,
            "phase": self.phase,
            "done": self.done,
            "total": self.total,
        }
        if self.result is not None:
            fields["result"] = self.result

        if self.error is not None:
            fields["error"], fields["parameters"] = error_fields(self.error)

        return fields

    def cancel(self) -> None:
        """Ends it at its next wait; harmless once it has ended."""
        if self._begun and self._task is not None:
            # A second time would cut short what the first one made it do.
            if not self._task.cancelling():
                self._task.cancel()
        else:
            # A task that is cancelled before its first step never takes over what is its own.
            self._cancelled = True

    async def _run(self, work: Work) -> None:
        self._begun = True
        if self._cancelled and self._task is not None:
            self._task.cancel()

        try:
            self.result = await work(self)
            self.state = "done"
        except asyncio.CancelledError:
            self.state = "cancelled"
            self.error = Cancelled("the job was cancelled")
        except SwitchgearError as error:
            self.state = "cancelled" if isinstance(error, Cancelled) else "failed"
            self.error = without_frames(error)
        except Exception as error:
            self.state = "failed"
            self.error = as_no_space(error)
            if self.error is None:
                log.exception("job %d (%s) failed", self.identity, self.kind)
                self.error = InternalError("a fault of the daemon; its log says more")
        finally:
            self._task = None
            self.ended_s = monotonic()
            self._tell()


class Jobs:
    """All jobs; at most `limit` running ones per user."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._next = 1
        self._jobs: OrderedDict[int, Job] = OrderedDict()

    def start(self, kind: str, subject: str, uid: int, work: Work) -> Job:
        """Starts `work` on the loop.

        :raises QuotaExceeded: the user has too many running jobs.
        """
        running = Counter(job.uid for job in self._jobs.values() if not job.ended)
        if running[uid] >= self._limit:
            raise QuotaExceeded(f"more than {self._limit} jobs of user {uid}")

        job = Job(self._next, kind, subject, uid)
        self._next += 1
        self._jobs[job.identity] = job
        job._task = asyncio.get_running_loop().create_task(job._run(work))
        self._forget_old(uid)
        return job

    def _forget_old(self, uid: int) -> None:
        ended = [job for job in self._jobs.values() if job.ended and job.uid == uid]
        # Not in the order of their starts: a long one has ended last.
        ended.sort(key=lambda job: job.ended_s)
        for job in ended[:-KEPT_PER_USER]:
            del self._jobs[job.identity]

    def get(self, identity: int, uid: int) -> Job:
        """A job of this user; root sees all.

        :raises UnknownJob: there is none, or it is another user's.
        """
        job = self._jobs.get(identity)
        if job is None or uid not in (job.uid, 0):
            raise UnknownJob(f"no job {identity}")

        return job

    def running(self, uid: int) -> list[Job]:
        return [j for j in self._jobs.values() if not j.ended and uid in (j.uid, 0)]

    async def stop(self) -> None:
        """Cancels all that runs and waits until it has ended."""
        tasks = []
        for job in self._jobs.values():
            if not job.ended and job._task is not None:
                job.cancel()
                tasks.append(job._task)

        if tasks:
            await asyncio.wait(tasks)
