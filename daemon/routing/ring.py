"""The ring of decisions: what `explain`, `trace` and the simulator read."""

from __future__ import annotations

import json
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from switchgear.daemon.routing.choice import Inputs, Verdict, decide
from switchgear.daemon.routing.policies import BY_NUMBER
from switchgear.daemon.routing.scores import Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

RING_DECISIONS: Final = 4096
DUMP_VERSION: Final = 1


class Entry(NamedTuple):
    """One decision: its number since the start, the request's, what went in, what came out."""

    sequence: int
    request: int
    inputs: Inputs
    verdict: Verdict


class DecisionRing:
    """The last 4096 decisions."""

    __slots__ = ("_entries", "_sequence", "_size")

    def __init__(self, size: int = RING_DECISIONS) -> None:
        self._size = size
        self._sequence = 0
        self._entries: list[tuple[int, int, Inputs, Verdict] | None] = [None] * size

    def add(self, request: int, inputs: Inputs, verdict: Verdict) -> None:
        sequence = self._sequence
        self._entries[sequence % self._size] = (sequence, request, inputs, verdict)
        self._sequence = sequence + 1

    def __len__(self) -> int:
        return min(self._sequence, self._size)

    def __iter__(self) -> Iterator[Entry]:
        """The oldest first."""
        for sequence in range(max(0, self._sequence - self._size), self._sequence):
            entry = self._entries[sequence % self._size]
            if entry is not None:
                yield Entry(*entry)

    def last(self, count: int) -> list[Entry]:
        """The newest `count`, the oldest of them first."""
        return list(self)[-count:] if count > 0 else []

    def of_request(self, request: int) -> list[Entry]:
        return [entry for entry in self if entry.request == request]


def dump(entries: Iterable[Entry]) -> Iterator[str]:
    """JSON lines, without newlines: a head with the version, then one decision each."""
    yield json.dumps({"switchgear_decisions": DUMP_VERSION, "row": Row._fields})
    for entry in entries:
        inputs = entry.inputs._asdict()
        inputs["rows"] = [list(row) for row in entry.inputs.rows]
        yield json.dumps(
            _finite(
                {
                    "sequence": entry.sequence,
                    "request": entry.request,
                    "inputs": inputs,
                    "verdict": entry.verdict._asdict(),
                }
            )
        )


def load(lines: Iterable[str]) -> Iterator[Entry]:
    """What `dump` wrote.

    :raises ValueError: another version, or no dump at all.
    """
    found = iter(lines)
    head = json.loads(next(found, "null"))
    if not isinstance(head, dict) or head.get("switchgear_decisions") != DUMP_VERSION:
        raise ValueError("no dump of decisions of this version")

    for line in found:
        try:
            yield _entry(_infinite(json.loads(line)))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no decision: {error!r}") from None


def replay(entry: Entry) -> Verdict:
    """Decides again from the recorded inputs.

    :raises ValueError: the record names a policy that is not known.
    """
    policy = BY_NUMBER.get(entry.inputs.policy)
    if policy is None:
        raise ValueError(f"no policy number {entry.inputs.policy}")

    return decide(entry.inputs, policy)


def _entry(fields: dict[str, Any]) -> Entry:
    inputs = dict(fields["inputs"])
    inputs["rows"] = tuple(Row(*row) for row in inputs["rows"])
    return Entry(
        fields["sequence"], fields["request"], Inputs(**inputs), Verdict(**fields["verdict"])
    )


# JSON has no infinity; a key or a state is never one of these words.
_WORDS: Final = {inf: "Infinity", -inf: "-Infinity"}
_NUMBERS: Final = {word: number for number, word in _WORDS.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return _WORDS.get(value, value)

    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}

    return [_finite(item) for item in value] if isinstance(value, list) else value


def _infinite(value: Any) -> Any:
    if isinstance(value, str):
        return _NUMBERS.get(value, value)

    if isinstance(value, dict):
        return {key: _infinite(item) for key, item in value.items()}

    return [_infinite(item) for item in value] if isinstance(value, list) else value
