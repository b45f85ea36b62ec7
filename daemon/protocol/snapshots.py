"""What of the protocol outlives the process: hold levels, quarantines, crash marks.

Openness does not: a device that is still warm starts open by its first reading.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from switchgear.daemon.protocol.breaker import NEVER, quarantined, top_level
from switchgear.daemon.protocol.pair_state import PairState, settled
from switchgear.daemon.protocol.topology import PairKey

if TYPE_CHECKING:
    from switchgear.daemon.protocol.constants import Constants
    from switchgear.daemon.protocol.records import BackendRecord, DeviceRecord, PairRecord

SCHEMA: Final = 1
# Kept quarantines of pairs that are not loaded now; the oldest go first.
KEPT_PAIRS: Final = 1024


class KeptPair:
    """A quarantine, or the hold level, of a pair. `until_s` is of this process's clock."""

    __slots__ = ("cause", "hold_level", "until_s")

    def __init__(self, cause: str, until_s: float, hold_level: int) -> None:
        self.cause = cause
        self.until_s = until_s
        self.hold_level = hold_level


class Kept:
    """What was kept of pairs that are not there now."""

    def __init__(self) -> None:
        self._pairs: dict[PairKey, KeptPair] = {}

    def items(self) -> list[tuple[PairKey, KeptPair]]:
        return list(self._pairs.items())

    def put(self, pair: PairKey, state: PairState) -> None:
        """Keeps what matters of a pair's state, if anything does."""
        breaker = state.breaker
        if breaker.phase == "quarantined":
            self.add(pair, KeptPair(breaker.cause, breaker.until_s, breaker.hold_level))
        elif breaker.hold_level:
            self.add(pair, KeptPair("", NEVER, breaker.hold_level))

    def add(self, pair: PairKey, kept: KeptPair) -> None:
        self._pairs.pop(pair, None)
        self._pairs[pair] = kept
        while len(self._pairs) > KEPT_PAIRS:
            del self._pairs[next(iter(self._pairs))]

    def release(self, pair: PairKey) -> None:
        self._pairs.pop(pair, None)

    def take(self, pair: PairKey, state: PairState, now_s: float) -> PairState:
        """The state with what was kept of the pair, which is kept no longer."""
        kept = self._pairs.pop(pair, None)
        if kept is None:
            return state

        breaker = state.breaker._replace(
            hold_level=kept.hold_level, closed_s=NEVER, stable_s=now_s
        )
        if kept.cause:
            breaker = quarantined(breaker, now_s, kept.cause, state.constants)
            breaker = breaker._replace(until_s=min(kept.until_s, breaker.until_s))

        return settled(state._replace(breaker=breaker))


def snapshot(
    devices: Mapping[str, DeviceRecord],
    backends: Mapping[str, BackendRecord],
    pairs: Mapping[PairKey, PairRecord],
    kept: Kept,
    attempts: Collection[PairKey],
    now_s: float,
) -> dict[str, Any]:
    """JSON values. Times are seconds left, for the next life has another clock."""
    all_kept = Kept()
    for pair, entry in kept.items():
        all_kept.add(pair, entry)

    for pair, record in pairs.items():
        all_kept.put(pair, record.state)

    return {
        "schema": SCHEMA,
        "devices": _levels(devices),
        "backends": _levels(backends),
        "pairs": [
            {
                "pair": list(pair),
                "cause": entry.cause,
                "left_s": max(0.0, entry.until_s - now_s) if entry.cause else 0.0,
                "hold_level": entry.hold_level,
            }
            for pair, entry in all_kept.items()
        ],
        "attempts": [list(pair) for pair in sorted(attempts)],
    }


def _levels(records: Mapping[str, DeviceRecord | BackendRecord]) -> dict[str, int]:
    levels = {name: record.state.breaker.hold_level for name, record in records.items()}
    return {name: level for name, level in levels.items() if level}


def restore(
    saved: Mapping[str, Any],
    devices: Mapping[str, DeviceRecord],
    backends: Mapping[str, BackendRecord],
    constants: Constants,
    now_s: float,
) -> Kept:
    """Sets hold levels and returns what is kept of pairs.

    :raises ValueError: `saved` is no snapshot; then nothing is changed.
    """
    try:
        if saved["schema"] != SCHEMA:
            raise ValueError(f"schema {saved['schema']!r}")

        kept = Kept()
        for entry in saved["pairs"]:
            left_s = min(float(entry["left_s"]), constants.quarantine_s)
            level = _level(entry["hold_level"])
            kept.add(_pair(entry["pair"]), KeptPair(str(entry["cause"]), now_s + left_s, level))

        for pair in saved["attempts"]:
            until_s = now_s + constants.quarantine_s
            kept.add(_pair(pair), KeptPair("restart", until_s, 0))

        levels = [
            (records[name], _level(level))
            for records, part in ((devices, "devices"), (backends, "backends"))
            for name, level in saved[part].items()
            if name in records
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a snapshot: {error!r}") from error

    for record, level in levels:
        _set_level(record, min(level, top_level(constants.failure_hold_s, constants)), now_s)

    return kept


def _set_level(record: DeviceRecord | BackendRecord, level: int, now_s: float) -> None:
    breaker = record.state.breaker._replace(hold_level=level, stable_s=now_s)
    record.set_breaker(breaker)


def _level(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 64:
        raise ValueError(f"hold level {value!r}")

    return value


def _pair(value: object) -> PairKey:
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise ValueError(f"pair {value!r}")

    return PairKey(*value)
