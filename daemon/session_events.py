"""Events for the sessions that asked for them: EVENT records on their own sockets, which say
how each of their places stands.

An event never takes the room of a reply. It is sent only while few records lie unread in the
socket, and only where the replies of all slots, a refusal and the GOAWAY would still fit behind
it. Until then one note for each place waits, and what is sent in the end is the state of that
moment: a client that does not read costs no memory and no waiting.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import socket
import termios
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

from switchgear.ipc.event import WHOLE_SHARE, EventKind, EventRecord, State
from switchgear.ipc.record import NO_READING, RECORD_BYTES, Backend, Priority

if TYPE_CHECKING:
    from collections.abc import Iterable

    from switchgear.daemon.protocol.answers import Event
    from switchgear.daemon.protocol.machine import Protocol
    from switchgear.daemon.protocol.reading import Reading
    from switchgear.daemon.protocol.topology import PairKey
    from switchgear.daemon.router import Router
    from switchgear.daemon.session import Session
    from switchgear.daemon.switchboard.board import Switchboard
    from switchgear.daemon.switchboard.place import Row

# A device's headroom is told when it falls to one of these, in °C below its trip: far enough to
# plan, then where reading gets close (10 °C), then the last steps.
HEADROOM_STEPS_C: Final = (20.0, 15.0, 10.0, 5.0, 2.0, 0.0)
# A step is left this far above it: more than a sensor's quantum and noise.
HEADROOM_BAND_C: Final = 1.0
# So many records may lie unread beside one for each slot; further events wait.
AHEAD_RECORDS: Final = 8
# Behind an event the socket has room for a reply of each slot, and these: a refusal and GOAWAY.
LAST_WORDS: Final = 2
# A client that does not read is looked at again after this time.
RETRY_S: Final = 0.2
# Sessions that are told in one turn of the loop: requests go in between.
SESSIONS_A_TURN: Final = 32

_STATES: Final = {state.name.lower(): int(state) for state in State}
_NORMAL: Final = int(State.NORMAL)
_HEADROOM: Final = int(EventKind.HEADROOM)
_LOW: Final = int(Priority.BATCH)
_LONGEST_MS: Final = 2**32 - 1


class Stand(NamedTuple):
    """How a place stands, as far as a change of it is told. `share` is in thousandths, `step`
    the number of headroom steps that its device has fallen to."""

    state: int
    device_state: int
    share: int
    step: int


# What a client takes for granted of a place that it has heard nothing of.
UNTOLD: Final = Stand(_NORMAL, _NORMAL, WHOLE_SHARE, 0)


def step_of(headroom_c: float | None, before: int) -> int:
    """The number of steps that a headroom has fallen to, given that of `before`; 0 without."""
    if headroom_c is None:
        return 0

    fallen = sum(headroom_c <= step_c for step_c in HEADROOM_STEPS_C)
    kept = sum(headroom_c <= step_c + HEADROOM_BAND_C for step_c in HEADROOM_STEPS_C)
    return max(fallen, min(before, kept))


def unread_bytes(sock: socket.socket) -> int:
    """What of the bytes sent on a Unix socket the other end has not received, as the kernel
    counts it against the send buffer: with its own overhead.

    :raises OSError: the socket is closed.
    """
    count = array.array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, count)
    return count[0]


def record_cost_bytes() -> int:
    """What one unread record counts: the kernel's overhead differs between machines.

    :raises OSError: no descriptor is free.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.send(bytes(RECORD_BYTES))
        return unread_bytes(ours)


