"""Prepares models on every backend behind the CPU: the queue, and how each pair ended.

One pair at a time, in a process that compiles, runs and checks it at the lowest priority, that
stands still while requests run, and that ends; its verdict is kept by model, engine, device and
driver. What is ready then loads warm in the workers that serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from switchgear.backends.cache_store import trim
from switchgear.daemon.pair import ASKED, Pair, check_pair_verdict, is_lasting, reason_of
from switchgear.daemon.presence import PROOF_LIMIT_S, Facts
from switchgear.daemon.proofs import Proofs
from switchgear.daemon.trials import Order, Trials
from switchgear.daemon.verdicts import Verdicts
from switchgear.ipc.errors import NotPrepared, UnknownModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from switchgear.daemon.config import Configuration
    from switchgear.daemon.failure import Failure
    from switchgear.daemon.jobs import Job
    from switchgear.daemon.model import Model
    from switchgear.daemon.pool import Pool

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Item:
    """A pair in the queue; `ended` is set once it is ready or not."""

    model: Model
    pair: Pair
    tune_s: float = 0.0
    again: bool = False
    # A worker has said that what was prepared does not fit: its driver may be another now.
    renew: bool = False
    # Jobs that wait for it, and whether it is there for them only.
    followers: int = 0
    asked_for: bool = False
    # The pair's state and reason before; None where there was no such pair.
    before: tuple[str, str] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    listeners: list[Callable[[str], None]] = field(default_factory=list)

    def say(self, step: str) -> None:
        """Tells what its preparer does now."""
        self.pair.step = step
        for listener in self.listeners:
            listener(step)

    def undo(self) -> None:
        """It was given up: the pair is what it was."""
        pair, key = self.pair, (self.pair.backend, self.pair.asked)
        pair.step = ""
        if self.before is not None:
            pair.state, pair.reason = self.before
        elif self.model.pairs.get(key) is pair:
            del self.model.pairs[key]


class Preparing:
    """Use it on a running loop. `on_change` is called for each pair that is ready, or that was
    and is not any more. `models` are those whose prepared files are in use.
    """

    def __init__(
        self,
        configuration: Configuration,
        state_dir: Path,
        pool: Pool,
        cache_dir: Path,
        installed: Sequence[str],
        models: Callable[[], Sequence[Model]],
        on_change: Callable[[Model, Pair], None],
    ) -> None:
        self._configuration = configuration
        self._settings = configuration.prepare
        self._cache_dir = cache_dir
        self._models = models
        self._on_change = on_change
        self.trials = Trials(configuration, state_dir, pool, cache_dir)
        self.verdicts = Verdicts(state_dir / "pairs.json", check_pair_verdict)
        self.proofs = Proofs(
            sorted(name for name in installed if name != "cpu"),
            self._is_wanted,
            configuration.backend_options,
            min(PROOF_LIMIT_S, self._settings.time_limit_s),
            self._is_proven,
        )
        self._pool = pool
        # Hears of each backend that was absent and runs now.
        self.on_present: Callable[[str], None] = lambda _: None
        self._queue: deque[Item] = deque()
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._proven = asyncio.Event()
        self._present: Item | None = None
        self._work: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        if not self._settings.enabled:
            self._proven.set()
            self._idle.set()

    # Life.

    def begin(self) -> None:
        """Proves the backends and prepares what is queued, from now on."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Ends what runs and waits for it; what is not prepared is left."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

        await asyncio.to_thread(self.verdicts.flush)
        for item in self._all():
            item.ended.set()

    @property
    def backends(self) -> Mapping[str, Facts]:
        """What is known of each installed backend but the CPU."""
        return self.proofs.facts

    @property
    def enabled(self) -> bool:
        return self._settings.enabled

    def _is_wanted(self, backend: str) -> bool:
        chosen = self._settings.backends
        return self._settings.enabled and (not chosen or backend in chosen)

    async def idle(self) -> None:
        """Waits until nothing is to be prepared."""
        await self._idle.wait()

    async def proven(self) -> None:
        """Waits until it is known which backends run here."""
        await self._proven.wait()

    # What is wanted.

    def model_loaded(self, model: Model) -> None:
        """Queues a model on every backend, in the usual precisions. Does not block."""
        if not self._settings.enabled or model.state:
            return

        asked = [one for one in ASKED if one[0] in self.backends]
        known = {backend for backend, _ in ASKED}
        asked += [(name, "auto") for name in self.backends if name not in known]
        for backend, precision in asked:
            if self._is_wanted(backend) and (backend, precision) not in model.pairs:
                self._add(Item(model, Pair(backend, precision)))

    def model_gone(self, model: Model) -> None:
        """A model was unloaded: what is queued of it is given up. Does not block."""
        for item in [item for item in self._all() if item.model is model]:
            self._give_up(item)

    def _all(self) -> list[Item]:
        return [*self._queue, *([self._present] if self._present is not None else [])]

    def _item_of(self, pair: Pair) -> Item | None:
        return next((item for item in self._all() if item.pair is pair), None)

    def _give_up(self, item: Item) -> None:
        if item is self._present:
            # It says so once its preparer has ended.
            if self._work is not None:
                self._work.cancel()
        elif item in self._queue:
            self._queue.remove(item)
            item.undo()
            item.ended.set()

    def want(
        self,
        model: Model,
        backend: str,
        precision: str,
        *,
        tune_s: float = 0.0,
        again: bool = False,
    ) -> Item:
        """Queues one pair before all others, or the one that waits for it already."""
        pair = model.pairs.get((backend, precision)) or Pair(backend, precision)
        waiting = self._item_of(pair)
        if waiting is not None and not again and not tune_s:
            return waiting

        item = Item(model, pair, tune_s, again)
        if pair.ready and not again and not tune_s:
            item.ended.set()
            return item

        self._add(item, first=True)
        return item

    def _want_for_job(
        self, model: Model, backend: str, precision: str, tune_s: float, *, again: bool
    ) -> Item:
        known = set(self._all())
        item = self.want(model, backend, precision, tune_s=tune_s, again=again)
        item.asked_for = item.asked_for or item not in known
        item.followers += 1
        return item

    async def follow_all(
        self,
        job: Job,
        model: Model,
        backends: Sequence[str],
        precision: str,
        *,
        tune_s: float = 0.0,
        again: bool = False,
    ) -> None:
        """Wants a model on these backends, all of them where none is named, and waits.

        `precision` "auto" means what is usual for each backend.
        """
        wanted = []
        for name in self.backends:
            if name in backends or (not backends and self._is_wanted(name)):
                usual = tuple(asked for backend, asked in ASKED if backend == name)
                wanted += [
                    (name, asked)
                    for asked in ((usual or ("auto",)) if precision == "auto" else (precision,))
                ]

        items = [
            self._want_for_job(model, name, asked, tune_s, again=again)
            # The last one is put first.
            for name, asked in reversed(wanted if not model.state else [])
        ]
        try:
            await self._follow(job, items[::-1])
        finally:
            for item in items:
                item.followers -= 1
                if item.asked_for and not item.followers and not item.ended.is_set():
                    # Nobody waits for it any more.
                    self._give_up(item)

        if model not in self._models():
            raise UnknownModel(f"model {model.label} was unloaded")

    async def _follow(self, job: Job, items: Sequence[Item]) -> None:
        """Waits until pairs are prepared, and tells a job's watchers of each step."""
        for number, item in enumerate(items):
            label = f"{item.model.label} on {item.pair.label}"

            def say(step: str, label: str = label, number: int = number) -> None:
                job.progress(f"{label}: {step}", number, len(items))

            if not item.ended.is_set():
                item.listeners.append(say)
                say(item.pair.step or "waiting")
                try:
                    await item.ended.wait()
                finally:
                    item.listeners.remove(say)

        job.progress("done", len(items), len(items))

    def load_failed(self, model: Model, pair: Pair, failure: Failure) -> None:
        """A serving worker cannot load what was prepared: it is prepared anew, once for each
        driver."""
        log.warning("model %s on %s: %s", model.label, pair.label, failure.text)
        pair.state, pair.reason = "failed", failure.text
        if not pair.prepared_again:
            pair.prepared_again = True
            item = self.want(model, pair.backend, pair.asked, again=True)
            item.renew = (failure.domain, failure.code) == ("switchgear", NotPrepared.code)

        self._on_change(model, pair)

    def _add(self, item: Item, *, first: bool = False) -> None:
        key = (item.pair.backend, item.pair.asked)
        if key in item.model.pairs:
            item.before = (item.pair.state, item.pair.reason)

        item.model.pairs[key] = item.pair
        if not item.pair.ready:
            item.pair.state = "waiting"

        (self._queue.appendleft if first else self._queue.append)(item)
        self._idle.clear()
        self._news.set()

    # The one that works.

    async def _run(self) -> None:
        if not self._settings.enabled:
            return

        await self.proofs.first()
        self._proven.set()
        looks = asyncio.create_task(self.proofs.run())
        try:
            await self._empty_queue()
        finally:
            looks.cancel()
            await asyncio.wait([looks])

    def _is_proven(self, backend: str, was_absent: bool) -> None:
        """A backend was tried again and runs: what waited for it is prepared, and what came out
        with another driver, good or bad, is tried anew. The CPU serves meanwhile."""
        if was_absent:
            self.on_present(backend)

        identity, has_changed = self.backends[backend].identity, False
        for model in self._models():
            for pair in [pair for pair in model.pairs.values() if pair.backend == backend]:
                if pair.identity not in (None, identity):
                    has_changed = True
                    self._outdate(model, pair)
                elif pair.state != "absent":
                    continue

                if self._item_of(pair) is None:
                    self._add(Item(model, pair))

        if has_changed:
            self._pool.renew(backend)

    def _outdate(self, model: Model, pair: Pair) -> None:
        """What is known of a pair was found with another driver than the one that is there."""
        model.forgive_on(pair.backend)
        if pair.ready:
            pair.state, pair.reason = "waiting", "its driver is another now"
            self._on_change(model, pair)

    async def _empty_queue(self) -> None:
        while True:
            while self._queue:
                self._present = self._queue.popleft()
                self._work = asyncio.create_task(self._prepare(self._present))
                try:
                    # Given up, it alone is cancelled.
                    await asyncio.wait([self._work])
                except asyncio.CancelledError:
                    self._work.cancel()
                    await asyncio.wait([self._work])
                    raise
                finally:
                    self._present = self._work = None

            self._idle.set()
            self._news.clear()
            await self._news.wait()

    async def _prepare(self, item: Item) -> None:
        model, pair = item.model, item.pair
        facts = self.backends.get(pair.backend, Facts("absent", "it is not installed"))
        try:
            if item.renew or (facts.state == "absent" and item.followers):
                item.say("trying the driver")
                facts = await self.proofs.ask(pair.backend, renew=item.renew)

            if facts.state in ("absent", "off"):
                self._is_absent(item, facts)
            else:
                await self._decide(item, facts)
                if self.backends[pair.backend].identity != facts.identity:
                    # Its driver was replaced meanwhile.
                    self._add(Item(model, pair))
        except asyncio.CancelledError:
            item.undo()
            raise
        except Exception:
            log.exception("preparing %s on %s", model.label, pair.label)
            pair.state, pair.reason = "failed", "a fault of the daemon; its log says more"
        finally:
            item.ended.set()

    def _is_absent(self, item: Item, facts: Facts) -> None:
        """New processes do not get a pair's backend; what serves has it still."""
        pair, was_ready = item.pair, item.pair.ready
        pair.step = ""
        if was_ready and not item.again:
            pair.reason = f"the one before serves: {facts.reason}"
            return

        pair.state, pair.reason = "absent", facts.reason
        if was_ready:
            self._on_change(item.model, pair)

    @staticmethod
    def _key(item: Item, facts: Facts) -> str:
        return f"{item.model.digest} {item.pair.backend} {item.pair.asked} {facts.key}"

    async def _decide(self, item: Item, facts: Facts) -> None:
        """Takes a pair's verdict from the kept ones or from a preparer."""
        model, pair, key = item.model, item.pair, self._key(item, facts)
        verdict = None if item.again or item.tune_s else self.verdicts.get(key)
        fresh, was_ready = verdict is None, pair.ready
        if verdict is None:
            if not was_ready:
                pair.state = "preparing"

            verdict = await self.trials.run(self._order_of(item))
            await self._bound_caches()
            if was_ready and item.tune_s and not verdict["ok"]:
                # Of the search this was said: what serves was checked, and is as it was.
                pair.step, pair.reason = "", f"the one before serves: {reason_of(verdict)}"
                log.warning("model %s on %s: %s", model.label, pair.label, pair.reason)
                return

            if is_lasting(verdict):
                self.verdicts.keep(key, verdict)

        before = pair.generation
        pair.apply(verdict, facts.identity, fresh=fresh)
        if pair.ready:
            log.info("model %s is ready on %s", model.label, pair.label)
        else:
            log.warning("model %s on %s: %s", model.label, pair.label, pair.reason)

        if (pair.ready or was_ready) and model in self._models():
            self._on_change(model, pair)
            if pair.generation != before:
                for other in _twins(model, pair):
                    other.follow(pair)
                    self._on_change(model, other)

    def _order_of(self, item: Item) -> Order:
        model = item.model
        return Order(model, item.pair, item.tune_s, item.say, lambda: model in self._models())

    async def _bound_caches(self) -> None:
        """Removes what was not used for longest, where all caches together are too large."""
        limit = self._settings.cache_mib << 20
        keep = [Path(model.cache) for model in self._models()]
        trimmed = await asyncio.to_thread(trim, self._cache_dir, limit, keep)
        if trimmed.removed:
            log.info("caches: %d of them removed, for their bound", len(trimmed.removed))


def _twins(model: Model, pair: Pair) -> list[Pair]:
    """Those that were asked for otherwise and came out the same."""
    return [
        other
        for other in model.pairs.values()
        if other is not pair
        and other.ready
        and (other.backend, other.precision) == (pair.backend, pair.precision)
    ]
