"""Brings the stored profile up to date: what is stale is measured, the rest is kept.

Used by the daemon in the background and by the command line without a daemon. Nothing blocks
the event loop: files are read and written in a thread, tests run in processes of their own.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from switchgear.fingerprints import runner
from switchgear.fingerprints.assemble import assemble
from switchgear.fingerprints.key import current_key, stale_parts, with_effort
from switchgear.fingerprints.measurement import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from switchgear.fingerprints.profile import Key, Profile
    from switchgear.fingerprints.runner import MayStart, OnProgress, OnStarted, Plan
    from switchgear.fingerprints.store import Loaded, ProfileStore
    from switchgear.fingerprints.zones_model import Zone

_NO_ROOM: Final = ("switchgear", "NoSpace")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the caller knows of the machine and hands down: its zones and the operator's word.

    `operator_c` are throttle thresholds in degrees Celsius by device id or kind.
    """

    zones: Sequence[Zone] = ()
    excluded_zones: Sequence[str] = ()
    operator_c: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refreshed:
    """The outcome. `stale` says per test why it was measured, `problems` are sentences to log.

    `profile` is None only when another process is measuring and there was no profile before.
    """

    profile: Profile | None
    stale: Mapping[str, tuple[str, ...]]
    problems: tuple[str, ...] = ()
    saved: bool = False
    measured_elsewhere: bool = False


async def refresh(
    store: ProfileStore,
    plan: Plan,
    surroundings: Surroundings,
    *,
    force: bool = False,
    may_start: MayStart | None = None,
    started: OnStarted | None = None,
    progress: OnProgress | None = None,
    clock: Callable[[], float] = time.time,
) -> Refreshed:
    """Measures the stale tests of `plan`, all of them with `force`, and stores the result.

    A bad stored profile, or a folder that cannot be written, is a problem in the answer and
    never an exception: the profile is still there for this run. `may_start`, `started` and
    `progress` are as for `Runner`. Cancelling ends the test that
    runs and stores nothing.
    """
    # The lease comes before the look: what another process measured meanwhile is seen.
    with store.measuring() as leased:
        loaded = await asyncio.to_thread(store.load)
        problems = told(loaded)
        old = loaded.profile
        key, stale = await asyncio.to_thread(staleness, old, plan, force=force)
        if not leased:
            problems.append("another process is measuring this machine now")
            return Refreshed(old, stale, tuple(problems), measured_elsewhere=True)

        reports = []
        if stale:
            tests = tuple(test for test in plan.tests if test in stale)
            reports = await runner.run(
                replace(plan, tests=tests),
                may_start=may_start,
                started=started,
                progress=progress,
            )

        profile = assemble(
            reports,
            key=key,
            measured_at=int(clock()),
            old=old,
            zones=surroundings.zones,
            excluded_zones=surroundings.excluded_zones,
            operator_c=surroundings.operator_c,
        )
        if profile == old and loaded.migrated_from is None:
            return Refreshed(profile, stale, tuple(problems))

        problem = await asyncio.to_thread(store.save, profile)
        if problem is not None:
            text = f"the fingerprint could not be stored ({problem.kind}): {problem.text}"
            problems.append(text)

        return Refreshed(profile, stale, tuple(problems), saved=problem is None)


def staleness(
    old: Profile | None, plan: Plan, *, force: bool = False
) -> tuple[Key, dict[str, tuple[str, ...]]]:
    """The machine's key now, and the tests of `plan` that it makes stale, each with why.

    Reads files only; blocks on the disk for some 10 ms.
    """
    libraries = (plan.delegate,) if plan.delegate else ()
    now = current_key(npu_libraries=libraries, environment=plan.environment)
    key = with_effort(now, quick=plan.quick)
    stale = stale_parts(old.key if old else None, key, tests=plan.tests, force=force)
    stale |= {test: why for test, why in _not_run(old).items() if test in plan.tests}
    return key, stale


def told(loaded: Loaded) -> list[str]:
    """What is to be said of a stored profile, as sentences for the log."""
    if loaded.problem is not None:
        aside = loaded.problem.set_aside
        place = f"; set aside as {aside}" if aside else ""
        return [f"the stored fingerprint is not used: {loaded.problem.text}{place}"]

    if loaded.migrated_from is not None:
        return [f"the stored fingerprint was of schema {loaded.migrated_from}: migrated"]

    return []


def _not_run(old: Profile | None) -> dict[str, tuple[str, ...]]:
    """Tests that found no room for a process of their own last time: that says nothing of the
    device, unlike every other failure, which is kept until its part changes."""
    return {
        entry.test: (f"could not be run: {value.text}",)
        for entry in (old.measurements if old else ())
        for value in entry.values
        if isinstance(value, Failure) and (value.domain, value.code_name) == _NO_ROOM
    }
