"""Streams a trace to whoever asked for it: the rows of the recorder, and sampled counters.

A client that does not read is not waited for: what its ring has no room for is counted as
dropped and told. Writing the trace's file is the client's work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Final

from switchgear.daemon.telemetry.recorder import Recorder, Watcher
from switchgear.ipc.errors import BadRequest

if TYPE_CHECKING:
    from switchgear.daemon.lane import Lane
    from switchgear.daemon.service import Service
    from switchgear.daemon.varlink_server import Call

MAX_SECONDS: Final = 3600
# Between two samples of the counters: twice within a breaker's tick of 100 ms.
SAMPLE_S: Final = 0.05
# Answers go out at least so often, so that a ring is never long behind.
ANSWER_S: Final = 0.25
# A client with this much unread gets nothing more until it reads.
MAX_BEHIND_BYTES: Final = 256 << 10
# After the trace's end, for what its client has not read yet.
LAST_LIMIT_S: Final = 10.0

# Values at this moment: track, unit and value. Called on the loop; must not block.
Counters = Callable[[], Iterable[tuple[str, str, float]]]


class Tracing:
    """`counters` may be added to by whoever has more to sample (temperatures)."""

    def __init__(self, service: Service, recorder: Recorder) -> None:
        self._service = service
        self._recorder = recorder
        self.counters: list[Counters] = []

    async def stream(self, call: Call, seconds: int) -> None:
        """Answers a call with `more` for `seconds`; the last reply comes when all is told.

        Ordinary users get the rows of their own sessions and their own workers' counters.

        :raises BadRequest: `seconds` is out of its range.
        :raises QuotaExceeded: as many traces as may run do.
        """
        if not 1 <= seconds <= MAX_SECONDS:
            raise BadRequest(f"seconds: {seconds} is not 1 to {MAX_SECONDS}")

        uid = call.peer.uid
        sees_all = self._service.is_operator(uid)
        watcher = self._recorder.watch(None if sees_all else uid)
        try:
            await self._follow(call, watcher, seconds, self._group(uid, sees_all=sees_all))
        finally:
            self._recorder.unwatch(watcher)

    def _group(self, uid: int, *, sees_all: bool) -> str | None:
        return None if sees_all else self._service.pool.group_of(uid)

    async def _follow(
        self, call: Call, watcher: Watcher, seconds: int, group: str | None
    ) -> None:
        # The first reply says that it has begun.
        call.reply(watcher.take(), continues=True)
        ends = {lane: lane.restarts for lane in self._lanes(group)}
        end = monotonic() + seconds
        answered = monotonic()
        while (now := monotonic()) < end:
            try:
                async with asyncio.timeout(min(SAMPLE_S, end - now)):
                    await watcher.wakeup.wait()
            except TimeoutError:
                self._sample(watcher, ends, group)

            due = watcher.wakeup.is_set() or monotonic() - answered >= ANSWER_S
            watcher.wakeup.clear()
            if due and watcher.waiting and call.connection.unsent_bytes < MAX_BEHIND_BYTES:
                call.reply(watcher.take(), continues=True)
                answered = monotonic()

        self._sample(watcher, ends, group)
        # What is in the ring now, not what comes meanwhile.
        self._recorder.unwatch(watcher)
        until = monotonic() + LAST_LIMIT_S
        last = watcher.take()
        while watcher.waiting and monotonic() < until:
            if call.connection.unsent_bytes >= MAX_BEHIND_BYTES:
                await asyncio.sleep(SAMPLE_S)
                continue

            call.reply(last, continues=True)
            last = watcher.take()

        last["dropped"] += watcher.left
        call.reply(last)

    def _lanes(self, group: str | None) -> list[Lane]:
        lanes = self._service.pool.lanes()
        return [lane for lane in lanes if group is None or lane.group == group]

    def _sample(self, watcher: Watcher, ends: dict[Lane, int], group: str | None) -> None:
        for lane in self._lanes(group):
            name = f"{lane.backend}/{lane.name} of {lane.group}"
            watcher.add_counter(f"queue {name}", "requests", lane.queued)
            watcher.add_counter(f"running {name}", "requests", lane.running)
            if lane.restarts > ends.get(lane, 0):
                watcher.add_event("workers", f"{name} ended", {"reason": lane.last_end})

            ends[lane] = lane.restarts

        for source in self.counters:
            for track, unit, value in source():
                watcher.add_counter(track, unit, value)
