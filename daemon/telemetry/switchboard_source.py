"""Metrics and trace rows of the switchboard: breakers, temperatures, which device is whose."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING, Final

from switchgear.daemon.protocol.topology import PairKey
from switchgear.daemon.telemetry.device_families import (
    BreakerRow,
    ZoneRow,
    backend_device_families,
    breaker_families,
    zone_families,
)

if TYPE_CHECKING:
    from switchgear.daemon.protocol.answers import Event
    from switchgear.daemon.service import Service
    from switchgear.daemon.switchboard.board import Switchboard
    from switchgear.daemon.telemetry.families import Family
    from switchgear.daemon.telemetry.recorder import Recorder

# Pairs whose breaker has moved since the start; the one that moved longest ago goes first.
MAX_PAIRS: Final = 64
_NO_CAUSE: Final = "unnamed"


class _Moves:
    """What one breaker did since the start."""

    __slots__ = ("phase", "probes", "trips")

    def __init__(self) -> None:
        self.phase = "closed"
        self.trips: Counter[str] = Counter()
        self.probes: Counter[str] = Counter()


class SwitchboardSource:
    """Counts the protocol's events as they come, and reads its states when somebody asks."""

    def __init__(self, service: Service, recorder: Recorder) -> None:
        self._service = service
        self._recorder = recorder
        self._places: dict[tuple[str, str], _Moves] = {}
        self._pairs: OrderedDict[PairKey, _Moves] = OrderedDict()

    def heard(self, event: Event) -> None:
        """One event of the protocol."""
        if self._recorder.on:
            self._record(event)

        if event.kind != "transition" or event.target.session:
            return

        moves = self._moves(event)
        moves.phase = event.after
        if event.after in ("open", "quarantined"):
            moves.trips[event.cause or _NO_CAUSE] += 1

        if event.before == "half_open" and event.after != "half_open":
            moves.probes["bad" if event.after in ("open", "quarantined") else "good"] += 1

    def _moves(self, event: Event) -> _Moves:
        level, name, _ = event.target
        if not isinstance(name, PairKey):
            return self._places.setdefault((level, name), _Moves())

        moves = self._pairs.get(name)
        if moves is None:
            moves = self._pairs[name] = _Moves()
            if len(self._pairs) > MAX_PAIRS:
                self._pairs.popitem(last=False)

        self._pairs.move_to_end(name)
        return moves

    def _record(self, event: Event) -> None:
        """Of a pair, for those who may see its model; of a device or a backend, for all."""
        name = event.target.name
        if isinstance(name, PairKey):
            digest = name.model
            self._recorder.event(
                "breakers",
                str(event),
                sees=lambda uid: any(
                    model.digest == digest for model in self._service.models.all_for(uid)
                ),
                cause=event.cause,
            )
        else:
            self._recorder.event("breakers", str(event), cause=event.cause)

    # At a scrape.

    def families(self, viewer: int | None) -> Iterator[Family]:
        """Nothing until the switchboard is up."""
        board = self._service.router.board
        if board is not None:
            yield from breaker_families(self._breakers(board, viewer))
            yield from zone_families(_zones(board))
            yield from backend_device_families(
                {backend: part.name for backend, part in board.parts.items()}
            )

    def _breakers(self, board: Switchboard, viewer: int | None) -> Iterator[BreakerRow]:
        protocol = board.protocol
        for name in dict.fromkeys(part.name for part in board.parts.values()):
            phase = protocol.device_state(name).breaker.phase
            yield self._row("device", name, phase)

        for name in board.parts:
            phase = protocol.backend_state(name).breaker.phase
            yield self._row("backend", name, phase)

        everything = viewer is None or self._service.is_operator(viewer)
        models = self._service.models.all_for(0 if everything or viewer is None else viewer)
        known = {model.digest for model in models}
        for key, moves in self._pairs.items():
            if key.model in known:
                trips, probes = dict(moves.trips), dict(moves.probes)
                yield BreakerRow("pair", str(key), moves.phase, trips, probes)

    def _row(self, level: str, name: str, phase: str) -> BreakerRow:
        moves = self._places.get((level, name))
        if moves is None:
            return BreakerRow(level, name, phase)

        return BreakerRow(level, name, phase, dict(moves.trips), dict(moves.probes))

    # While a trace runs.

    def counters(self) -> Iterator[tuple[str, str, float]]:
        """Each zone's temperature now."""
        board = self._service.router.board
        if board is not None:
            for row in _zones(board):
                yield f"zone {row.zone}", "C", row.temperature_mc / 1000


def _zones(board: Switchboard) -> Iterator[ZoneRow]:
    """Every sensor that has a temperature; of a sensor that no device is held against, the
    device is empty."""
    owners: dict[str, tuple[str, int]] = {}
    for name, heat in board.heats.items():
        for zone in heat.sensors.zones:
            owners.setdefault(zone, (name, heat.trip_mc))

    for state in board.watch.states(monotonic()):
        if state.temperature_mc is None:
            continue

        name, trip_mc = owners.get(state.zone.zone_id, ("", None))
        headroom_mc = None if trip_mc is None else trip_mc - state.temperature_mc
        age_s = state.age_ms / 1000
        yield ZoneRow(state.zone.zone_id, name, state.temperature_mc, age_s, headroom_mc)
