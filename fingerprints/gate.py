"""When a test may start: not while the device is hot, the machine busy or a request near.

The gate is asked before each test process. A machine that never rests is measured all the same
after a while, and its values carry the noisy flag; a hot device never is.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

# Share of the time in which some task waited for a CPU, from which on the machine counts as
# busy. Ours: an idle machine shows under 1 %, one busy process per CPU more than 30 %.
BUSY_SHARE: Final = 0.10
# The pressure is measured over this long: the kernel's own shortest average, 10 s, would still
# show the test before.
WINDOW_S: Final = 0.5
# No test starts within this time of a request.
REQUEST_GAP_S: Final = 0.1
# After this long without a gap the test runs all the same.
PATIENCE_S: Final = 600.0
POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Pressure:
    """The kernel's pressure stall information; `root` is where /proc is mounted."""

    root: Path = Path("/proc")

    def stalled_us(self, resource: str = "cpu") -> int | None:
        """Time in which at least one task waited for `cpu`, `memory` or `io`, since boot.

        None where the kernel does not tell (built without it, or not readable).
        """
        try:
            text = (self.root / "pressure" / resource).read_text()
        except OSError:
            return None

        found = re.search(r"^some .*\btotal=(\d+)", text, re.MULTILINE)
        return int(found[1]) if found else None


Sleep: TypeAlias = Callable[[float], Awaitable[None]]
Clock: TypeAlias = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Passed:
    """How a wait ended: `reason` is its last one, empty when there was none.

    `forced` says that the patience was over before the reason was.
    """

    waited_s: float
    reason: str = ""
    forced: bool = False


class Gate:
    """Waits for a moment at which a test disturbs nobody and nobody disturbs it.

    `hot` says why the device is too warm, empty while it is not. `idle_s` is the time since the
    last request, 0 while one is queued or runs. Both are called often and must not block. From
    a `busy_share` of 1 on the machine is never called busy. `tell` hears why a test waits.

    The patience is one for all waits: with a gate per run, that bounds the whole run, however
    many processes it has. Time in which the device is hot does not count.
    """

    def __init__(
        self,
        *,
        pressure: Pressure | None = None,
        hot: Callable[[], str] = lambda: "",
        idle_s: Callable[[], float] = lambda: float("inf"),
        patience_s: float = PATIENCE_S,
        busy_share: float = BUSY_SHARE,
        tell: Callable[[str], None] = lambda reason: None,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._pressure = pressure if pressure is not None else Pressure()
        self._hot = hot
        self._idle_s = idle_s
        self._patience_s = patience_s
        self._busy_share = busy_share
        self._tell = tell
        self._clock = clock
        self._sleep = sleep
        self._waited_s = 0.0

    async def wait(self) -> Passed:
        """Returns when a test may start, or when the patience is over."""
        started = self._clock()
        reason = ""
        while True:
            looked = self._clock()
            hot = self._hot()
            hindrance = hot or await self._hindrance()
            now = self._clock()
            if not hindrance:
                return Passed(now - started, reason)

            reason = hindrance
            self._tell(reason)
            if not hot and self._waited_s >= self._patience_s:
                return Passed(now - started, reason, forced=True)

            await self._sleep(POLL_S)
            if not hot:
                self._waited_s += self._clock() - looked

    async def _hindrance(self) -> str:
        """What else than heat is in the way at this moment, empty when nothing is."""
        busy_share = await self._measured_share() if self._busy_share < 1 else 0.0
        if busy_share > self._busy_share:
            return f"the machine is busy: tasks wait for a CPU {busy_share:.0%} of the time"

        # Last, for the other took time in which a request can have come.
        idle_s = self._idle_s()
        if idle_s <= 0:
            return "a request is queued or runs"

        return "" if idle_s >= REQUEST_GAP_S else f"a request came {idle_s * 1e3:.0f} ms ago"

    async def _measured_share(self) -> float:
        first = self._pressure.stalled_us()
        if first is None:
            return 0.0

        begin = self._clock()
        await self._sleep(WINDOW_S)
        second = self._pressure.stalled_us()
        elapsed_s = self._clock() - begin
        if second is None or elapsed_s <= 0:
            return 0.0

        return max(0, second - first) / 1e6 / elapsed_s
