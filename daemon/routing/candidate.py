"""Where a session's requests may run, and what the session brings and remembers."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from switchgear.daemon.routing.scores import Row

if TYPE_CHECKING:
    from switchgear.daemon.routing.estimates import EnergyEstimate, LaneLoad, ServiceEstimate


class Candidate:
    """A place where a session's requests may run; made once, kept while its worker is there.

    `estimate`, `energy` and `load` are shared with whoever measures. The owner sets `share`,
    `state`, `headroom_c` and `switch_ms` before a choice, as far as they changed. A share below
    1 is kept by counting: one in 8 requests is every eighth. A place in reserve has the share
    `RESERVE_SHARE`.
    """

    __slots__ = (
        "credit",
        "device",
        "energy",
        "estimate",
        "headroom_c",
        "key",
        "kind",
        "load",
        "share",
        "state",
        "switch_ms",
    )

    def __init__(
        self,
        key: str,
        device: str,
        kind: str,
        estimate: ServiceEstimate,
        energy: EnergyEstimate,
        load: LaneLoad,
    ) -> None:
        self.key = key
        self.device = device
        self.kind = kind
        self.estimate = estimate
        self.energy = energy
        self.load = load
        self.share = 1.0
        self.credit = 0.0
        self.state = "normal"
        self.headroom_c = inf
        self.switch_ms = 0.0

    def row(self, now_s: float) -> Row:
        estimate = self.estimate
        share = self.share
        if share >= 1.0:
            is_open = True
        else:
            # At most one request is saved up: an unused share is no licence for a burst.
            credit = self.credit + share
            self.credit = credit = credit if credit < 1.0 else 1.0
            is_open = credit >= 1.0 and share > 0.0

        return _new_row(
            Row,
            (
                self.key,
                self.kind,
                share,
                is_open,
                self.state,
                self.load.wait_ms(now_s),
                estimate.expected_ms(now_s),
                estimate.spread_ms,
                self.switch_ms,
                self.energy.per_inference_mj(estimate.cool_ms),
                self.headroom_c,
                now_s - estimate.observed_s if estimate.samples else inf,
            ),
        )


_new_row = tuple.__new__


class Context:
    """What a session brings to its choices, and what it remembers between them.

    `limit_ms` is its limit for an answer, 0 for none. `pinned` is the key where its state
    lives. `case_headroom_c` is the distance of the device's case to its limit, infinite where
    that is not known; the owner keeps it up to date. `home` is where its requests usually go,
    since `home_since_s`.
    """

    __slots__ = (
        "case_headroom_c",
        "count",
        "explore",
        "hedge",
        "home",
        "home_since_s",
        "limit_ms",
        "pinned",
        "requested",
    )

    def __init__(
        self,
        limit_ms: float = 0.0,
        *,
        pinned: str = "",
        requested: bool = False,
        hedge: bool = False,
    ) -> None:
        self.limit_ms = limit_ms
        self.pinned = pinned
        self.requested = requested
        self.hedge = hedge
        self.case_headroom_c = inf
        # Set by the owner while lanes are idle.
        self.explore = False
        self.home = ""
        self.home_since_s = -inf
        self.count = 0
