"""What the three levels share: a breaker that opens, holds, is probed, ramps and closes.

Everything here is a pure function of its arguments. Times are seconds of a monotonic clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from switchgear.daemon.protocol.constants import Constants

Phase: TypeAlias = Literal["closed", "shedding", "open", "half_open", "ramping", "quarantined"]
NEVER: Final = float("-inf")


class Breaker(NamedTuple):
    """One breaker. `cause` says why it last left `closed`: heat, lost, failure, crash, ...

    `hold_level` doubles the hold, `opens` counts openings and moves the jitter, `lease` is the
    probe under way (0: none). `closed_s` is when it last closed, `stable_s` since when it is
    without a trip.
    """

    seed: int = 0
    phase: Phase = "closed"
    since_s: float = NEVER
    until_s: float = NEVER
    cause: str = ""
    hold_level: int = 0
    opens: int = 0
    closed_s: float = NEVER
    stable_s: float = NEVER
    good_probes: int = 0
    probes: int = 0
    lease: int = 0
    lease_until_s: float = NEVER
    ramp: int = 0

    @property
    def hold_s(self) -> float:
        """How long this opening holds, jitter included."""
        return self.until_s - self.since_s


def jitter(seed: int, count: int) -> float:
    """A number in [-1, 1) that seed and count determine (the finaliser of splitmix64)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + count * 0xD1B54A32D192ED03 + 1) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) / 2**63 - 1.0


def top_level(base_s: float, constants: Constants) -> int:
    """The level at which a hold of `base_s` has reached its maximum."""
    level = 0
    while base_s > 0 and base_s * 2**level < constants.hold_max_s:
        level += 1

    return level


def hold_for(breaker: Breaker, base_s: float, constants: Constants) -> float:
    """The hold in seconds: never below its base, never above the maximum."""
    spread = 1.0 + constants.jitter * jitter(breaker.seed, breaker.opens)
    wanted_s: float = base_s * 2**breaker.hold_level * spread
    return max(base_s, min(wanted_s, constants.hold_max_s))


def opened(
    breaker: Breaker,
    now_s: float,
    cause: str,
    constants: Constants,
    *,
    base_s: float,
    again: bool = False,
    longest: bool = False,
) -> Breaker:
    """Opens. The hold doubles when it is `again`, from probes or ramp, and soon after closing.

    `longest` takes the maximum at once.
    """
    top = top_level(base_s, constants)
    level = breaker.hold_level
    if again or now_s - breaker.closed_s < constants.retrip_s:
        level += 1

    level = top if longest else min(level, top)
    counted = breaker._replace(hold_level=level, opens=breaker.opens + 1)
    return counted._replace(
        phase="open",
        since_s=now_s,
        until_s=now_s + hold_for(counted, base_s, constants),
        cause=cause,
        good_probes=0,
        lease=0,
        ramp=0,
    )


def quarantined(breaker: Breaker, now_s: float, cause: str, constants: Constants) -> Breaker:
    return breaker._replace(
        phase="quarantined",
        since_s=now_s,
        until_s=now_s + constants.quarantine_s,
        cause=cause,
        opens=breaker.opens + 1,
        good_probes=0,
        lease=0,
        ramp=0,
    )


def half_opened(breaker: Breaker, now_s: float, cause: str = "") -> Breaker:
    return breaker._replace(
        phase="half_open", since_s=now_s, cause=cause or breaker.cause, good_probes=0, lease=0
    )


def probe_started(breaker: Breaker, now_s: float, constants: Constants) -> Breaker:
    number = breaker.probes + 1
    return breaker._replace(
        probes=number, lease=number, lease_until_s=now_s + constants.lease_s
    )


def probe_returned(breaker: Breaker, now_s: float, *, good: bool) -> Breaker:
    """The lease is given back; its time stands in `lease_until_s`, for the gap to the next."""
    return breaker._replace(
        lease=0, lease_until_s=now_s, good_probes=breaker.good_probes + (1 if good else 0)
    )


def proven(breaker: Breaker, now_s: float, constants: Constants) -> Breaker:
    """Enough good probes: to the first step of the ramp, or closed where there is no ramp."""
    if not constants.ramp_shares:
        return closed(breaker, now_s)

    return breaker._replace(phase="ramping", since_s=now_s, lease=0, ramp=0)


def ramped(breaker: Breaker, now_s: float) -> Breaker:
    return breaker._replace(since_s=now_s, ramp=breaker.ramp + 1)


def closed(breaker: Breaker, now_s: float) -> Breaker:
    return breaker._replace(
        phase="closed",
        since_s=now_s,
        until_s=NEVER,
        closed_s=now_s,
        stable_s=now_s,
        good_probes=0,
        lease=0,
        ramp=0,
    )


def halved(breaker: Breaker, now_s: float) -> Breaker:
    return breaker._replace(hold_level=breaker.hold_level - 1, stable_s=now_s)


# Conditions that every level has.
def lease_over(breaker: Breaker, now_s: float) -> bool:
    return breaker.lease != 0 and now_s >= breaker.lease_until_s


def probe_due(breaker: Breaker, now_s: float, constants: Constants, *, busy: bool) -> bool:
    """No probe is under way, the gap is over, and the device is idle or was waited for."""
    if breaker.lease != 0:
        return False

    if breaker.probes and now_s < breaker.lease_until_s + constants.probe_gap_s:
        return False

    return not busy or now_s >= breaker.since_s + constants.probe_busy_s


def last_probe(breaker: Breaker, constants: Constants) -> bool:
    """Whether one more good probe is enough."""
    return breaker.good_probes + 1 >= constants.good_probes


def ramp_over(breaker: Breaker, now_s: float, constants: Constants) -> bool:
    return now_s >= breaker.since_s + constants.ramp_step_s


def last_ramp(breaker: Breaker, constants: Constants) -> bool:
    return breaker.ramp + 1 >= len(constants.ramp_shares)


def stable(breaker: Breaker, now_s: float, constants: Constants) -> bool:
    return breaker.hold_level > 0 and now_s >= breaker.stable_s + constants.stable_s


def frames_good(
    breaker: Breaker, good_frames: int, frame_s: float, now_s: float, constants: Constants
) -> bool:
    """Whether what left runs well where it is now: enough good frames in a row.

    Waived after some holds, and when no frame came for one hold (`frame_s` is the last one's).
    """
    if good_frames >= constants.recover_frames:
        return True

    hold_s = breaker.hold_s
    if hold_s <= 0:
        return False

    if now_s - breaker.since_s >= constants.waive_holds * hold_s:
        return True

    return now_s - max(frame_s, breaker.since_s) >= constants.idle_holds * hold_s
