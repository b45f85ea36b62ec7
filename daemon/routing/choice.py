"""The choice itself, from candidates and a policy to a decision that can be replayed."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from switchgear.daemon.routing.policies import LATE_WEIGHT
from switchgear.daemon.routing.scores import (
    MARGIN_SPREADS,
    Row,
    late_scores,
    lateness_of,
    limit_for,
    scores_of,
)
from switchgear.ipc.record import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from switchgear.daemon.routing.candidate import Candidate, Context
    from switchgear.daemon.routing.policies import Policy
    from switchgear.daemon.routing.ring import DecisionRing

# A session moves for a better score only if it is this much better, and not again so soon:
# estimates have noise, and each move costs cold caches. Late frames move at once.
BETTER_SHARE: Final = 0.95
DWELL_S: Final = 60.0
# A wait of this share of a run is a queue, for which a request goes elsewhere; less is chance.
CROWDED_SHARE: Final = 0.5
# With idle capacity one request in this many goes to the pair that was not seen longest.
EXPLORE_EVERY: Final = 64
EXPLORE_UNSEEN_S: Final = 60.0

# Flags of a choice, as they stand in the record.
REQUESTED: Final = 1
HEDGE: Final = 2
EXPLORE: Final = 4
NONE: Final = -1

_ONLY_READY: Final = int(Reason.ONLY_READY)
_REQUESTED: Final = int(Reason.REQUESTED)
_PINNED: Final = int(Reason.PINNED)
_FASTEST: Final = int(Reason.FASTEST)
_POLICY: Final = int(Reason.POLICY)
_TRIPPED: Final = int(Reason.TRIPPED)
_DEGRADED: Final = int(Reason.DEGRADED)
_PROBE: Final = int(Reason.PROBE)
_NO_REASON: Final = int(Reason.NONE)
# A share (shedding, ramping, none at all in reserve) is kept where another place answers in
# time, or late by less than this score, a millisecond; it is no reason to be late or to refuse
# a request.
OFF_TURN: Final = LATE_WEIGHT
# The same where every place is late, and scores are milliseconds.
OFF_TURN_LATE_MS: Final = 1.0
# The protocol's word for a pair that its backend refuses.
UNSUPPORTED_STATES: Final = frozenset({"degraded", "unsupported"})


class Inputs(NamedTuple):
    """Everything that a choice depends on; `decide` of the same inputs is the same choice."""

    now_s: float
    policy: int
    limit_ms: float
    home: str
    home_since_s: float
    pinned: str
    flags: int
    case_headroom_c: float
    rows: tuple[Row, ...]


class Verdict(NamedTuple):
    """`chosen` is the index of a row, -1 for none, `hedge` that of a second one; the home is
    as it is afterwards."""

    chosen: int
    reason: int
    hedge: int
    home: str
    home_since_s: float


def choose(
    candidates: Sequence[Candidate],
    policy: Policy,
    context: Context,
    now_s: float,
    ring: DecisionRing | None = None,
    request: int = 0,
) -> Verdict:
    """Chooses among candidates (in a fixed order) and remembers the choice in `context`.

    `request` names it in the ring. The verdict's `chosen` is -1 where no candidate is open.
    """
    count = context.count = context.count + 1
    flags = REQUESTED if context.requested else 0
    if context.hedge:
        flags |= HEDGE

    if context.explore and count % EXPLORE_EVERY == 0:
        flags |= EXPLORE

    inputs = _new_inputs(
        Inputs,
        (
            now_s,
            policy.number,
            context.limit_ms,
            context.home,
            context.home_since_s,
            context.pinned,
            flags,
            context.case_headroom_c,
            tuple([candidate.row(now_s) for candidate in candidates]),
        ),
    )
    verdict = decide(inputs, policy)
    context.home = verdict[3]
    context.home_since_s = verdict[4]
    if verdict[0] >= 0:
        chosen = candidates[verdict[0]]
        if chosen.share < 1.0:
            # Every API of a device shares its turn.
            for candidate in candidates:
                if candidate.device == chosen.device:
                    candidate.credit = max(0.0, candidate.credit - 1.0)

    if ring is not None:
        ring.add(request, inputs, verdict)

    return verdict


_new_inputs = tuple.__new__


def decide(inputs: Inputs, policy: Policy) -> Verdict:
    """The choice as a pure function of its inputs; `policy` is the one that they name."""
    now_s, _, limit_ms, home, since_s, pinned, flags, case_headroom_c, rows = inputs
    if pinned:
        return _fixed(rows, pinned, _PINNED, home, since_s)

    if len(rows) == 1:
        reason = _REQUESTED if flags & REQUESTED else _ONLY_READY
        if rows[0].key != home:
            # As below: its home is gone, and what comes may be moved to at once.
            home, since_s = rows[0].key, -inf

        return Verdict(0 if rows[0].open else NONE, reason, NONE, home, since_s)

    limit_ms = limit_for(rows, policy, limit_ms)
    late = bool(inputs.limit_ms) and _all_late(rows, limit_ms)
    if late:
        scores = late_scores(rows, limit_ms)
    else:
        scores = scores_of(rows, policy, limit_ms, case_headroom_c, home)

    best = all_best = at_home = NONE
    best_score = all_score = inf
    off_turn = False
    for index, score in enumerate(scores):
        row = rows[index]
        if score < all_score:
            all_best, all_score = index, score

        if row[3]:
            if score < best_score:
                best, best_score = index, score
        elif row[2] > 0.0:
            off_turn = True

        if row[0] == home:
            at_home = index

    if off_turn:
        lateness = scores if late else lateness_of(rows, limit_ms)
        kept = OFF_TURN_LATE_MS if late else OFF_TURN
        best = _off_turn(rows, scores, best, lateness, kept)

    if best == NONE:
        return Verdict(NONE, _NO_REASON, NONE, home, since_s)

    if flags & EXPLORE:
        unseen = _least_known(rows, limit_ms, best)
        if unseen != NONE:
            return Verdict(unseen, _PROBE, NONE, home, since_s)

    chosen = best
    if best != at_home:
        if at_home != NONE and rows[at_home][2] > 0.0:
            home_score = scores[at_home]
            wait_ms = rows[at_home][5]
            chosen, home, since_s = _leave(
                rows,
                best,
                at_home,
                limit_ms,
                now_s,
                home,
                since_s,
                better=scores[best] < BETTER_SHARE * (home_score - policy.time * wait_ms),
                crowded=wait_ms >= CROWDED_SHARE * rows[at_home][6]
                and scores[best] < BETTER_SHARE * home_score,
            )
        else:
            # Its home is closed or gone; it may come back as soon as that opens.
            home, since_s = rows[best][0], -inf

    hedge = _second(rows, chosen) if flags & HEDGE else NONE
    return Verdict(chosen, _reason(rows, chosen, all_best), hedge, home, since_s)


def _all_late(rows: Sequence[Row], limit_ms: float) -> bool:
    """Whether no row that takes any requests is expected to answer in time."""
    # A generator would cost as much as the rest of the choice.
    for row in rows:  # noqa: SIM110
        if row[2] > 0.0 and row[5] + row[6] + row[8] <= limit_ms:
            return False

    return True


def _off_turn(
    rows: Sequence[Row],
    scores: Sequence[float],
    best: int,
    lateness: Sequence[float],
    kept: float,
) -> int:
    """The best row, with those that take a share but not this request where every open one is
    late by more than theirs and `kept`: no energy that they save is a reason."""
    least = inf
    for index, row in enumerate(rows):
        if row[3] and lateness[index] < least:
            least = lateness[index]

    best_score = scores[best] if best != NONE else inf
    for index, row in enumerate(rows):
        if (
            not row[3]
            and row[2] > 0.0
            and lateness[index] + kept < least
            and scores[index] + kept < best_score
        ):
            best, best_score = index, scores[index] + kept

    return best


def _leave(
    rows: Sequence[Row],
    best: int,
    at_home: int,
    limit_ms: float,
    now_s: float,
    home: str,
    since_s: float,
    *,
    better: bool,
    crowded: bool,
) -> tuple[int, str, float]:
    """Home, which is open in part at least, against a better row: where this request goes, and
    the home and its time afterwards. `better`: by enough, home's queue of now left out;
    `crowded`: by enough because of that queue."""
    row = rows[at_home]
    needs_ms = row[6] + row[8] + MARGIN_SPREADS * row[7]
    moves = rows[best][2] >= 1.0
    if needs_ms > limit_ms:
        # It has become too slow.
        return (best, rows[best][0], now_s) if moves else (best, home, since_s)

    if needs_ms + row[5] > limit_ms or crowded:
        # Its queue is too long for this request only.
        return best, home, since_s

    if not row[3]:
        # Not its turn: it is shedding. Where another place answers in time, one move is better
        # than every fourth frame elsewhere.
        there = rows[best]
        done_ms = there[5] + there[6] + there[8] + MARGIN_SPREADS * there[7]
        moves = moves and done_ms <= limit_ms
        return (best, there[0], now_s) if moves else (best, home, since_s)

    if not better or now_s - since_s < DWELL_S:
        return at_home, home, since_s

    return (best, rows[best][0], now_s) if moves else (best, home, since_s)


def _reason(rows: Sequence[Row], chosen: int, all_best: int) -> int:
    if not rows[all_best][3] and all_best != chosen:
        # What would have been chosen is closed.
        return _DEGRADED if rows[all_best][4] in UNSUPPORTED_STATES else _TRIPPED

    open_rows = 0
    row = rows[chosen]
    done_ms = row[5] + row[6] + row[8]
    fastest = True
    for other in rows:
        if other[3]:
            open_rows += 1
            if other[5] + other[6] + other[8] < done_ms:
                fastest = False

    if open_rows == 1 and row[3]:
        return _ONLY_READY

    return _FASTEST if fastest else _POLICY


def _fixed(rows: Sequence[Row], key: str, reason: int, home: str, since_s: float) -> Verdict:
    """Where the state lives, whatever the protocol says; -1 where that is gone."""
    for index, row in enumerate(rows):
        if row.key == key:
            return Verdict(index, reason, NONE, home, since_s)

    return Verdict(NONE, reason, NONE, home, since_s)


def _least_known(rows: Sequence[Row], limit_ms: float, best: int) -> int:
    """The open row that was not seen longest and can be in time; -1 for none but the best."""
    found = NONE
    longest_s = EXPLORE_UNSEEN_S
    for index, row in enumerate(rows):
        if (
            row.open
            and index != best
            and row.unseen_s > longest_s
            and row.wait_ms + row.service_ms + row.switch_ms <= limit_ms
        ):
            found, longest_s = index, row.unseen_s

    return found


def _second(rows: Sequence[Row], chosen: int) -> int:
    """The earliest row on another kind of device, to run the same request beside: one that has
    all of its requests, and that idles, so that a copy takes nobody's turn."""
    found = NONE
    least_ms = inf
    for index, row in enumerate(rows):
        done_ms = row.wait_ms + row.service_ms + row.switch_ms
        idle = row.share >= 1.0 and row.wait_ms <= 0.0
        if idle and row.kind != rows[chosen].kind and done_ms < least_ms:
            found, least_ms = index, done_ms

    return found
