"""A client of the overload benchmark: a process that offers requests at times of its own.

The times are a Poisson process's, whatever becomes of the requests: an open loop, so that a
slow daemon is not offered less.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from time import monotonic
from typing import Any, Final

import numpy as np

from switchgear.client import aio
from switchgear.ipc.errors import Busy, SlotBusy, SwitchgearError

SLOTS: Final = 16
# Whatever is not answered this long after the end of a phase is counted as lost.
PATIENCE_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Role:
    """What one client offers: `rate` requests a second of a model, in `sessions` sessions of 16
    slots; `deadline_ms` 0 for none."""

    name: str
    model: str
    priority: str
    rate: float
    sessions: int = 1
    deadline_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """One request that was answered: `outcome` is `ok` or the error's name. `client_ms` is from
    the submission to the answer as the client sees them, the others are the daemon's."""

    outcome: str
    client_ms: float
    total_ms: float = 0.0
    queue_ms: float = 0.0
    run_ms: float = 0.0
    late: bool = False


@dataclass(slots=True)
class Tally:
    """What became of a client's requests. `unsent` found every slot in use; `runs` is what a
    stateful model counted, 0 for another."""

    role: Role
    sent: int = 0
    unsent: int = 0
    lost: int = 0
    runs: int = 0
    ended: list[Ended] = field(default_factory=list)

    def of(self, outcome: str) -> list[Ended]:
        return [one for one in self.ended if one.outcome == outcome]


def offer(
    path: str, role: Role, seed: int, ready: Event, begin: Event, duration_s: float, out: Any
) -> None:
    """The process: offers for `duration_s` once `begin` is set; puts its Tally into `out`, or
    the error that ended it."""
    try:
        out.put(asyncio.run(_offer(path, role, seed, ready, begin, duration_s)))
    except SwitchgearError as error:
        out.put(f"{role.name}: {error.name}: {error}")


async def _offer(
    path: str, role: Role, seed: int, ready: Event, begin: Event, duration_s: float
) -> Tally:
    tally = Tally(role)
    async with await aio.connect(path) as client:
        model = await client.describe(role.model)
        inputs = {tensor.name: np.ones(tensor.shape, np.float32) for tensor in model.inputs}
        sessions = [
            await client.open_session(role.model, SLOTS, priority=role.priority)
            for _ in range(role.sessions)
        ]
        # The first frame of each is its worker's and its arena's, not the lane's.
        for session in sessions:
            await session.run(inputs)

        ready.set()
        await asyncio.to_thread(begin.wait)
        tasks = await _send(tally, sessions, inputs, random.Random(seed), duration_s)
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=PATIENCE_S)
            tally.lost = len(pending)
            for task in pending:
                task.cancel()

        if role.name == "counter":
            tally.runs = await _count(sessions[0], inputs)

        for session in sessions:
            await session.close()

    return tally


async def _count(session: aio.Session, inputs: dict[str, Any]) -> int:
    """The runs that the stateful model counted, without the first frame and this one."""
    while True:
        try:
            result = await session.run(inputs, copy=True)
        except Busy:
            # The other clients' requests still fill the queue.
            await asyncio.sleep(0.05)
        else:
            return int(np.asarray(result["total"]).flat[0]) - 2


async def _send(
    tally: Tally,
    sessions: list[aio.Session],
    inputs: dict[str, Any],
    chance: random.Random,
    duration_s: float,
) -> set[asyncio.Task[None]]:
    tasks: set[asyncio.Task[None]] = set()
    begin_s = due_s = monotonic()
    turn = 0
    while True:
        due_s += chance.expovariate(tally.role.rate)
        if due_s - begin_s > duration_s:
            return tasks

        await asyncio.sleep(max(0.0, due_s - monotonic()))
        for _ in sessions:
            turn += 1
            try:
                request = await sessions[turn % len(sessions)].submit(
                    inputs, deadline_ms=tally.role.deadline_ms or None
                )
            except SlotBusy:
                continue

            tally.sent += 1
            tasks.add(asyncio.create_task(_take(tally, request, monotonic())))
            break
        else:
            tally.unsent += 1


async def _take(tally: Tally, request: aio.Request, sent_s: float) -> None:
    try:
        result = await request.result()
    except SwitchgearError as error:
        tally.ended.append(Ended(error.name, 1000 * (monotonic() - sent_s)))
    else:
        tally.ended.append(
            Ended(
                "ok",
                1000 * (monotonic() - sent_s),
                result.total_ms,
                result.queue_ms,
                result.run_ms,
                result.late,
            )
        )