class Listener:
    """One session that asked for events. Made by `SessionEvents.subscribe`."""

    def __init__(self, events: SessionEvents, session: Session, sock: socket.socket) -> None:
        """The socket stays the session's, which calls `close` before it closes it."""
        self._events = events
        self._session = session
        self._sock = sock
        self._buffer_bytes = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        # By place: the last seen, and the last told. As many as the model has pairs.
        self._seen: dict[PairKey, Stand] = {}
        self._told: dict[PairKey, Stand] = {}
        self._pending: dict[PairKey, None] = {}
        self._changes = 0

    @property
    def waits(self) -> bool:
        """Whether something is to be told that the socket had no room for."""
        return bool(self._pending)

    def close(self) -> None:
        self._events.forget(self)

    def concerns(self, event: Event) -> bool:
        """Whether an event of the protocol is about one of the session's own places."""
        level, name, session = event.target
        if session not in (0, self._session.identity):
            return False

        if level == "device":
            return any(row.place.device == name for row in self._rows)

        if level == "backend":
            return any(row.place.key.backend == name for row in self._rows)

        return any(row.place.key == name for row in self._rows)

    def is_on(self, device: str) -> bool:
        return any(row.place.device == device for row in self._rows)

    def has_model(self, digest: str) -> bool:
        return self._session.model.digest == digest

    @property
    def _rows(self) -> list[Row]:
        seat = self._session.seat
        return seat.rows if seat is not None else []

    def tell(self, board: Switchboard, now_s: float) -> None:
        """Looks at the places, and sends what has changed as far as there is room."""
        rows = {row.place.key: row for row in self._rows}
        for key, row in rows.items():
            stand = self._stand(board, row, now_s)
            if stand is None:
                continue

            if stand != self._seen.get(key, UNTOLD):
                self._seen[key] = stand
                self._changes += 1
                self._pending[key] = None

            if stand == self._told.get(key, UNTOLD):
                # It is back where it was before anybody could be told.
                self._pending.pop(key, None)

        for key in list(self._pending):
            if key not in rows:
                # It serves no more; whether it ever does again is told then.
                del self._pending[key]
            elif not self._send(board, rows[key], now_s):
                return

    def _stand(self, board: Switchboard, row: Row, now_s: float) -> Stand | None:
        """None where the pair was removed."""
        key, device = row.place.key, row.place.device
        state: str = board.pair_state(key.model, key.backend, key.precision)
        if not state:
            return None

        seat = self._session.seat
        own = self._session.identity if seat is not None and seat.limits is not None else 0
        among = [other.place.key for other in self._rows]
        answer = board.protocol.admit(key, now_s, session=own, among=among)
        if answer.state != "normal" and state != "degraded":
            # What the session's own limits say, or that low priorities wait.
            state = answer.state

        share = answer.share if answer.allowed else 0.0
        if answer.shed_low and self._session.options.priority == _LOW:
            share = 0.0

        return Stand(
            _STATES[state],
            _STATES[board.device_state(device)],
            round(share * WHOLE_SHARE),
            self._events.step(device),
        )

    def _send(self, board: Switchboard, row: Row, now_s: float) -> bool:
        """Whether a place's state could be sent, or need not be any more."""
        if not self._has_room():
            return False

        key = row.place.key
        stand, told = self._seen[key], self._told.get(key, UNTOLD)
        kind = _HEADROOM if stand[:-1] == told[:-1] else stand.state
        event = self._record(board, row, stand, kind, now_s)
        try:
            self._sock.send(event, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            # Its end is the session's to find.
            return True

        self._told[key] = stand
        del self._pending[key]
        return True

    def _has_room(self) -> bool:
        cost, slots = self._events.cost_bytes, self._session.options.slots
        try:
            unread = unread_bytes(self._sock)
        except OSError:
            return False

        behind = unread + (1 + slots + LAST_WORDS) * cost
        return unread < (slots + AHEAD_RECORDS) * cost and behind <= self._buffer_bytes

    def _record(
        self, board: Switchboard, row: Row, stand: Stand, kind: int, now_s: float
    ) -> bytes:
        key, device = row.place.key, row.place.device
        reading = board.watch.reading(device, now_s)
        age_ms = NO_READING
        if reading.temperature_mc is not None:
            age_ms = max(0, int(reading.age_ms))

        return EventRecord(
            kind=kind,
            backend=getattr(Backend, key.backend.upper(), Backend.OTHER),
            precision=row.target.precision,
            state=stand.state,
            device_state=stand.device_state,
            share=stand.share,
            headroom_mc=self._events.headroom_mc(device, reading),
            temperature_age_ms=age_ms,
            retry_after_ms=self._retry_after_ms(board.protocol, key, device, now_s),
            number=self._changes,
            epoch=self._session.epoch,
            at_ns=round(now_s * 1e9),
        ).pack()

    def _retry_after_ms(
        self, protocol: Protocol, key: PairKey, device: str, now_s: float
    ) -> int:
        """How long a place that is shut stays so at least; 0 where that is not known."""
        breakers = [
            protocol.device_state(device).breaker,
            protocol.backend_state(key.backend).breaker,
            protocol.pair_state(key).breaker,
        ]
        with contextlib.suppress(KeyError):
            # Where the session has limits of its own, and they have met a frame.
            breakers.append(protocol.pair_state(key, self._session.identity).breaker)

        untils_s = [b.until_s for b in breakers if b.phase in ("open", "quarantined")]
        left_ms = (max(untils_s, default=now_s) - now_s) * 1000
        return int(max(0.0, min(left_ms, _LONGEST_MS)))


class SessionEvents:
    """All sessions that asked for events. Use it on a running loop; nothing blocks."""

    def __init__(self, router: Router) -> None:
        # Of one unread record; measured for the first that asks.
        self.cost_bytes = 0
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._listeners: dict[Listener, None] = {}
        # To be told in the next turns, and those that waited for room at the last.
        self._due: dict[Listener, None] = {}
        self._full: dict[Listener, None] = {}
        self._turn_is_near = False
        self._retry: asyncio.TimerHandle | None = None
        self._steps: dict[str, int] = {}

    def subscribe(self, session: Session) -> None:
        """Tells a session that has its socket how its places stand, where that is not normal,
        and then each change. Ends with the session.

        :raises OSError: no descriptor is free, or the kernel does not say what is unread.
        """
        sock = session.data_socket
        if sock is None or session.ended:
            return

        if not self.cost_bytes:
            self.cost_bytes = record_cost_bytes()

        session.listener = listener = Listener(self, session, sock)
        self._listeners[listener] = None
        self._is_due([listener])

    def forget(self, listener: Listener) -> None:
        for kept in (self._listeners, self._due, self._full):
            kept.pop(listener, None)

    # What happens.

    def heard(self, event: Event) -> None:
        """The protocol did something."""
        self._is_due([one for one in self._listeners if one.concerns(event)])

    def measured(self, device: str, reading: Reading) -> None:
        """A new reading of a device."""
        headroom_mc = self.headroom_mc(device, reading)
        headroom_c = None if headroom_mc is None else headroom_mc / 1000
        before = self._steps.get(device, 0)
        step = step_of(headroom_c, before)
        if step != before:
            self._steps[device] = step
            self._is_due([one for one in self._listeners if one.is_on(device)])

    def changed(self, digest: str | None = None) -> None:
        """The places of a model's sessions are others now; those of all without a model."""
        self._is_due(
            [one for one in self._listeners if digest is None or one.has_model(digest)]
        )

    def headroom_mc(self, device: str, reading: Reading) -> int | None:
        """From a reading of a device to its trip; None where one of the two is not known."""
        board = self._router.board
        heat = board.heats.get(device) if board is not None else None
        if heat is None or reading.temperature_mc is None:
            return None

        return heat.trip_mc - reading.temperature_mc

    def step(self, device: str) -> int:
        """How many of the headroom steps a device has fallen to."""
        return self._steps.get(device, 0)

    # Turns of the loop.

    def _is_due(self, listeners: Iterable[Listener]) -> None:
        self._due.update(dict.fromkeys(listeners))
        if self._due and not self._turn_is_near:
            # What happens until then is told as one.
            self._turn_is_near = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_is_near = False
        board = self._router.board
        if board is None:
            # When it is up, `changed` is called.
            self._due.clear()
            return

        now_s = monotonic()
        for listener in list(self._due)[:SESSIONS_A_TURN]:
            del self._due[listener]
            listener.tell(board, now_s)
            if listener.waits:
                self._full[listener] = None
            else:
                self._full.pop(listener, None)

        self._is_due(())
        if self._full and self._retry is None:
            self._retry = self._loop.call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        full, self._full = self._full, {}
        self._is_due(full)
