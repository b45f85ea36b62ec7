"""Reads sensors at the rate that each deserves, and past those that hang.

A driver may sleep in its read for ever. Each read runs in a thread that is left behind when it
takes too long; another goes on with the rest, and the sensor counts as hanging until its thread
comes back.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING, Final, NamedTuple

from switchgear.daemon.thermal.reader_packets import (
    FAILED,
    HANGS,
    IMPLAUSIBLE,
    MAX_ZONES,
    OK,
    Sample,
)

if TYPE_CHECKING:
    from switchgear.daemon.thermal.zones import Sensor, Sensors
    from switchgear.fingerprints.zones_model import Reading

# Of one read; sensors behind a slow bus take up to 0.1 s.
READ_LIMIT_S: Final = 0.25
FIND_LIMIT_S: Final = 2.0
# Within 10 °C of a limit a reading is at most 33 ms old when it is used.
NEAR_S: Final = 0.025
NEAR_MC: Final = 10_000
WARM_S: Final = 0.1
WARM_MC: Final = 20_000
COOL_S: Final = 0.25
# What no device is decided by, and what fails.
IDLE_S: Final = 2.0
FAILING_S: Final = 1.0
# Looking for sensors again: after one vanished, and in any case.
FIND_AGAIN_S: Final = 1.0
FIND_AGAIN_MAX_S: Final = 30.0
FIND_ANYWAY_S: Final = 300.0
FIND_NONE_S: Final = 30.0
# The path is another sensor's now, or nobody's.
_VANISHED: Final = frozenset({errno.ESTALE, errno.ENOENT, errno.ENODEV, errno.ENOTDIR})

Find = Callable[[], "Sensors"]
Read = Callable[["Sensor"], "Reading"]


def interval_s(temperature_mc: int | None, limit_mc: int | None) -> float:
    """How long a sensor's next reading may wait, by its last and by its lowest limit."""
    if temperature_mc is None:
        return FAILING_S

    if limit_mc is None:
        return IDLE_S

    below_mc = limit_mc - temperature_mc
    if below_mc <= NEAR_MC:
        return NEAR_S

    return WARM_S if below_mc <= WARM_MC else COOL_S


class _Job(NamedTuple):
    """A sensor to read, or None to look for sensors."""

    generation: int
    number: int
    sensor: Sensor | None


class _Done(NamedTuple):
    job: _Job
    reading: Reading | None
    sensors: Sensors | None
    taken_ns: int


class _Worker(threading.Thread):
    """Runs jobs one after another until it is left behind."""

    def __init__(self, find: Find, read: Read, done: deque[_Done], wake: Callable[[], None]):
        super().__init__(name="sensors", daemon=True)
        self._find = find
        self._read = read
        self._done = done
        self._wake = wake
        self._waiting = threading.Semaphore(0)
        self._left = False
        self.jobs: deque[_Job] = deque()
        # The job under way and its start; None between jobs.
        self.current: tuple[_Job, float] | None = None

    def give(self, job: _Job) -> None:
        self.jobs.append(job)
        self._waiting.release()

    def leave(self) -> None:
        """It ends when its job does, if ever."""
        self._left = True
        self._waiting.release()

    def run(self) -> None:
        while True:
            self._waiting.acquire()
            if self._left:
                return

            try:
                job = self.jobs.popleft()
            except IndexError:
                # What was waiting is not wanted any more.
                continue

            self.current = (job, monotonic())
            if job.sensor is None:
                outcome = _Done(job, None, self._find(), monotonic_ns())
            else:
                outcome = _Done(job, self._read(job.sensor), None, monotonic_ns())

            self.current = None
            self._done.append(outcome)
            self._wake()


