"""Whether a pair may be given a frame: every level's word, and the last usable one.

Heat and slowness never take the last usable pair of a model away. Crashes, hangs, wrong
numbers, a device that has not answered since it came back, and the operator do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from switchgear.daemon.protocol.answers import ADMITTED, PEOPLE, Admission, PeopleState

if TYPE_CHECKING:
    from switchgear.daemon.protocol.breaker import Breaker
    from switchgear.daemon.protocol.records import PairRecord

# What is never a reason to take away the last usable pair.
SOFT_CAUSES: Final = frozenset({"heat", "slow"})
_WORDS: Final = {
    "heat": "it is too warm",
    "slow": "its frames are too slow",
    "lost": "the device is lost",
    "failure": "its frames failed",
    "crash": "it crashed",
    "wrong": "its numbers are wrong",
    "unsupported": "it does not support the model",
    "returned": "it came back and has not answered since",
    "restart": "it crashed before the restart",
}


class Verdict(NamedTuple):
    """One pair by its own levels. `share` 0 is no; `soft`: for heat or slowness alone."""

    share: float
    soft: bool
    state: PeopleState
    reason: str
    probe: bool = False


_CLEAR: Final = Verdict(1.0, False, "normal", "")


def verdict(record: PairRecord, session: int = 0) -> Verdict:
    """The word of a pair's levels, without a look at other pairs."""
    if not record.ready:
        return Verdict(0.0, False, "normal", f"{record.target} is not ready")

    device, backend = record.device, record.backend
    for place in (device, backend, record):
        refusal = place.refusal()
        if refusal:
            return Verdict(0.0, False, "tripped", refusal)

    levels: list[tuple[object, Breaker, float]] = []
    if not (record.on_trial() and _open_for_heat(device.state.breaker)):
        levels.append((device.target, device.state.breaker, device.share()))

    levels.append((backend.target, backend.state.breaker, backend.share()))
    levels.append((record.target, record.state.breaker, record.share()))
    if session:
        own = record.sessions.get(session)
        if own is not None and record.word != "forced":
            levels.append((own.target, own.state.breaker, own.share()))

    share = min(level[2] for level in levels)
    if share >= 1.0:
        return _CLEAR

    if share > 0.0:
        target, breaker, _ = next(level for level in levels if level[2] == share)
        state = PEOPLE[breaker.phase]
        return Verdict(share, True, state, f"{target} takes {share:.0%} of the frames")

    shut = [level for level in levels if level[2] == 0.0]
    soft = all(breaker.cause in SOFT_CAUSES for _, breaker, _ in shut)
    target, breaker, _ = shut[0]
    why = _WORDS.get(breaker.cause, breaker.cause)
    probe = any(breaker.phase == "half_open" for _, breaker, _ in shut)
    return Verdict(0.0, soft, PEOPLE[breaker.phase], f"{target}: {why}", probe)


def _open_for_heat(breaker: Breaker) -> bool:
    return breaker.phase in ("open", "half_open") and breaker.cause == "heat"


def admit(
    record: PairRecord, session: int, others: Iterable[PairRecord], *, least_energy: bool
) -> Admission:
    """The admission of one pair; `others` are those that could serve instead of it."""
    own = verdict(record, session)
    shed_low = record.device.state.limits.is_cpu and (
        record.device.state.breaker.phase == "shedding"
    )
    if own.share >= 1.0 and not (least_energy or shed_low):
        return ADMITTED

    share, reason = own.share, own.reason
    if own.share < 1.0 and own.soft:
        missing = 1.0 - share_elsewhere(record, session, others)
        if missing > own.share:
            share, reason = missing, f"no other place is left, although {own.reason}"

    return Admission(
        share > 0.0,
        share,
        "shedding" if shed_low and own.state == "normal" else own.state,
        reason,
        own.probe,
        least_energy,
        shed_low,
        own.soft and share == 0.0 and not own.probe and record.state.constants.reserve,
    )


def share_elsewhere(record: PairRecord, session: int, others: Iterable[PairRecord]) -> float:
    """The share of the frames that other pairs take, at most 1."""
    shares = (verdict(other, session).share for other in others if other is not record)
    return min(1.0, sum(shares))
