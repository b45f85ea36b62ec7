"""The fingerprint in the daemon: who measures when, and what is known of this device.

The stored profile is read at the start. What is stale is measured in the background while the
daemon serves, one run at a time, each test when the gate (`fingerprints/gate.py`) lets it pass.
Nothing here blocks the loop: files are read in threads, tests run in processes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from switchgear.daemon.thermal.heat import Heat
from switchgear.daemon.yielding import Yielding
from switchgear.fingerprints.dump import FORMATS, render
from switchgear.fingerprints.gate import Gate
from switchgear.fingerprints.measurement import TESTS
from switchgear.fingerprints.refresh import (
    Refreshed,
    Surroundings,
    refresh,
    staleness,
    told,
)
from switchgear.fingerprints.runner import Plan, Progress
from switchgear.fingerprints.store import ProfileStore
from switchgear.ipc.errors import BadRequest, SwitchgearError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping
    from pathlib import Path

    from switchgear.daemon.config import Configuration
    from switchgear.daemon.jobs import Job, Jobs
    from switchgear.daemon.pool import Pool
    from switchgear.fingerprints.profile import Profile

# Progress is told in thousandths of the whole.
PER_MILLE: Final = 1000
# Without gaps the waits end this many budgets before the patience does, so that the whole is
# measured by then. Beside a client the tests get what CPU is left: a quarter is assumed.
RESERVED_BUDGETS: Final = 4
# How often a daemon asks whether another one that measures this machine has ended.
ELSEWHERE_S: Final = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run that was asked for and has not ended."""

    job: Job
    tests: tuple[str, ...]
    quick: bool


