"""One decision in words, for `switchgear explain`."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Final

from switchgear.daemon.routing.policies import BY_NUMBER
from switchgear.daemon.routing.scores import RESERVE_SHARE, limit_for
from switchgear.ipc.record import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from switchgear.daemon.routing.ring import Entry
    from switchgear.daemon.routing.scores import Row

_WHY: Final = {
    Reason.NONE: "no place is open",
    Reason.ONLY_READY: "the only place that is ready",
    Reason.REQUESTED: "the session asked for it",
    Reason.PINNED: "its state lives there",
    Reason.FASTEST: "the earliest answer",
    Reason.TRIPPED: "the best of what is left",
    Reason.DEGRADED: "the best of what supports the model",
    Reason.PROBE: "not seen for long, and there is room to look",
}
_COPY: Final = ", a copy runs there"


def explain(entry: Entry, causes: Mapping[str, str] | None = None) -> str:
    """A sentence: what was closed and why, what was chosen and why, what else there was.

    `causes` are the protocol's reasons by key, as its admission or event states them
    ("66.1 C over 65.0 and 3 frames over 200 ms"); its state's word stands in for what is
    missing.
    """
    inputs, verdict = entry.inputs, entry.verdict
    causes = causes or {}
    parts = []
    for index, row in enumerate(inputs.rows):
        in_reserve = row.share == RESERVE_SHARE
        if in_reserve or (row.share <= 0.0 and index != verdict.chosen):
            cause = causes.get(row.key, "")
            parts.append(f"{row.key} is {row.state}" + (f": {cause}" if cause else ""))
        elif not row.open and index != verdict.chosen:
            parts.append(f"{row.key} is {row.state}: {row.share:.0%} of the requests")

    if verdict.chosen < 0:
        return "; ".join([*parts, "no place is open"])

    chosen = inputs.rows[verdict.chosen]
    parts.append(f"{chosen.key} chosen: {_expected(chosen)}, {_why(entry)}")
    parts += [
        f"{row.key} {_expected(row)}{_COPY if index == verdict.hedge else ''}"
        for index, row in enumerate(inputs.rows)
        if row.open and index != verdict.chosen
    ]
    return "; ".join(parts)


def table(entry: Entry) -> list[dict[str, object]]:
    """The candidates of a decision as rows for a table or JSON; the chosen one and that of a
    second copy are marked."""
    return [
        {
            "backend": row.key,
            "chosen": index == entry.verdict.chosen,
            "copy": index == entry.verdict.hedge,
            "open": row.open,
            "share": row.share,
            "state": row.state,
            "wait_ms": row.wait_ms,
            "service_ms": row.service_ms,
            "switch_ms": row.switch_ms,
            "energy_mj": row.energy_mj,
            "headroom_c": row.headroom_c if isfinite(row.headroom_c) else None,
            "measured": isfinite(row.unseen_s),
        }
        for index, row in enumerate(entry.inputs.rows)
    ]


def _expected(row: Row) -> str:
    text = f"{row.service_ms:.3g} ms expected + {row.wait_ms:.3g} ms queue"
    if row.switch_ms:
        text += f" + {row.switch_ms:.3g} ms switch"

    return text if isfinite(row.unseen_s) else f"{text} (not measured yet)"


def _why(entry: Entry) -> str:
    inputs, verdict = entry.inputs, entry.verdict
    chosen = inputs.rows[verdict.chosen]
    if chosen.share == RESERVE_SHARE:
        return "no other place answers in time, and it answers earlier"

    reason = Reason(verdict.reason)
    if reason is not Reason.POLICY:
        return _WHY.get(reason, reason.name.lower())

    policy = BY_NUMBER[inputs.policy]
    limit_ms = limit_for(inputs.rows, policy, inputs.limit_ms)
    if policy.energy:
        return f"{chosen.energy_mj:.3g} mJ, within {limit_ms:.3g} ms ({policy.name})"

    if policy.power:
        watts = chosen.energy_mj / chosen.service_ms
        return f"{watts:.3g} W, within {limit_ms:.3g} ms ({policy.name})"

    return f"by policy {policy.name}"
