"""The score of each candidate: a pure function of one row of numbers per candidate."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from switchgear.daemon.routing.policies import LATE_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from switchgear.daemon.routing.policies import Policy

# A candidate counts as in time when it is still in time this many mean deviations later than
# expected: about one frame in a hundred is later than that.
MARGIN_SPREADS: Final = 3.0
# A request that is surely late costs as much as one that is later by this: to be in time at all
# counts more than by how much. One that may be late costs its share of it.
LATE_REQUEST_MS: Final = 25.0
# Heat counts within this distance of a limit; DESIGN's zone of fresh readings.
NEAR_LIMIT_C: Final = 10.0
# And within this where the session does not run: what was left for heat is not taken up again
# at the same temperature.
NEAR_ELSEWHERE_C: Final = 15.0
# The share of a place in reserve, above 0: it never has a turn of its own.
RESERVE_SHARE: Final = 1e-9


class Row(NamedTuple):
    """One candidate at the moment of a choice; everything that the choice depends on.

    `key` names the pair's place (`vulkan/fp16`), `kind` its device's kind. `share` is the part
    of the requests that the protocol lets it have (`RESERVE_SHARE`: none but what no other
    answers in time), `open` whether this one is among them, `state` the protocol's word for
    it. Waits, service, spread and switch are milliseconds, `energy_mj` is per inference,
    `headroom_c` degrees to the device's limit (infinite without a reading), `unseen_s` the time
    since its last measured run (infinite for a prior).
    """

    key: str
    kind: str
    share: float
    open: bool
    state: str
    wait_ms: float
    service_ms: float
    spread_ms: float
    switch_ms: float
    energy_mj: float
    headroom_c: float
    unseen_s: float


def limit_for(rows: Sequence[Row], policy: Policy, limit_ms: float) -> float:
    """Up to when an answer is in time, in ms from now; infinite where no row is.

    The session's own limit: where no row can keep it all are late, and the earliest is best.
    Without one (0) what is in time is relative to the earliest.
    """
    if limit_ms:
        return limit_ms

    sure_least = inf
    for row in rows:
        if row[2] > 0.0:
            sure_ms = row[5] + row[6] + row[8] + MARGIN_SPREADS * row[7]
            if sure_ms < sure_least:
                sure_least = sure_ms

    return policy.tolerance * sure_least


def late_scores(rows: Sequence[Row], limit_ms: float) -> list[float]:
    """Scores for a request that no open row is expected to answer within `limit_ms`.

    It is late anyway: it goes where it makes the fewest others late. A run on a device that is
    fast enough costs the next request as long as it takes there; one on a device that is too
    slow for anybody costs nothing but itself.
    """
    able = {row.kind for row in rows if row.share > 0.0 and row[6] + row[8] <= limit_ms}
    return [row[5] + row[6] + row[8] + (row[6] if row.kind in able else 0.0) for row in rows]


def scores_of(
    rows: Sequence[Row],
    policy: Policy,
    limit_ms: float,
    case_headroom_c: float = inf,
    home: str = "",
) -> list[float]:
    """A score for each row, open or not; less is better.

    The case's headroom is every device's: all of them heat it.
    """
    time_weight = policy.time
    energy_weight = policy.energy
    power_weight = policy.power
    heat_weight = policy.heat
    prefer = policy.prefer
    scores = []
    for key, kind, _, _, _, wait, service, spread, switch, energy, headroom, _ in rows:
        done_ms = wait + service + switch
        score = time_weight * done_ms + energy_weight * energy
        if power_weight:
            score += power_weight * energy / service

        if heat_weight:
            if headroom > case_headroom_c:
                headroom = case_headroom_c

            zone_c = NEAR_LIMIT_C if key == home else NEAR_ELSEWHERE_C
            if headroom < zone_c:
                near = 1.0 if headroom <= 0.0 else 1.0 - headroom / zone_c
                score += heat_weight * near * energy

        if kind == prefer:
            score *= policy.prefer_factor

        margin_ms = MARGIN_SPREADS * spread
        if done_ms + margin_ms > limit_ms:
            score += _lateness(done_ms - limit_ms, margin_ms)

        scores.append(score)

    return scores


def lateness_of(rows: Sequence[Row], limit_ms: float) -> list[float]:
    """The part of each row's score that is for being late; 0 where it is surely in time."""
    return [
        _lateness(row[5] + row[6] + row[8] - limit_ms, MARGIN_SPREADS * row[7]) for row in rows
    ]


def _lateness(late_ms: float, margin_ms: float) -> float:
    """Of an answer expected `late_ms` after the limit, give or take the margin."""
    if late_ms <= -margin_ms:
        return 0.0

    if late_ms >= margin_ms:
        return (LATE_REQUEST_MS + late_ms) * LATE_WEIGHT

    # Somewhere between surely in time and surely late.
    score = LATE_REQUEST_MS * (late_ms + margin_ms) / (2.0 * margin_ms) * LATE_WEIGHT
    return score + late_ms * LATE_WEIGHT if late_ms > 0.0 else score
