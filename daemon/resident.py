"""The models that the configuration keeps loaded for everybody."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from switchgear.daemon.config import ModelEntry
from switchgear.daemon.copying import COPIES_PER_USER
from switchgear.daemon.jobs import Job, Jobs
from switchgear.daemon.models import Models
from switchgear.ipc.errors import SwitchgearError, UnknownModel

# Loaded side by side up to this many: as many as a user's copies may be.
AT_ONCE: Final = COPIES_PER_USER

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Kept:
    """A loaded one. `identity` of its file tells whether that was replaced."""

    digest: str
    identity: tuple[int, ...]


class Residents:
    """Loads what the configuration names, and drops what it names no more."""

    def __init__(self, models: Models, jobs: Jobs) -> None:
        self._models = models
        self._jobs = jobs
        self._uid = os.geteuid()
        self._kept: dict[ModelEntry, _Kept] = {}
        # By entry, why it is not loaded or not gone; in sentences.
        self._problems: dict[ModelEntry, str] = {}
        # Digests of models that are wanted no more.
        self._leaving: set[str] = set()
        self.total = 0
        self.done = 0

    @property
    def problems(self) -> list[str]:
        used = [
            f"model {digest[:12]} is no longer in the configuration, but in use: "
            "it goes at the next reload"
            for digest in sorted(self._leaving)
        ]
        return [*self._problems.values(), *used]

    async def apply(self, entries: Iterable[ModelEntry]) -> None:
        """Loads entries that are new or whose file was replaced; drops all others.

        What fails stands in `problems`. One call at a time.
        """
        wanted = dict.fromkeys(entries)
        for entry in self._problems.keys() - wanted.keys():
            del self._problems[entry]

        todo = [entry for entry in wanted if not self._is_current(entry)]
        self.total, self.done = len(todo), 0
        gate = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(self._load(entry, gate) for entry in todo))
        for entry in self._kept.keys() - wanted.keys():
            self._leaving.add(self._kept.pop(entry).digest)

        self._leaving -= {kept.digest for kept in self._kept.values()}
        self._leaving = {digest for digest in self._leaving if not self._drop(digest)}

    def _is_current(self, entry: ModelEntry) -> bool:
        kept = self._kept.get(entry)
        if kept is None or entry in self._problems:
            return False

        try:
            return kept.identity == _identity(os.stat(entry.path))
        except OSError:
            # It is loaded, and its bytes are ours: the file may go.
            return True

    async def _load(self, entry: ModelEntry, gate: asyncio.Semaphore) -> None:
        try:
            async with gate:
                error = await self._job(entry)
        except OSError as reason:
            error = reason.strerror or str(reason)
        except SwitchgearError as reason:
            error = reason.text

        self.done += 1
        self._problems.pop(entry, None)
        if error:
            log.error("resident model %s: %s", entry.path, error)
            self._problems[entry] = f"resident model {entry.path}: {error}"

    async def _job(self, entry: ModelEntry) -> str:
        """Loads a model; why that failed, or nothing.

        :raises OSError: it cannot be opened.
        :raises SwitchgearError: it cannot be loaded.
        """
        name = entry.name or entry.path.stem
        fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            identity = _identity(os.fstat(fd))
            size = self._models.check_load(fd, name, self._uid)

            async def work(job: Job) -> dict[str, object]:
                model = await self._models.load(job, fd, size, name, self._uid, resident=True)
                before = self._kept.get(entry)
                if before is not None:
                    self._leaving.add(before.digest)

                self._kept[entry] = _Kept(model.digest, identity)
                return {}

            job = self._jobs.start("load", name, self._uid, work)
        except BaseException:
            os.close(fd)
            raise

        version = job.version
        while not job.ended:
            version = await job.changed(version)

        return job.error.text if job.error is not None else ""

    def _drop(self, digest: str) -> bool:
        """Takes the configuration's hold of a model away; False while sessions use it."""
        try:
            model = self._models.resolve(digest, self._uid)
        except UnknownModel:
            # An operator has unloaded it.
            return True

        # Its name is free at once, for the bytes that replace it.
        model.resident_name = ""
        if model.sessions.total():
            return False

        self._models.unload(model, self._uid, resident_too=True)
        return True


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
