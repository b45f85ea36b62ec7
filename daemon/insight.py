"""What people may know of the switchboard: devices, decisions, events; the operator's word."""

from __future__ import annotations

import json
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from switchgear.ipc.errors import BadRequest, NoBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from switchgear.daemon.routing.ring import Entry
    from switchgear.daemon.service import Service
    from switchgear.daemon.switchboard.board import Switchboard

WORDS: Final = ("auto", "isolated", "forced")
LEVELS: Final = ("device", "backend")
MAX_DECISIONS: Final = 256


def devices(service: Service) -> list[dict[str, Any]]:
    """Each physical part once, whatever the number of APIs through which it is seen."""
    board = service.router.board
    if board is None:
        return []

    now_s = monotonic()
    rows = []
    for name in dict.fromkeys(part.name for part in board.parts.values()):
        backends = [b for b, part in board.parts.items() if part.name == name]
        heat = board.heats[name]
        reading = board.watch.reading(name, now_s)
        row: dict[str, Any] = {
            "name": name,
            "kind": board.parts[backends[0]].kind,
            "description": next(
                (api.name for b in backends for api in board.parts[b].apis if api.name), ""
            ),
            "backends": backends,
            "state": board.device_state(name),
            "reading": reading.kind,
            "trip_c": heat.trip_mc / 1000,
            "recover_c": heat.recover_mc / 1000,
            "limit_source": heat.source,
            "zones": list(heat.sensors.zones),
            "energy": board.energy_source(name),
        }
        if reading.temperature_mc is not None:
            row["temperature_c"] = round(reading.temperature_mc / 1000, 2)
            row["age_ms"] = round(reading.age_ms, 1)
            row["slope_c_per_min"] = round(reading.slope_mc_per_s * 60 / 1000, 3)

        rows.append(row)

    return rows


def sees_model(service: Service, uid: int) -> Callable[[str], bool]:
    """Whether a user may hear of a model by its hash: of an own one, or one of everybody."""
    if service.is_operator(uid):
        return lambda _: True

    def sees(digest: str) -> bool:
        return not digest or any(m.digest == digest for m in service.models.all_for(uid))

    return sees


def board_of(service: Service) -> Switchboard:
    """:raises NoBackend: it is not up yet."""
    board = service.router.board
    if board is None:
        raise NoBackend("the backends are still being proven", retry_after_ms=1000)

    return board


def decisions(
    service: Service, uid: int, last: int, session: int | None, request: int | None
) -> list[dict[str, Any]]:
    """The newest decisions that this user may see, the oldest first; of one session, or one
    request of it, where that is named.

    :raises NoBackend: nothing has been decided yet.
    """
    board = board_of(service)
    sees_all = service.is_operator(uid)
    found: list[dict[str, Any]] = []
    for entry in reversed(list(board.ring)):
        number = entry.request >> 32
        if session is not None and number != session:
            continue

        if request is not None and entry.request & 0xFFFFFFFF != request & 0xFFFFFFFF:
            continue

        if sees_all or board.owner_of(number) == uid:
            found.append(_decision(entry, board))
            if len(found) >= last:
                break

    return found[::-1]


def _decision(entry: Entry, board: Switchboard) -> dict[str, Any]:
    from switchgear.daemon.routing.explain import explain
    from switchgear.daemon.routing.policies import BY_NUMBER
    from switchgear.daemon.routing.ring import dump

    text = explain(entry, board.causes_of(entry.request >> 32))
    policy = BY_NUMBER[entry.inputs.policy]
    if policy.energy or policy.power:
        keys = [row.key for row in entry.inputs.rows]
        text += "; energy: " + ", ".join(f"{key} {board.energy_source(key)}" for key in keys)

    return {
        "session": entry.request >> 32,
        "request": entry.request & 0xFFFFFFFF,
        "ago_s": round(monotonic() - entry.inputs.now_s, 3),
        "text": text,
        "record": json.loads(list(dump([entry]))[1]),
    }


def operate(service: Service, level: str, name: str, word: str) -> None:
    """Takes the operator's word on a device or a backend.

    :raises BadRequest: no such device or backend.
    """
    from switchgear.daemon.protocol.topology import Target

    board = board_of(service)
    try:
        board.protocol.operator(Target(level, name), word, monotonic())  # type: ignore[arg-type]
    except KeyError:
        raise BadRequest(f"no {level} {name[:64]!r}") from None

    board.tell()
