"""Which backends run here: each is proven in a process of its own, which then ends.

A library that is there proves nothing: a backend is present when a run gave a known answer.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from switchgear.daemon.failure import Failure
from switchgear.daemon.worker_process import Events, WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Mapping

# Its kernels may have to be compiled: 20 s on a software driver.
PROOF_LIMIT_S: Final = 120.0
_NICENESS: Final = 19

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Facts:
    """What is known of a backend. `state` is unknown, present, absent or off (not wanted);
    `reason` is what ran, or why not. `identity` is what its results depend on."""

    state: str = "unknown"
    reason: str = "its known-answer run has not ended"
    engine: str = ""
    engine_version: str = ""
    identity: dict[str, str] = field(default_factory=dict)
    # It was the backend that said so: a timeout or a death may be the moment's.
    settled: bool = True

    @property
    def key(self) -> str:
        """One string for the engine, the device and the driver."""
        parts = (f"{name}={value}" for name, value in sorted(self.identity.items()))
        return " ".join((self.engine, self.engine_version, *parts))


async def prove_backend(
    name: str, options: Mapping[str, Any], limit_s: float = PROOF_LIMIT_S
) -> Facts:
    """Starts a worker at low priority, has it run something with a known answer, ends it.

    Never raises but for a cancellation, at which the worker is killed.
    """

    def none(*_: object) -> None:
        pass

    low = {**options, "niceness": _NICENESS}
    try:
        worker = WorkerProcess(name, low, f"{name}/proof", Events(none, none, none))
    except OSError as error:
        text = f"no process can be started: {error.strerror}"
        return Facts("absent", text, settled=False)

    try:
        async with asyncio.timeout(limit_s):
            answer = await worker.probe()
    except TimeoutError:
        worker.kill(f"no known answer within {limit_s:g} s")
        answer = {"ok": False}
    except asyncio.CancelledError:
        worker.kill("asked to")
        await asyncio.wait([worker.ended])
        raise

    facts = Facts(engine=worker.engine, engine_version=worker.engine_version)
    if answer.get("ok") is True:
        facts.state, facts.reason = "present", str(answer.get("text"))
        facts.identity = {
            str(key): str(value) for key, value in dict(answer.get("identity") or {}).items()
        }
        worker.close()
    else:
        facts.state = "absent"
        facts.reason = _why(answer, worker)
        facts.settled = worker.absent is not None or "domain" in answer
        worker.close()

    return await _ended(worker, facts)


async def _ended(worker: WorkerProcess, facts: Facts) -> Facts:
    """Waits for the process, by force where closing its socket does not end it."""
    try:
        async with asyncio.timeout(2.0):
            await asyncio.shield(worker.ended)
    except TimeoutError:
        worker.force()

    log.info("backend %s is %s: %s", worker.backend, facts.state, facts.reason)
    return facts


def _why(answer: Mapping[str, Any], worker: WorkerProcess) -> str:
    failure = worker.absent
    if failure is None and "domain" in answer:
        failure = Failure.from_packet(dict(answer))

    if failure is not None:
        return f"{failure.domain}:{failure.code} {failure.name}: {failure.text}"

    return str(answer.get("text") or worker.end_reason or "it gave no answer")
