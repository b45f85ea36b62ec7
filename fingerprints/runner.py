"""Runs the tests of the fingerprint, one process at a time, and collects what they report.

Standard library only; used by the daemon, and by the command line without one. A test that dies
costs the device that it was at: the others are measured by a further process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeAlias

from switchgear.fingerprints.child import Limits, Outcome, TestProcess
from switchgear.fingerprints.installed import drivers
from switchgear.fingerprints.measure.options import Options
from switchgear.fingerprints.measurement import (
    TESTS,
    Measured,
    Report,
    Subject,
    Value,
    own_failure,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from switchgear.fingerprints.measurement import Failure

# Seconds for the whole, and seconds of samples per device (`Options.budget_s`).
WHOLE_BUDGET_S: Final = 30.0
QUICK_BUDGET_S: Final = 8.0
_DEVICE_BUDGET_S: Final = 3.0
_QUICK_DEVICE_BUDGET_S: Final = 0.8


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` is the share of the whole, 0 to 1; `device` is empty between devices."""

    test: str
    device: str
    done: float
    text: str


MayStart: TypeAlias = Callable[[str], Awaitable[None]]
OnProgress: TypeAlias = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run, and under which limits.

    `delegate` and `delegate_options` name the external delegate of the NPU test, `sysfs` is the
    root of its busy counters. `environment` is the test processes' whole environment, None for
    this process's own. `budget_s` bounds the repeats only: a first measurement is never left
    out for lack of time.
    """

    tests: tuple[str, ...] = TESTS
    quick: bool = False
    delegate: str = ""
    delegate_options: Mapping[str, str] = field(default_factory=dict)
    sysfs: str = "/sys"
    limits: Limits = field(default_factory=Limits)
    environment: Mapping[str, str] | None = None
    repeat_noisy: bool = True

    @property
    def budget_s(self) -> float:
        return QUICK_BUDGET_S if self.quick else WHOLE_BUDGET_S

    def options(self) -> Options:
        return Options(
            quick=self.quick,
            budget_s=_QUICK_DEVICE_BUDGET_S if self.quick else _DEVICE_BUDGET_S,
            delegate=self.delegate,
            delegate_options=dict(self.delegate_options),
            sysfs=self.sysfs,
        )


class Runner:
    """Runs a plan. `may_start` is awaited before each test process; `progress` is called often.

    Cancelling `run` kills the test process that runs.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        may_start: MayStart | None = None,
        progress: OnProgress | None = None,
    ) -> None:
        self._plan = plan
        self._may_start = may_start
        self._progress = progress

    async def run(self) -> list[Report]:
        """All reports, in the order of the tests. A fault is a report, never an exception."""
        reports: list[Report] = []
        measuring_s = 0.0
        for position, test in enumerate(self._plan.tests):
            started = time.monotonic()
            found = await self._measure(test, position)
            took_s = time.monotonic() - started
            measuring_s += took_s
            noisy = [report for report in found if report.noisy]
            remaining = len(self._plan.tests) - position - 1
            # Keep room for the tests to come: they matter more than a second opinion.
            spare_s = self._plan.budget_s - measuring_s - remaining * took_s
            if noisy and self._plan.repeat_noisy and took_s < spare_s:
                found = await self._repeat(test, position, found)
                measuring_s += took_s

            reports += found
            self._tell(position, test, None, 1.0, "done")

        return reports

    async def _repeat(self, test: str, position: int, first: list[Report]) -> list[Report]:
        quiet = tuple(
            report.subject.index
            for report in first
            if report.subject is not None and not report.noisy
        )
        second = await self._measure(test, position, skip=quiet)
        by_index = {
            (report.subject.api, report.subject.index): report
            for report in second
            if report.subject is not None
        }
        return [
            steadier(report, by_index[report.subject.api, report.subject.index])
            if report.noisy
            and report.subject is not None
            and (report.subject.api, report.subject.index) in by_index
            else report
            for report in first
        ]

    async def _measure(
        self, test: str, position: int, skip: tuple[int, ...] = ()
    ) -> list[Report]:
        """Every device of a test, with a further process after each death."""
        options = replace(self._plan.options(), skip=skip)
        environment = self._plan.environment
        reports: list[Report] = []
        while True:
            outcome = await self._process(test, position, options, environment)
            reports += outcome.reports
            if outcome.death is None:
                return reports

            if outcome.begun is None:
                if reports:
                    # It died on its way out: what it had to say is said.
                    return reports

                return await self._one_driver_at_a_time(test, position, options, outcome.death)

            reports.append(_dead(test, outcome.begun, outcome.death))
            done = {each.subject.index for each in reports if each.subject is not None}
            options = replace(options, skip=tuple(sorted({*skip, *done})))

    async def _one_driver_at_a_time(
        self, test: str, position: int, options: Options, death: Failure
    ) -> list[Report]:
        """After a death before any device: which of the installed drivers was it?"""
        environment = dict(
            os.environ if self._plan.environment is None else self._plan.environment
        )
        installed = drivers(test, environment)
        if len(installed) < 2:
            name = installed[0].library if installed else ""
            return [Report(test, None, (replace(death, library=death.library or name),))]

        reports: list[Report] = []
        for driver in installed:
            alone = {**environment, **driver.environment}
            outcome = await self._process(test, position, options, alone)
            # Each driver counts its own devices from 0.
            base = len([each for each in reports if each.subject is not None])
            for report in outcome.reports:
                # A driver without a device on this machine is no finding.
                if report.subject is not None:
                    subject = replace(report.subject, index=base + report.subject.index)
                    reports.append(replace(report, subject=subject))

            if outcome.death is not None:
                subject = outcome.begun or Subject(driver.api, driver.name)
                library = subject.library or driver.library
                subject = replace(subject, index=len(reports), library=library)
                reports.append(_dead(test, subject, outcome.death))

        return reports

    async def _process(
        self,
        test: str,
        position: int,
        options: Options,
        environment: Mapping[str, str] | None,
    ) -> Outcome:
        if self._may_start is not None:
            self._tell(position, test, None, 0.0, "waiting for a quiet moment")
            await self._may_start(test)

        process = TestProcess(
            test,
            options,
            self._plan.limits,
            environment=environment,
            progress=lambda subject, done, text: self._tell(
                position, test, subject, done, text
            ),
        )
        try:
            return await process.run()
        except OSError as error:
            text = f"no test process could be started: {error}"
            return Outcome(death=own_failure(test, "NoSpace", text))

    def _tell(
        self, position: int, test: str, subject: Subject | None, done: float, text: str
    ) -> None:
        if self._progress is not None:
            share = (position + done) / len(self._plan.tests)
            self._progress(Progress(test, subject.name if subject else "", share, text))


