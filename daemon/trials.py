"""Tries a pair: preparers one after the other, while nothing stands against it.

They stand still while requests run, while the device is hot and while memory is short.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Final

from switchgear.backends import driver_caches
from switchgear.backends.crash_marker import CrashMarkers
from switchgear.daemon.preparer_process import Preparer, failed
from switchgear.daemon.pressure import memory_is_short
from switchgear.daemon.staging import discard, publish, stage
from switchgear.daemon.yielding import Yielding
from switchgear.ipc.errors import UnknownModel

if TYPE_CHECKING:
    from switchgear.daemon.config import Configuration
    from switchgear.daemon.model import Model
    from switchgear.daemon.pair import Pair
    from switchgear.daemon.pool import Pool
    from switchgear.daemon.verdicts import Verdict

# How often a hot device, or one short of memory, is looked at again.
LOOK_AGAIN_S: Final = 1.0
# A driver that ends the process is asked once more.
ATTEMPTS: Final = 2
# Of a timeline; a search for kernels has one for each.
MAX_STEPS: Final = 256


@dataclass(frozen=True, slots=True)
class Order:
    """What to try: `tune_s` is the time for a search of faster kernels; `say` hears of each
    step; `is_loaded` tells whether the model is still there, and its descriptor with it."""

    model: Model
    pair: Pair
    tune_s: float
    say: Callable[[str], None]
    is_loaded: Callable[[], bool]


class Trials:
    """Use it on a running loop, for one pair at a time.

    `hot` says why the device is too warm to work in the background, or None.
    """

    def __init__(
        self, configuration: Configuration, state_dir: Path, pool: Pool, cache_dir: Path
    ) -> None:
        self._configuration = configuration
        self._pool = pool
        self._cache_dir = cache_dir
        self._markers = state_dir / "markers"
        self._begin_ns = 0
        self.hot: Callable[[], str | None] = lambda: None

    async def run(self, order: Order) -> Verdict:
        """How it ended. The files of a pair that serves are left alone until what replaces them
        was checked. Cancelled, it ends its preparer first."""
        folder = Path(order.model.cache)
        order.pair.timeline = []
        self._begin_ns = monotonic_ns()
        if not order.pair.ready:
            return await self._try_in(folder, order)

        staged = folder
        try:
            staged = await asyncio.to_thread(stage, folder)
            verdict = await self._try_in(staged, order)
            if verdict["ok"] and order.is_loaded():
                await asyncio.to_thread(publish, staged, folder)
        except OSError as error:
            return _errno(error)
        finally:
            if staged is not folder:
                await asyncio.shield(asyncio.to_thread(discard, staged))

        return verdict

    async def _try_in(self, folder: Path, order: Order) -> Verdict:
        """Runs preparers until one gives a verdict or the second has died."""
        verdict: Verdict = {}
        for _ in range(ATTEMPTS):
            verdict = await self._try_once(folder, order, again=False)
            if not verdict.get("died"):
                break

            # A damaged cache of its driver may be why; it is made again.
            await asyncio.to_thread(driver_caches.clear, self._cache_dir, order.pair.backend)

        if not verdict["ok"]:
            return verdict

        # Once more in a new process, as a worker will do it: what lies in the caches is right,
        # and how long that takes.
        warm = await self._try_once(folder, order, again=True)
        if not warm["ok"]:
            return warm

        return {
            **verdict,
            "warm_load_us": warm["load_us"],
            "warm_first_run_us": warm["first_run_us"],
            "run_us": warm["run_us"],
            "artefact": warm["artefact"],
        }

    async def _try_once(self, folder: Path, order: Order, *, again: bool) -> Verdict:
        pair, settings = order.pair, self._configuration.prepare
        while reason := self._why_not_now():
            order.say(f"waiting: {reason}")
            await asyncio.sleep(LOOK_AGAIN_S)

        steps: list[tuple[str, int]] = []

        def step(name: str) -> None:
            label = f"{name}, warm" if again else name
            if len(steps) < MAX_STEPS:
                steps.append((label, (monotonic_ns() - self._begin_ns) // 1000))

            order.say(label)

        try:
            await asyncio.to_thread(os.makedirs, folder, mode=0o700, exist_ok=True)
            if not order.is_loaded():
                # Its descriptor may be another file's by now.
                return failed(UnknownModel.code, "UnknownModel", "the model was unloaded")

            preparer = Preparer(
                order.model,
                pair,
                self._configuration.backend_options(pair.backend),
                cache=folder,
                markers=self._markers,
                tune_s=0.0 if again else order.tune_s,
                again=again,
                on_step=step,
            )
        except OSError as error:
            return _errno(error)

        try:
            with Yielding(self._pool) as yielding:
                yielding.started(preparer)
                watch = asyncio.create_task(self._rest(preparer))
                try:
                    verdict = await preparer.verdict(settings.time_limit_s + order.tune_s)
                finally:
                    watch.cancel()
        except asyncio.CancelledError:
            # We end it, no driver does: that is no mark against one.
            await preparer.close()
            await asyncio.to_thread(CrashMarkers(self._markers).forgive, preparer.pid)
            raise
        finally:
            await preparer.close()

        ends = [at for _, at in steps[1:]] + [(monotonic_ns() - self._begin_ns) // 1000]
        pair.timeline += [
            (name, at, end - at)
            for (name, at), end in zip(steps, ends[: len(steps)], strict=True)
        ]
        return verdict

    # Heat and pressure.

    def _why_not_now(self) -> str | None:
        if reason := self.hot():
            return reason

        return "memory is short" if memory_is_short() else None

    async def _rest(self, preparer: Preparer) -> None:
        """Keeps a preparer still while the device is hot or short of memory."""
        resting = False
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            wanted = self._why_not_now() is not None
            if wanted != resting:
                resting = wanted
                preparer.rest(resting)


def _errno(error: OSError) -> Verdict:
    return failed(error.errno or 5, "", f"{error.filename}: {error.strerror}", "errno")
