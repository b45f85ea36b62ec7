"""What the protocol did, for those who want to hear of it: the last events, and subscribers."""

from __future__ import annotations

import asyncio
from collections import deque
from time import time
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from switchgear.daemon.protocol.answers import Event

KEPT_EVENTS: Final = 256
# Of one subscriber that does not read; the oldest go first, and it is told how many.
QUEUED_EVENTS: Final = 256

# Whether somebody may hear of a model by its hash; of "", which is none, everybody may.
Sees: TypeAlias = "Callable[[str], bool]"


class Subscription:
    """One listener's events in their order. Use it in `with`, so that it ends."""

    def __init__(self, events: Events, sees: Sees) -> None:
        self._events = events
        self._sees = sees
        self._queue: deque[dict[str, Any]] = deque(maxlen=QUEUED_EVENTS)
        self._news = asyncio.Event()
        self.lost = 0

    def put(self, model: str, event: dict[str, Any]) -> None:
        if not self._sees(model):
            return

        if len(self._queue) == QUEUED_EVENTS:
            self.lost += 1

        self._queue.append(event)
        self._news.set()

    async def next(self) -> dict[str, Any]:
        """The next event; waits for it."""
        while not self._queue:
            self._news.clear()
            await self._news.wait()

        return self._queue.popleft()

    def __enter__(self) -> Subscription:
        self._events.subscriptions.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._events.subscriptions.discard(self)


class Events:
    """Keeps the last events and passes each on. Nothing blocks."""

    def __init__(self) -> None:
        self._last: deque[tuple[str, dict[str, Any]]] = deque(maxlen=KEPT_EVENTS)
        self.subscriptions: set[Subscription] = set()
        self.listeners: list[Callable[[Event], None]] = []

    def last(self, sees: Sees) -> list[dict[str, Any]]:
        """The last events of what somebody may see."""
        return [packet for model, packet in self._last if sees(model)]

    def subscribe(self, sees: Sees) -> Subscription:
        return Subscription(self, sees)

    def tell(self, event: Event) -> None:
        name = event.target.name
        model = "" if isinstance(name, str) else name.model
        packet = to_json(event)
        self._last.append((model, packet))
        for subscription in self.subscriptions:
            subscription.put(model, packet)

        for listener in self.listeners:
            listener(event)


def to_json(event: Event) -> dict[str, Any]:
    """An event as the interface has it; `at` is seconds since 1970."""
    packet: dict[str, Any] = {
        "at": time(),
        "kind": event.kind,
        "level": event.target.level,
        "target": str(event.target),
        "before": event.before,
        "after": event.after,
        "cause": event.cause,
        "reason": event.reason,
        "text": str(event),
        "hold_s": round(event.hold_s, 1),
        "run_ms": round(event.run_ms, 3),
        "limit_ms": round(event.limit_ms, 3),
    }
    if event.temperature_mc is not None:
        packet["temperature_c"] = event.temperature_mc / 1000
        packet["temperature_kind"] = event.temperature_kind

    return packet
