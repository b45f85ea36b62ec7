"""Probes of what was tripped: a run with a known answer, on the device itself.

The kernel of the backend's own probe first, then the pair's golden input; in a worker that is
there, else in a new one. Its lease bounds it; a worker that hangs in it is ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
from time import monotonic
from typing import TYPE_CHECKING, Final

from switchgear.daemon import warming
from switchgear.daemon.child import Child, describe_end
from switchgear.daemon.takeover import own_lane_of
from switchgear.ipc.errors import NotPrepared
from switchgear.ipc.record import Precision, Priority

if TYPE_CHECKING:
    from switchgear.daemon.lane import Lane
    from switchgear.daemon.model import Model
    from switchgear.daemon.models import Models
    from switchgear.daemon.pool import Pool
    from switchgear.daemon.protocol.answers import Probe

# For a worker that has to be started and loaded first.
START_LIMIT_S: Final = 30.0
# Kernels of our own, with explicit memory barriers and known answers.
CANARIES: Final = {
    "vulkan": "switchgear.backends.canary",
    "opencl": "switchgear.backends.canary_opencl",
}
MAX_CANARY_BYTES: Final = 65536

log = logging.getLogger(__name__)


class Prober:
    """Runs probes in the workers of `pool`. Use it on a running loop."""

    def __init__(self, pool: Pool, models: Models) -> None:
        self._pool = pool
        self._models = models
        self._starting: set[asyncio.Task[None]] = set()

    async def run(self, probe: Probe) -> bool | None:
        """Whether the device gave the right answers; None where no worker could be had."""
        lane, model = self._lane(probe)
        if not await self._is_ready(lane, probe, model):
            return None

        left_s = max(0.5, probe.deadline_s - monotonic())
        worker = lane.worker
        if worker is None:
            return None

        try:
            async with asyncio.timeout(left_s):
                wrong = await self._canary(probe.backend)
                if wrong:
                    log.warning("probe of %s: %s", probe.target, wrong)
                    return False

                answer = await worker.probe()
                instance = model.instance if model is not None else None
                if answer.get("ok") is True and instance is not None:
                    answer = await worker.check(instance, _number(probe))
        except TimeoutError:
            if not lane.running:
                worker.kill(f"hung in a probe for {left_s:.1f} s")

            return False
        except OSError as error:
            # No process or descriptor is free: that says nothing of the device.
            log.warning("probe of %s: not run: %s", probe.target, error)
            return None

        if answer.get("name") == NotPrepared.__name__:
            # Its files were removed, or it is too large for one: the kernels' word stands.
            log.info("probe of %s: %s", probe.target, answer.get("text"))
            return True

        if answer.get("ok") is not True:
            log.warning("probe of %s: %s", probe.target, answer.get("text"))

        return answer.get("ok") is True

    async def _is_ready(self, lane: Lane, probe: Probe, model: Model | None) -> bool:
        """Whether a worker has loaded what is probed, within half of the lease. One that takes
        longer goes on getting ready: the next probe finds it."""
        task = asyncio.create_task(self._get_ready(lane, probe, model))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        half_s = max(0.1, (probe.deadline_s - monotonic()) / 2)
        done, _ = await asyncio.wait([task], timeout=half_s)
        if not done:
            log.info("probe of %s: its worker is not ready yet", probe.target)
            return False

        error = task.exception()
        if error is not None:
            log.info("probe of %s: no worker: %s", probe.target, error)

        return error is None

    def stop(self) -> None:
        """Gives up workers that are still being got ready."""
        for task in list(self._starting):
            task.cancel()

    async def _canary(self, backend: str) -> str:
        """What is wrong with our own kernels on a backend's device; empty where nothing is, or
        where there are none. They run in a process of their own."""
        module = CANARIES.get(backend)
        if module is None:
            return ""

        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        child = Child(
            module, ["--json"], [], ended.set_result, capture_limit_bytes=MAX_CANARY_BYTES
        )
        try:
            status = await asyncio.shield(ended)
        finally:
            child.kill()

        return "" if status == 0 else f"{module}: {describe_end(status)} {child.stderr[-200:]}"

    def _lane(self, probe: Probe) -> tuple[Lane, Model | None]:
        """The lane that serves the pair, of whatever group; else one of the daemon's own."""
        model = None
        if probe.pair is not None:
            digest = probe.pair.model
            model = next((m for m in self._models.all_for(0) if m.digest == digest), None)

        lanes = [
            lane
            for lane in self._pool.lanes()
            if lane.backend == probe.backend and lane.worker is not None
        ]
        if model is not None and model.instance is not None and probe.pair is not None:
            for lane in lanes:
                worker = lane.worker
                if worker is not None and worker.has_loaded(model.instance, _number(probe)):
                    return lane, model

        if lanes and model is None:
            return lanes[0], None

        own = ""
        if model is not None and probe.pair is not None:
            for pair in model.pairs.values():
                known = pair.backend == probe.backend and pair.precision == probe.pair.precision
                if known and pair.own_worker:
                    own = own_lane_of(model, pair)

        uid = os.geteuid()
        return self._pool.lane(uid, probe.backend, Priority.NORMAL, own), model

    @staticmethod
    async def _get_ready(lane: Lane, probe: Probe, model: Model | None) -> None:
        async with asyncio.timeout(START_LIMIT_S):
            if model is not None and model.instance is not None and probe.pair is not None:
                await warming.load(lane, model.instance, _number(probe))
            else:
                await lane.start().spoken.wait()


def _number(probe: Probe) -> int:
    """The record's number of the probed pair's precision; 0 on the CPU."""
    if probe.pair is None or probe.pair.precision == "auto":
        return 0

    return int(Precision[probe.pair.precision.upper()])
