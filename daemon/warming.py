"""Brings a lane's worker up for real work: its known-answer run, and its models loaded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from switchgear.daemon.failure import Failure
from switchgear.daemon.recovery import MAX_ATTEMPTS
from switchgear.daemon.restarts import RESTART_FIRST_S
from switchgear.ipc.errors import NoBackend, WorkerDied

if TYPE_CHECKING:
    from switchgear.daemon.instances import Instance
    from switchgear.daemon.lane import Lane
    from switchgear.daemon.worker_process import WorkerProcess

# Who waits for a restart comes just after it.
RESTART_MARGIN_S: Final = 0.01
PROOF_ATTEMPTS: Final = 4


async def prove(lane: Lane) -> dict[str, Any]:
    """A worker's known-answer run; once more, after a moment, when the worker dies."""
    answer: dict[str, Any] = {}
    for attempt in range(PROOF_ATTEMPTS):
        if attempt:
            await asyncio.sleep(RESTART_FIRST_S * 2**attempt)

        try:
            worker = await _started(lane)
        except NoBackend as error:
            answer = {"ok": False, "text": error.text}
            continue

        try:
            async with asyncio.timeout(lane.start_limit_s):
                answer = await worker.probe()
        except TimeoutError:
            worker.kill(f"no known answer within {lane.start_limit_s:g} s")
            answer = {"ok": False, "text": worker.end_reason}

        if answer.get("ok") is True or (worker.state == "ready" and answer):
            break

    return answer


async def load(lane: Lane, instance: Instance, precision: int = 0) -> dict[str, Any]:
    """Loads an instance in a lane's worker and waits for it; once more when the worker dies.

    :raises SwitchgearError: the backend refuses it, or two workers died of it.
    """
    for attempt in range(MAX_ATTEMPTS):
        result = await _load_in(lane, await _started(lane), instance, precision)
        if not isinstance(result, Failure):
            return result

        if result.code != WorkerDied.code or attempt == MAX_ATTEMPTS - 1:
            raise result.to_error(f"model {instance.model.label}")

    raise WorkerDied(f"loading {instance.model.label}")


async def _started(lane: Lane) -> WorkerProcess:
    """`Lane.start`, after the delay where one is due.

    :raises NoBackend: as `Lane.start`, but for the delay.
    """
    if lane.worker is None and (wait_s := lane.restart_wait_s()):
        await asyncio.sleep(wait_s + RESTART_MARGIN_S)

    return lane.start()


async def _load_in(
    lane: Lane, worker: WorkerProcess, instance: Instance, precision: int
) -> dict[str, Any] | Failure:
    loaded = worker.load(instance, precision)
    while True:
        try:
            async with asyncio.timeout(lane.start_limit_s):
                return await asyncio.shield(loaded)
        except TimeoutError:
            # Behind a long run it waits; the run has its own limit.
            if not lane.running:
                label = instance.model.label
                worker.kill(f"it did not load {label} in {lane.start_limit_s:g} s")
