"""Brings the stored profile up to date: what is stale is measured, the rest is kept.

Used by the daemon in the background and by the command line without a daemon. Nothing blocks
the event loop: files are read and written in a thread, tests run in processes of their own.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from switchgear.fingerprints import runner
from switchgear.fingerprints.assemble import assemble
from switchgear.fingerprints.key import current_key, stale_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from switchgear.fingerprints.profile import Profile
    from switchgear.fingerprints.runner import MayStart, OnProgress, Plan
    from switchgear.fingerprints.store import ProfileStore
    from switchgear.fingerprints.zones_model import Zone


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
    progress: OnProgress | None = None,
    clock: Callable[[], float] = time.time,
) -> Refreshed:
    """Measures the stale tests of `plan`, all of them with `force`, and stores the result.

    A bad stored profile, or a folder that cannot be written, is a problem in the answer and
    never an exception: the profile is still there for this run. Cancelling ends the test that
    runs and stores nothing.
    """
    loaded = await asyncio.to_thread(store.load)
    problems: list[str] = []
    if loaded.problem is not None:
        place = f"; set aside as {loaded.problem.set_aside}" if loaded.problem.set_aside else ""
        problems.append(f"the stored fingerprint is not used: {loaded.problem.text}{place}")

    if loaded.migrated_from is not None:
        problems.append(
            f"the stored fingerprint was migrated from schema {loaded.migrated_from}"
        )

    old = loaded.profile
    libraries = (plan.delegate,) if plan.delegate else ()
    key = await asyncio.to_thread(
        current_key, npu_libraries=libraries, environment=plan.environment
    )
    stale = stale_parts(old.key if old else None, key, tests=plan.tests, force=force)
    reports = []
    if stale:
        with store.measuring() as leased:
            if not leased:
                problems.append("another process is measuring this machine now")
                return Refreshed(old, stale, tuple(problems), measured_elsewhere=True)

            reports = await runner.run(
                replace(plan, tests=tuple(stale)), may_start=may_start, progress=progress
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
        problems.append(f"the fingerprint could not be stored ({problem.kind}): {problem.text}")

    return Refreshed(profile, stale, tuple(problems), saved=problem is None)
