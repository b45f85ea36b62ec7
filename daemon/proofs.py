"""Which backends run here: proven at the start, and again when one is absent or has changed.

What a driver consists of is looked at after a delay that grows to ten minutes, which costs some
hundred `stat`; a process that tries the driver is started only where something has changed,
where a backend runs only once the change is complete. Who asks (a reload, a job that prepares a
model, a worker that has found another driver) has it tried at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final

from switchgear.backends.driver_files import signature
from switchgear.daemon.presence import Facts, prove_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

# The first look at what was absent comes after this long, and each after twice the last delay.
FIRST_LOOK_S: Final = 5.0
LAST_LOOK_S: Final = 600.0
# Where nothing has changed since, an answer holds this long: a job may ask for many models.
FRESH_S: Final = 30.0

log = logging.getLogger(__name__)


class Proofs:
    """Use it on a running loop. `facts` has each installed backend but the CPU.

    `wanted` are those that are proven at all, `options_of` gives a backend's options.
    `on_proven` is called with each that was tried again and runs, and whether it was absent.
    """

    def __init__(
        self,
        installed: Iterable[str],
        wanted: Callable[[str], bool],
        options_of: Callable[[str], Mapping[str, Any]],
        limit_s: float,
        on_proven: Callable[[str, bool], None],
    ) -> None:
        self.facts = {name: Facts() for name in installed}
        for name, facts in self.facts.items():
            if not wanted(name):
                facts.state, facts.reason = "off", "the configuration does not want it"

        self._wanted = [name for name in self.facts if wanted(name)]
        self._options_of = options_of
        self._limit_s = limit_s
        self._on_proven = on_proven
        self._loop = asyncio.get_running_loop()
        self._signatures: dict[str, str] = {}
        # Of backends that run: what was seen at the last look, where that was something new.
        self._changing: dict[str, str] = {}
        # When each was proven last; one proof at a time.
        self._proven_s: dict[str, float] = {}
        self._turn = asyncio.Lock()
        self._asked = asyncio.Event()
        self._delay_s = FIRST_LOOK_S
        self._look_s = 0.0

    async def first(self) -> None:
        """Proves all that are wanted, one after the other."""
        for name in self._wanted:
            async with self._turn:
                await self._prove(name)

    async def run(self) -> None:
        """Looks after those that are absent or change, until it is cancelled."""
        while True:
            self._look_s = self._loop.time() + self._delay_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._look_s):
                    await self._asked.wait()

            # Whoever asks in the moment of the timeout is heard too.
            asked = self._asked.is_set()
            self._asked.clear()
            try:
                changed = [n for n in self._are("absent") if await self._is_due(n, asked)]
                changed += [n for n in self._are("present") if await self._changes(n, asked)]
            except Exception:
                log.exception("trying backends again")
                changed = []

            # More may follow soon: a package is installed file by file.
            self._delay_s = FIRST_LOOK_S if changed else min(2 * self._delay_s, LAST_LOOK_S)

    def ask_all(self) -> None:
        """Has all that are absent or have changed tried again, soon. Does not block."""
        self._asked.set()

    async def ask(self, name: str, *, force: bool = False, renew: bool = False) -> Facts:
        """Tries a backend that is absent once more, and waits; with `renew` one that runs, too:
        its driver may be another now. What was found a moment ago and cannot have changed, and
        what is known of others, is given as it is. With `force` it is tried in any case."""
        states = ("absent", "present") if renew else ("absent",)
        async with self._turn:
            facts = self.facts[name]
            if facts.state in states and (force or not await self._is_fresh(name)):
                facts = await self._try_again(name)

            return facts

    def outlook(self, name: str) -> str:
        """When an absent backend is tried again, for people."""
        left_s = max(0.0, self._look_s - self._loop.time())
        if not self.facts[name].settled:
            return f"tried again in {left_s:.0f} s"

        return (
            f"tried again when a driver's files change (next look in {left_s:.0f} s), "
            "at a reload, or by `switchgear prewarm`"
        )

    def _are(self, state: str) -> list[str]:
        return [name for name in self._wanted if self.facts[name].state == state]

    async def _is_due(self, name: str, asked: bool) -> bool:
        """Tries a backend again where there is a reason to; whether something had changed."""
        changed = await self._has_changed(name)
        if asked or changed or not self.facts[name].settled:
            await self.ask(name, force=True)

        return changed

    async def _changes(self, name: str, asked: bool) -> bool:
        """Tries a backend again that runs, once its files have changed and then stood still for
        one look, or somebody asks; whether they had changed."""
        now = await asyncio.to_thread(signature, self._options_of(name))
        last = self._changing.pop(name, None)
        if now == self._signatures.get(name):
            return False

        if asked or now == last:
            await self.ask(name, renew=True)
        else:
            self._changing[name] = now

        return True

    async def _has_changed(self, name: str) -> bool:
        now = await asyncio.to_thread(signature, self._options_of(name))
        return now != self._signatures.get(name)

    async def _is_fresh(self, name: str) -> bool:
        age_s = self._loop.time() - self._proven_s.get(name, -FRESH_S)
        settled = self.facts[name].settled
        return age_s < FRESH_S and settled and not await self._has_changed(name)

    async def _try_again(self, name: str) -> Facts:
        before = self.facts[name]
        facts = await self._prove(name)
        runs = before.state == "present"
        if runs and facts.state == "absent" and not facts.settled:
            # The moment's: what runs goes on.
            self.facts[name] = before
        elif facts.state == "present":
            if not runs:
                log.info("backend %s was absent and is there now", name)
            elif facts.key != before.key:
                log.info("backend %s has another driver now: %s", name, facts.key)

            self._on_proven(name, not runs)

        return self.facts[name]

    async def _prove(self, name: str) -> Facts:
        options = self._options_of(name)
        # Before the proof: what changes meanwhile is seen at the next look.
        self._signatures[name] = await asyncio.to_thread(signature, options)
        facts = self.facts[name] = await prove_backend(name, options, self._limit_s)
        self._proven_s[name] = self._loop.time()
        return facts
