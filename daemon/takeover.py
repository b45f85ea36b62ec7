"""Takes over what was prepared anew: a pair serves on with what it has until that is loaded.

In a worker shared with other models it is loaded beside what serves there, and the sessions'
arenas are given to it. What takes long to load gets a new worker of its own: each session moves
there once it is loaded, and the old worker ends behind the last one.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from switchgear.daemon.failure import Failure
from switchgear.daemon.lane import LOOK_AGAIN_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from switchgear.daemon.lane import Lane
    from switchgear.daemon.model import Model
    from switchgear.daemon.pair import Pair
    from switchgear.daemon.pool import Pool
    from switchgear.daemon.router import Target
    from switchgear.daemon.session import Session

log = logging.getLogger(__name__)


def own_prefix(model: Model) -> str:
    """How the names of all lanes begin that a model has for itself."""
    return model.digest[:12]


def own_lane_of(model: Model, pair: Pair) -> str:
    """The name of the lane of a pair that needs a worker of its own: what was prepared anew has
    another than what it replaces."""
    name = own_prefix(model)
    return f"{name}.{pair.generation}" if pair.generation else name


class Takeovers:
    """Use it on a running loop; nothing blocks."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        # By session, the places that it moves to once they are loaded.
        self._coming: dict[int, tuple[Target, ...]] = {}
        # The lane, pair and generation that the log named last.
        self._named: tuple[Lane, Pair, int] | None = None

    def places(self, session: Session, wanted: Iterable[Target]) -> tuple[Target, ...]:
        """Where a session's requests go now, of the places that it is to have: a pair keeps its
        old one until the worker of the new one has loaded."""
        before = {target.pair: target for target in session.targets if target.pair is not None}
        kept, coming, left = [], [], []
        for target in wanted:
            old = before.get(target.pair) if target.pair is not None else None
            if old is None or _is_same(old, target):
                kept.append(target)
            elif target.is_warm(session) or not old.is_warm(session):
                kept.append(target)
                left.append(old)
            else:
                kept.append(old)
                coming.append(target)

        if coming:
            self._coming[session.identity] = tuple(coming)
        else:
            self._coming.pop(session.identity, None)

        for old in left:
            self._loop.call_soon(self._leave, session, old)

        return tuple(kept)

    def coming(self, session: Session) -> tuple[Target, ...]:
        """The places that a session moves to once they are loaded."""
        return self._coming.get(session.identity, ())

    def forget(self, session: Session) -> None:
        """A session ended."""
        self._coming.pop(session.identity, None)

    def renewed(self, model: Model, pair: Pair) -> None:
        """A pair that was ready before was prepared anew: workers that other models share load
        it once more, and lanes of its own that nobody uses any more end."""
        for lane in self._pool.lanes():
            if lane.backend != pair.backend or model.instance is None:
                continue

            if lane.name.startswith(own_prefix(model)):
                self._end_if_left(lane, model)
            elif not pair.own_worker and lane.worker is not None:
                sessions = [s for s in lane.sessions if s.instance is model.instance]
                load = lane.worker.renew(model.instance, pair.number, sessions)
                if load is not None:
                    load.add_done_callback(partial(self._renewal_ended, lane, model, pair))

    def _renewal_ended(
        self, lane: Lane, model: Model, pair: Pair, load: asyncio.Future[Any]
    ) -> None:
        result = load.result()
        if isinstance(result, Failure):
            not_taken_over(model, pair, result)
        else:
            self.say(lane, model, pair, result)

    def say(self, lane: Lane, model: Model, pair: Pair, loaded: Mapping[str, Any]) -> None:
        """Logs which of what was prepared a lane's worker has loaded, once."""
        what = (lane, pair, pair.generation)
        if self._named != what:
            self._named = what
            log.info(
                "worker %s has taken over model %s on %s: artefact %s",
                *(
                    lane.label,
                    model.label,
                    pair.label,
                    loaded.get("artefact") or "without name",
                ),
            )

    def _leave(self, session: Session, old: Target) -> None:
        """A session has moved: what it had in its old place goes, once nothing waits there."""
        lane, instance = old.lane, session.instance
        if lane.queued:
            self._loop.call_later(LOOK_AGAIN_S, self._leave, session, old)
            return

        here = [each for each in self._all(session) if each.lane is lane]
        if not session.ended and not any(_is_same(each, old) for each in here):
            if lane.worker is not None:
                lane.worker.unbind(session.identity, [old.precision])

            if not here:
                lane.sessions.discard(session)

        used = any(
            other.instance is instance and _is_same(each, old)
            for other in lane.sessions
            for each in self._all(other)
        )
        if not used and lane.worker is not None:
            lane.worker.unload(instance.identity, [old.precision])

        self._end_if_left(lane, session.model)

    def _all(self, session: Session) -> tuple[Target, ...]:
        return (*session.targets, *self.coming(session))

    def _end_if_left(self, lane: Lane, model: Model) -> None:
        """Ends a lane of a model's own that its pairs do not go to any more."""
        current = {
            own_lane_of(model, pair)
            for pair in model.pairs.values()
            if pair.own_worker and pair.backend == lane.backend
        }
        is_own = lane.name.startswith(own_prefix(model))
        if not is_own or lane.name in current or lane.sessions:
            return

        if lane.is_idle:
            self._pool.end(lane)
        else:
            self._loop.call_later(LOOK_AGAIN_S, self._end_if_left, lane, model)


def not_taken_over(model: Model, pair: Pair, failure: Failure) -> None:
    """A worker could not load what was prepared anew; what it has serves on."""
    log.warning("model %s on %s: not taken over: %s", model.label, pair.label, failure.text)
    pair.reason = f"what was prepared anew is not loaded, the one before serves: {failure.text}"


def _is_same(one: Target, other: Target) -> bool:
    return one.lane is other.lane and one.precision == other.precision