class Fingerprinting:
    """Owns the profile in the daemon. `profile` is None until one was read or measured.

    `others_idle` waits until nothing else works in the background.
    """

    def __init__(
        self,
        configuration: Configuration,
        state_dir: Path,
        jobs: Jobs,
        pool: Pool,
        others_idle: Callable[[], Awaitable[None]],
    ) -> None:
        self._settings = configuration.fingerprint
        self._sysfs = configuration.thermal.sysfs_root
        self._store = ProfileStore(state_dir)
        self._jobs = jobs
        self._pool = pool
        self._others_idle = others_idle
        self._heat = Heat(self._sysfs, self._settings.thresholds_c)
        self._one_at_a_time = asyncio.Lock()
        self._runs: list[_Run] = []
        self._stopping = False
        # Set while test processes are due: nothing that is stale is not "measuring".
        self.measuring = False
        self.profile: Profile | None = None
        self.stale: Mapping[str, tuple[str, ...]] = {}
        self._problems_at_start: tuple[str, ...] = ()
        self._problems_of_run: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences: what the start found wrong with the store, and the newest run."""
        return (*self._problems_at_start, *self._problems_of_run)

    # Life.

    async def read(self) -> None:
        """Reads the stored profile and what is stale of it. Never raises."""
        try:
            loaded = await asyncio.to_thread(self._store.load)
            self._problems_at_start = _logged(told(loaded))
            self._take(loaded.profile)
            await self._find_stale()
        except Exception:
            # The daemon serves without a fingerprint, too.
            log.exception("the fingerprint cannot be read")
            self._problems_at_start = ("the fingerprint cannot be read; the log says more",)

    def begin(self) -> None:
        """Measures what is stale in the background, where that is enabled."""
        if self._settings.enabled and not self._stopping:
            try:
                self.run(os.geteuid())
            except SwitchgearError as error:
                self._problems_of_run = _logged([f"the device is not measured: {error.text}"])

    def stop(self) -> None:
        """Ends what runs; nothing is stored of it. Does not wait: `Jobs.stop` does."""
        self._stopping = True
        for run in self._runs:
            run.job.cancel()

    def run(
        self,
        uid: int,
        *,
        quick: bool | None = None,
        force: bool = False,
        tests: tuple[str, ...] = (),
    ) -> Job:
        """Measures what is stale of `tests` (default all), with `force` all of them.

        A run of the same user that does all of this already is returned instead. Another run
        is waited for.

        :raises BadRequest: there is no such test.
        :raises QuotaExceeded: the user has too many running jobs.
        """
        unknown = [test for test in tests if test not in TESTS]
        if unknown:
            raise BadRequest(f"no test {unknown[0][:64]!r}; tests are {', '.join(TESTS)}")

        chosen = tuple(test for test in TESTS if not tests or test in tests)
        quickly = self._settings.quick if quick is None else quick
        if not force:
            for run in self._runs:
                enough = run.quick is quickly or quickly
                if enough and run.job.uid == uid and set(chosen) <= set(run.tests):
                    return run.job

        async def work(job: Job) -> dict[str, object]:
            run = _Run(job, chosen, quickly)
            self._runs.append(run)
            try:
                return await self._work(run, force=force)
            finally:
                self._runs.remove(run)

        return self._jobs.start("fingerprint", "this device", uid, work)

    def hot(self) -> str | None:
        """Why the device is too warm for work in the background; None where it is not."""
        return self._heat.hot() or None

    # What is known.

    def describe(self, form: str | None) -> dict[str, Any]:
        """The reply of `GetFingerprint`.

        :raises BadRequest: there is no such format.
        """
        if form is not None and form not in FORMATS:
            raise BadRequest(f"format is one of {', '.join(FORMATS)}, not {form[:64]!r}")

        reply: dict[str, Any] = {
            "stale": {test: list(reasons) for test, reasons in self.stale.items()},
            "measuring": self.measuring,
            "problems": list(self.problems),
        }
        if self.profile is not None:
            if form is None:
                reply["fingerprint"] = self.profile.model_dump(mode="json")
            else:
                reply["document"] = render(self.profile, form)

        return reply

    def summary(self) -> dict[str, Any]:
        """The part of `GetStatus`."""
        found: dict[str, Any] = {"stale": list(self.stale), "measuring": self.measuring}
        if self.profile is not None:
            found["measured_at"] = self.profile.measured_at
            found["schema"] = self.profile.schema_version

        if self.problems:
            found["problem"] = self.problems[-1]

        return found

    # One run.

    async def _work(self, run: _Run, *, force: bool) -> dict[str, object]:
        run.job.progress("waiting for another run of the fingerprint", 0, PER_MILLE)
        async with self._one_at_a_time:
            try:
                done = await self._refresh(run, force=force)
            finally:
                self.measuring = False

        return {
            "measured": {test: list(reasons) for test, reasons in done.stale.items()},
            "saved": done.saved,
            "problems": list(done.problems),
        }

    async def _refresh(self, run: _Run, *, force: bool) -> Refreshed:
        job = run.job
        job.progress("looking for what has changed", 0, PER_MILLE)
        await self._heat.look()
        plan = self._plan(run)
        gate = self._gate(plan, job)

        async def may_start(test: str) -> None:
            # What else works in the background would be measured too.
            await self._others_idle()
            self.measuring = True
            # Not the reading of before the last test: that one has heated.
            await self._heat.look()
            await gate.wait()

        while True:
            with Yielding(self._pool) as yielding:
                done = await refresh(
                    self._store,
                    plan,
                    self._surroundings(),
                    force=force,
                    may_start=may_start,
                    started=yielding.started,
                    progress=lambda heard: _pass_on(job, heard),
                )

            if not done.measured_elsewhere:
                break

            job.progress("another process is measuring this machine", 0, PER_MILLE)
            await asyncio.sleep(ELSEWHERE_S)

        self._problems_of_run = _logged(done.problems)
        self._take(done.profile)
        await self._find_stale()
        return done

    def _gate(self, plan: Plan, job: Job) -> Gate:
        """One for the whole run: its patience is for all tests together."""
        settings = self._settings
        reserve_s = RESERVED_BUDGETS * plan.budget_s
        return Gate(
            hot=self._heat.hot,
            idle_s=self._pool.idle_s,
            patience_s=max(0.0, settings.patience_s - reserve_s),
            busy_share=settings.busy_share,
            tell=lambda reason: _say(job, f"waiting: {reason}", job.done),
        )

    def _plan(self, run: _Run) -> Plan:
        settings = self._settings
        return Plan(
            tests=run.tests,
            quick=run.quick,
            delegate=settings.delegate,
            delegate_options=settings.delegate_options,
            sysfs=str(self._sysfs),
        )

    def _surroundings(self) -> Surroundings:
        sensors = self._heat.sensors
        if sensors is None:
            return Surroundings(operator_c=self._settings.thresholds_c)

        for problem in sensors.problems:
            log.warning("sensors: %s", problem)

        return Surroundings(sensors.zones, sensors.excluded, self._settings.thresholds_c)

    async def _find_stale(self) -> None:
        settings = self._settings
        plan = Plan(quick=settings.quick, delegate=settings.delegate)
        _, self.stale = await asyncio.to_thread(staleness, self.profile, plan)

    def _take(self, profile: Profile | None) -> None:
        if profile is not None:
            self.profile = profile
            self._heat.use(profile.devices)


def _logged(problems: Iterable[str]) -> tuple[str, ...]:
    found = tuple(problems)
    for problem in found:
        log.warning("%s", problem)

    return found


def _pass_on(job: Job, heard: Progress) -> None:
    subject = heard.device or heard.text
    _say(job, f"{heard.test}: {subject}", round(heard.done * PER_MILLE))


def _say(job: Job, phase: str, done: int) -> None:
    """Only what is new: a test tells each of its samples."""
    if (job.phase, job.done) != (phase, done):
        job.progress(phase, done, PER_MILLE)