class Poller:
    """Drives the workers. Call `work` whenever `wait_s` is over or `wake` was called.

    `find` and `read` may block and never raise. Everything but those runs in the caller's
    thread.
    """

    # The job that looks for sensors; others have the sensor's index.
    _FIND: Final = -1

    def __init__(self, find: Find, read: Read, wake: Callable[[], None]) -> None:
        self._find = find
        self._read = read
        self._wake = wake
        self._done: deque[_Done] = deque()
        self._worker = self._new_worker()
        self._left: dict[_Worker, _Job] = {}
        self._limits: Mapping[str, int] = {}
        self.sensors: Sensors | None = None
        self.generation = 0
        self._due: list[float] = []
        self._asked: set[int] = set()
        self._hanging: set[int] = set()
        self._find_at_s = monotonic()
        self._find_once_more = False
        self._found_s = float("-inf")
        self._again_s = FIND_AGAIN_S

    def use(self, limits_mc: Mapping[str, int], *, find: bool) -> None:
        """The lowest limit of each sensor that counts; `find` looks for sensors now."""
        self._limits = dict(limits_mc)
        now_s = monotonic()
        self._due = [now_s] * len(self._due)
        if find:
            self._find_at_s = now_s
            # One that is under way may have passed what is new.
            self._find_once_more = self._FIND in self._asked

    def close(self) -> list[threading.Thread]:
        """Lets the workers end. Returns them: one that hangs may never do."""
        workers = [self._worker, *self._left]
        for worker in workers:
            worker.leave()

        return list(workers)

    def work(self) -> tuple[bool, list[Sample]]:
        """Does what is due. Returns whether the sensors changed, and new samples."""
        now_s = monotonic()
        samples = self._leave_hanging(now_s)
        changed = self._collect(samples)
        if self._FIND not in self._asked and now_s >= self._find_at_s:
            self._ask(self._FIND, None)

        if self.sensors is not None:
            for index, sensor in enumerate(self.sensors.sensors[:MAX_ZONES]):
                idle = index not in self._asked and index not in self._hanging
                if idle and now_s >= self._due[index]:
                    self._ask(index, sensor)

        return changed, samples

    def wait_s(self) -> float:
        """How long until there is something to do without a wake-up."""
        now_s = monotonic()
        waits = [1.0]
        current = self._worker.current
        if current is not None:
            waits.append(current[1] + self._limit_s(current[0]) - now_s)

        if self._FIND not in self._asked:
            waits.append(self._find_at_s - now_s)

        waits += [
            due_s - now_s
            for index, due_s in enumerate(self._due)
            if index not in self._asked and index not in self._hanging
        ]
        return max(0.0, min(waits))

    def _new_worker(self) -> _Worker:
        worker = _Worker(self._find, self._read, self._done, self._wake)
        worker.start()
        return worker

    def _ask(self, index: int, sensor: Sensor | None) -> None:
        self._asked.add(index)
        self._worker.give(_Job(self.generation, index, sensor))

    def _limit_s(self, job: _Job) -> float:
        return FIND_LIMIT_S if job.sensor is None else READ_LIMIT_S

    def _leave_hanging(self, now_s: float) -> list[Sample]:
        worker = self._worker
        current = worker.current
        if current is None or now_s < current[1] + self._limit_s(current[0]):
            return []

        job = current[0]
        worker.leave()
        self._left[worker] = job
        self._worker = self._new_worker()
        while worker.jobs:
            self._worker.give(worker.jobs.popleft())

        if job.sensor is None:
            self._asked.discard(job.number)
            self._find_at_s = now_s + self._again_s
            self._again_s = min(2 * self._again_s, FIND_AGAIN_MAX_S)
            return []

        if job.generation != self.generation:
            return []

        self._asked.discard(job.number)
        self._hanging.add(job.number)
        return [Sample(job.number, HANGS, errno.ETIMEDOUT, 0, monotonic_ns())]

    def _collect(self, samples: list[Sample]) -> bool:
        changed = False
        self._return_hanging()
        while self._done:
            done = self._done.popleft()
            job = done.job
            if job.number not in self._asked:
                # It was left behind and has come back: old news.
                continue

            if done.sensors is not None:
                self._asked.discard(job.number)
                if self._took(done.sensors):
                    changed = True
                    samples.clear()
            elif done.reading is not None and job.generation == self.generation:
                self._asked.discard(job.number)
                samples.append(self._sampled(job.number, done.reading, done.taken_ns))

        return changed

    def _return_hanging(self) -> None:
        for worker in [worker for worker in self._left if not worker.is_alive()]:
            job = self._left.pop(worker)
            if job.generation == self.generation:
                self._hanging.discard(job.number)

    def _took(self, found: Sensors) -> bool:
        now_s = monotonic()
        self._found_s = now_s
        known = self.sensors
        none = not found.sensors
        self._find_at_s = now_s + (FIND_NONE_S if none else FIND_ANYWAY_S)
        if self._find_once_more:
            self._find_once_more = False
            self._find_at_s = now_s

        if known is not None and found == known:
            return False

        self.sensors = found
        self.generation += 1
        count = min(len(found.sensors), MAX_ZONES)
        self._due = [now_s] * count
        self._asked &= {self._FIND}
        self._worker.jobs.clear()
        self._hanging.clear()
        return True

    def _sampled(self, index: int, reading: Reading, taken_ns: int) -> Sample:
        now_s = monotonic()
        temperature_mc = reading.temperature_mc
        limit_mc = self._limits.get(reading.zone_id)
        self._due[index] = taken_ns / 1e9 + interval_s(temperature_mc, limit_mc)
        if temperature_mc is not None:
            self._again_s = FIND_AGAIN_S
            return Sample(index, OK, 0, temperature_mc, taken_ns)

        if reading.errno in _VANISHED:
            self._later(now_s)

        status = FAILED if reading.errno else IMPLAUSIBLE
        return Sample(index, status, min(reading.errno, 255), 0, taken_ns)

    def _later(self, now_s: float) -> None:
        """Looks for sensors again, ever later while that does not help."""
        at_s = max(now_s, self._found_s + self._again_s)
        self._find_at_s = min(self._find_at_s, at_s)
        self._again_s = min(2 * self._again_s, FIND_AGAIN_MAX_S)


def eventfd_wake() -> tuple[int, Callable[[], None]]:
    """A descriptor that becomes readable by calling the second; the caller closes it."""
    descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    return descriptor, lambda: os.eventfd_write(descriptor, 1)
