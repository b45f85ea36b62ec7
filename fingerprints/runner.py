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
    NOISY_SHARE,
    TESTS,
    Measured,
    Report,
    Subject,
    Value,
    own_failure,
)
from switchgear.ipc.errors import NoBackend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from switchgear.fingerprints.installed import Driver
    from switchgear.fingerprints.measurement import Failure

# Seconds for the whole, and seconds of samples per device (`Options.budget_s`).
WHOLE_BUDGET_S: Final = 30.0
QUICK_BUDGET_S: Final = 8.0
_DEVICE_BUDGET_S: Final = 2.0
_QUICK_DEVICE_BUDGET_S: Final = 0.8
_NO_DRIVER: Final = (
    ("switchgear", NoBackend.code),
    ("vulkan", -9),
    ("vulkan", -3),
    ("opencl", -1001),
)


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` is the share of the whole, 0 to 1; `device` is empty between devices."""

    test: str
    device: str
    done: float
    text: str


MayStart: TypeAlias = Callable[[str], Awaitable[None]]
OnProgress: TypeAlias = Callable[[Progress], None]
OnStarted: TypeAlias = Callable[[TestProcess], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run, and under which limits.

    `delegate` and `delegate_options` name the external delegate of the NPU test, `sysfs` is the
    root of its busy counters. `environment` is the test processes' whole environment, None for
    this process's own. With `yield_cpu` the tests run under SCHED_IDLE, which a busy machine
    can starve for minutes; leave it set wherever somebody is served. `device_budget_s` is the
    time for the samples of one device, None for the usual; `max_transfer_bytes` bounds the
    OpenCL test's size, 0 does not. `budget_s` bounds the repeats only: a first measurement is
    never left out for lack of time.
    """

    tests: tuple[str, ...] = TESTS
    quick: bool = False
    delegate: str = ""
    delegate_options: Mapping[str, str] = field(default_factory=dict)
    sysfs: str = "/sys"
    limits: Limits = field(default_factory=Limits)
    environment: Mapping[str, str] | None = None
    repeat: bool = True
    yield_cpu: bool = True
    device_budget_s: float | None = None
    max_transfer_bytes: int = 0

    @property
    def budget_s(self) -> float:
        return QUICK_BUDGET_S if self.quick else WHOLE_BUDGET_S

    def options(self) -> Options:
        usual_s = _QUICK_DEVICE_BUDGET_S if self.quick else _DEVICE_BUDGET_S
        return Options(
            quick=self.quick,
            yield_cpu=self.yield_cpu,
            budget_s=usual_s if self.device_budget_s is None else self.device_budget_s,
            max_transfer_bytes=self.max_transfer_bytes,
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
        started: OnStarted | None = None,
        progress: OnProgress | None = None,
    ) -> None:
        self._plan = plan
        self._environment = dict(os.environ if plan.environment is None else plan.environment)
        self._may_start = may_start
        self._started = started
        self._progress = progress
        self._waited_s = 0.0

    async def run(self) -> list[Report]:
        """All reports, in the order of the tests. A fault is a report, never an exception.

        Each test runs once. While the budget lasts each runs a second time, in processes of
        their own again, the noisy ones first: a kernel's time has been seen to differ more
        from one process to the next than within one.
        """
        passes = 2 if self._plan.repeat else 1
        found: dict[str, list[Report]] = {}
        took_s: dict[str, float] = {}
        for position, test in enumerate(self._plan.tests):
            started, waited_s = time.monotonic(), self._waited_s
            found[test] = await self._measure(test, position / passes)
            took_s[test] = time.monotonic() - started - (self._waited_s - waited_s)

        spent_s = sum(took_s.values())
        if self._plan.repeat:
            noisy_first = sorted(
                self._plan.tests, key=lambda test: not any(each.noisy for each in found[test])
            )
            for position, test in enumerate(noisy_first):
                if not _values(found[test]) or spent_s + took_s[test] > self._plan.budget_s:
                    continue

                spent_s += took_s[test]
                base = (len(self._plan.tests) + position) / passes
                second = await self._measure(test, base, skip=_failed(found[test]))
                found[test] = merged(found[test], second)

        self._tell(len(self._plan.tests), self._plan.tests[-1], None, 0.0, "done")
        return [report for test in self._plan.tests for report in found[test]]

    async def _measure(
        self,
        test: str,
        position: float,
        *,
        skip: tuple[int, ...] = (),
        driver: Driver | None = None,
    ) -> list[Report]:
        """Every device of a test, with a further process after each death.

        With a `driver` the loader opens only that one.
        """
        options = replace(self._plan.options(), skip=skip)
        environment = self._environment if driver is None else driver.alone(self._environment)
        reports: list[Report] = []
        while True:
            outcome = await self._process(test, position, options, environment)
            reports += outcome.reports
            if outcome.death is None:
                break

            if outcome.begun is None:
                # With reports there it died on its way out: what it had to say is said.
                reports = reports or [Report(test, None, (outcome.death,))]
                break

            reports.append(_dead(test, outcome.begun, outcome.death))
            if outcome.begun.index in options.skip:
                # It was told to leave this device alone: do not ask it for ever.
                break

            done = {each.subject.index for each in reports if each.subject is not None}
            options = replace(options, skip=tuple(sorted({*skip, *done})))

        trouble = _listing_trouble(reports)
        if trouble is None or driver is not None:
            return reports

        return await self._one_driver_at_a_time(test, position, skip, trouble) or reports

    async def _one_driver_at_a_time(
        self, test: str, position: float, skip: tuple[int, ...], trouble: Failure
    ) -> list[Report]:
        """After trouble before any device: which of the installed drivers is it?

        Empty when there is no choice of drivers, or when each one has the same trouble.
        """
        installed = drivers(test, self._environment)
        if len(installed) < 2:
            return []

        reports: list[Report] = []
        troubled = 0
        for driver in installed:
            found = await self._measure(test, position, driver=driver)
            # Each driver counts its own devices from 0.
            base = len(reports)
            for report in found:
                # A driver without a device on this machine is no finding.
                if report.subject is not None:
                    subject = replace(report.subject, index=base + report.subject.index)
                    reports.append(replace(report, subject=subject))

            failure = _listing_trouble(found)
            if failure is not None:
                troubled += (failure.domain, failure.code) == (trouble.domain, trouble.code)
                subject = Subject(driver.api, driver.name, base, library=driver.library)
                reports.append(_dead(test, subject, replace(failure, library=driver.library)))

        if troubled == len(installed):
            return []

        return [each for each in reports if each.subject and each.subject.index not in skip]

    async def _process(
        self,
        test: str,
        position: float,
        options: Options,
        environment: Mapping[str, str],
    ) -> Outcome:
        if self._may_start is not None:
            self._tell(position, test, None, 0.0, "waiting for a quiet moment")
            started = time.monotonic()
            await self._may_start(test)
            self._waited_s += time.monotonic() - started

        process = TestProcess(
            test,
            options,
            self._plan.limits,
            environment=environment,
            progress=lambda subject, done, text: self._tell(
                position, test, subject, done, text
            ),
            started=self._started,
        )
        try:
            return await process.run()
        except OSError as error:
            text = f"no test process could be started: {error}"
            return Outcome(death=own_failure(test, "NoSpace", text))

    def _tell(
        self, position: float, test: str, subject: Subject | None, done: float, text: str
    ) -> None:
        if self._progress is not None:
            share = (position + done / (2 if self._plan.repeat else 1)) / len(self._plan.tests)
            name = subject.name if subject else ""
            self._progress(Progress(test, name, min(share, 1.0), text))


async def run(
    plan: Plan,
    *,
    may_start: MayStart | None = None,
    started: OnStarted | None = None,
    progress: OnProgress | None = None,
) -> list[Report]:
    """`Runner(plan, ...).run()`."""
    runner = Runner(plan, may_start=may_start, started=started, progress=progress)
    return await runner.run()


def merged(first: list[Report], second: list[Report]) -> list[Report]:
    """Two passes of a test as one list: each device of the first with its values of both."""
    again = {_key(report): report for report in second if report.subject is not None}
    result = []
    for report in first:
        other = again.get(_key(report))
        if report.subject is None or other is None or not _values([report]):
            result.append(report)
            continue

        values = tuple(_merged(value, other.value(value.name)) for value in report.values)
        died = [f"second pass: {each.text}" for each in other.failures if not _values([other])]
        result.append(
            replace(
                report,
                values=values,
                notes=(*report.notes, "measured in two processes", *died),
                duration_s=report.duration_s + other.duration_s,
            )
        )

    return result


def _merged(first: Measured, second: Measured | None) -> Measured:
    """One value out of two passes.

    Of a quiet and a noisy one the quiet, of two noisy ones the quieter. Of two quiet ones the
    middle, with the spread that their samples have together: half of the gap, where that is
    larger than each one's own.
    """
    if not isinstance(first, Value) or not isinstance(second, Value):
        return first

    if first.noisy or second.noisy:
        return min(first, second, key=_unrest)

    median = (first.median + second.median) / 2
    spread = max(first.spread, second.spread, abs(first.median - second.median) / 2)
    return replace(
        first,
        median=median,
        spread=spread,
        samples=first.samples + second.samples,
        noisy=spread > NOISY_SHARE * abs(median),
    )


def _key(report: Report) -> tuple[str, int]:
    return (report.subject.api, report.subject.index) if report.subject else ("", -1)


def _values(reports: list[Report]) -> bool:
    """Whether there is a number among them at all."""
    return any(isinstance(value, Value) for report in reports for value in report.values)


def _failed(reports: list[Report]) -> tuple[int, ...]:
    """The devices that have no number: what killed one process is not run again."""
    return tuple(
        report.subject.index
        for report in reports
        if report.subject is not None and not _values([report])
    )


def _unrest(value: Value) -> tuple[bool, float]:
    return value.noisy, value.spread / abs(value.median) if value.median else 0.0


def _listing_trouble(reports: list[Report]) -> Failure | None:
    """What came in place of the list of devices: a driver's error, or a death.

    That no driver is usable is an answer, not trouble: our own `NoBackend`,
    VK_ERROR_INCOMPATIBLE_DRIVER (-9), CL_PLATFORM_NOT_FOUND_KHR (-1001), and -3 of a Vulkan
    loader that found no device.
    """
    if len(reports) != 1 or reports[0].subject is not None or not reports[0].failures:
        return None

    failure = reports[0].failures[0]
    return None if (failure.domain, failure.code) in _NO_DRIVER else failure


def _dead(test: str, subject: Subject, death: Failure) -> Report:
    failure = replace(death, library=death.library or subject.library)
    return Report(test, subject, (failure,))