async def run(
    plan: Plan,
    *,
    may_start: MayStart | None = None,
    progress: OnProgress | None = None,
) -> list[Report]:
    """`Runner(plan, ...).run()`."""
    return await Runner(plan, may_start=may_start, progress=progress).run()


def steadier(first: Report, second: Report) -> Report:
    """A noisy report and its repeat as one: of each value the quieter of the two.

    Both quiet and further apart than three times the larger spread: noisy after all, for the
    machine changed between the two.
    """
    values = tuple(_steadier(value, second.value(value.name)) for value in first.values)
    return replace(
        first,
        values=values,
        notes=(*first.notes, "noisy, so measured twice"),
        duration_s=first.duration_s + second.duration_s,
    )


def _steadier(first: Measured, second: Measured | None) -> Measured:
    if not isinstance(first, Value):
        return second if isinstance(second, Value) else first

    if not isinstance(second, Value):
        return first

    if first.noisy or second.noisy:
        return min(first, second, key=_unrest)

    apart = abs(first.median - second.median) > 3 * max(first.spread, second.spread)
    return replace(min(first, second, key=_unrest), noisy=apart)


def _unrest(value: Value) -> tuple[bool, float]:
    return value.noisy, value.spread / abs(value.median) if value.median else 0.0


def _dead(test: str, subject: Subject, death: Failure) -> Report:
    failure = replace(death, library=death.library or subject.library)
    return Report(test, subject, (failure,))
