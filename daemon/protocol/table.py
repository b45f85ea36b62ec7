"""Transition tables: rows of phase, event, guard, next phase and what is done.

The table is the program: a step looks up the rows of the phase and the event, and the first row
whose guard holds is taken. Tests enumerate the rows and `docs/protocol-states.md` prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from switchgear.daemon.protocol.breaker import Breaker, Phase


class HasBreaker(Protocol):
    """A state of any level."""

    @property
    def breaker(self) -> Breaker: ...


S = TypeVar("S", bound=HasBreaker)
NOTHING: Final[tuple[NamedTuple, ...]] = ()
SAME: Final = "="


class Tick(NamedTuple):
    """Time passes. `busy`: the target's device runs something."""

    busy: bool = False


class ProbeDone(NamedTuple):
    """A probe ended. `good` is None where it was given up: neither good nor bad."""

    lease: int
    good: bool | None


class Returned(NamedTuple):
    """The target is there again, or the machine slept: what was known of it may be wrong."""

    why: str


class RefugeFrame(NamedTuple):
    """A frame of the model that left, where it runs now, against its recover limit there."""

    good: bool


class Transition(NamedTuple):
    """A level changed its phase; `reason` is the row's."""

    before: str
    after: str
    reason: str


class StartProbe(NamedTuple):
    """Run a probe; answer with this lease before `deadline_s`."""

    lease: int
    deadline_s: float


Actions = tuple[NamedTuple, ...]


@dataclass(frozen=True, slots=True)
class Row(Generic[S]):
    """One row. `to` is the next phase, or `=` for the same. `guard` and `why` are for people.

    `test` is the guard, None for always; `effect` gives the new state and further actions.
    """

    phases: tuple[Phase, ...]
    event: type[NamedTuple]
    guard: str
    test: Callable[[S, Any, float], bool] | None
    to: str
    why: str
    effect: Callable[[S, Any, float], tuple[S, Actions]]


class Table(Generic[S]):
    """The rows of one level, in order: the first whose guard holds is taken."""

    def __init__(self, level: str, rows: Sequence[Row[S]]) -> None:
        self.level = level
        self.rows = tuple(rows)
        index: dict[tuple[str, type], list[Row[S]]] = {}
        for row in self.rows:
            for phase in row.phases:
                index.setdefault((phase, row.event), []).append(row)

        self._index = {key: tuple(found) for key, found in index.items()}

    def row(self, state: S, event: NamedTuple, now_s: float) -> Row[S] | None:
        """The row that a step takes, None where nothing happens."""
        for row in self._index.get((state.breaker.phase, type(event)), ()):
            if row.test is None or row.test(state, event, now_s):
                return row

        return None

    def step(self, state: S, event: NamedTuple, now_s: float) -> tuple[S, Actions]:
        """The state after the event and what to do; the state itself where nothing changed."""
        row = self.row(state, event, now_s)
        if row is None:
            return state, NOTHING

        after, actions = row.effect(state, event, now_s)
        if row.to != SAME:
            moved = Transition(state.breaker.phase, after.breaker.phase, row.why)
            actions = (moved, *actions)

        return after, actions
