"""What a session that was opened with `events=True` hears of the places where it may run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from switchgear.client.result import BACKENDS, PRECISIONS, name_of
from switchgear.ipc.event import WHOLE_SHARE, EventKind, EventRecord, State
from switchgear.ipc.record import NO_READING

KINDS: Final = tuple(kind.name.lower() for kind in EventKind)
STATES: Final = tuple(state.name.lower() for state in State)
# Places whose newest event is kept for an app that does not ask; the oldest go first.
KEPT_PLACES: Final = 64


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """How one place of the session stands now.

    `kind`: normal, shedding, tripped, degraded or recovering when its state is another than
    before, headroom when only its device's headroom crossed a step. `state` is the place's,
    `device_state` its device's. `share`: the part of the frames that it may be given, 0 to 1.
    `headroom_c`: how far the device is below its trip in °C, below zero above it; None without
    a reading, as is `temperature_age_ms`. `retry_after_ms`: how long a place that is shut stays
    so at least; 0 is not said. `number` counts changes: a gap is changes that this one
    replaced. `at_ns`: CLOCK_MONOTONIC.
    """

    kind: str
    backend: str
    precision: str
    state: str
    device_state: str
    share: float
    headroom_c: float | None
    temperature_age_ms: int | None
    retry_after_ms: int
    number: int
    epoch: int
    at_ns: int


def event_of(data: bytes) -> SessionEvent:
    """What an EVENT record says.

    :raises BadRecord: it is none.
    """
    told = EventRecord.unpack(data)
    age_ms, headroom_mc = told.temperature_age_ms, told.headroom_mc
    return SessionEvent(
        kind=name_of(KINDS, told.kind),
        backend=name_of(BACKENDS, told.backend),
        precision=name_of(PRECISIONS, told.precision),
        state=name_of(STATES, told.state),
        device_state=name_of(STATES, told.device_state),
        share=told.share / WHOLE_SHARE,
        headroom_c=None if headroom_mc is None else headroom_mc / 1000,
        temperature_age_ms=None if age_ms == NO_READING else age_ms,
        retry_after_ms=told.retry_after_ms,
        number=told.number,
        epoch=told.epoch,
        at_ns=told.at_ns,
    )


class Inbox:
    """Events that nobody has taken: the newest of each place, in the order of their arrival.

    Unless they are `wanted`, they are dropped. `on_news` is called for each one that is kept.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.on_news: Callable[[], object] = lambda: None
        self._newest: dict[tuple[str, str], SessionEvent] = {}

    def put(self, data: bytes) -> None:
        """Takes in an EVENT record."""
        if not self.wanted:
            return

        event = event_of(data)
        place = (event.backend, event.precision)
        self._newest.pop(place, None)
        self._newest[place] = event
        if len(self._newest) > KEPT_PLACES:
            del self._newest[next(iter(self._newest))]

        self.on_news()

    def take(self) -> SessionEvent | None:
        """The oldest that is left; None where there is none."""
        if not self._newest:
            return None

        return self._newest.pop(next(iter(self._newest)))
