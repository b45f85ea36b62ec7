"""What is known of a pair, and the events that it takes.

A pair is a model on a backend in one precision for one set of shapes.
"""

from __future__ import annotations

from statistics import median
from typing import Final, Literal, NamedTuple, TypeAlias

from switchgear.daemon.protocol.breaker import NEVER, Breaker
from switchgear.daemon.protocol.constants import Constants
from switchgear.daemon.protocol.failures import NO_FAILURES, Failures

FailureKind: TypeAlias = Literal["error", "hang", "crash", "wrong", "unsupported"]
TrialPhase: TypeAlias = Literal["none", "running", "passed", "failed"]


class Trial(NamedTuple):
    """Whether this pair may load a device that is open for heat, until when, and the
    temperature at its start. A failed one is over for the device's hold, `hold_until_s`.
    """

    phase: TrialPhase = "none"
    until_s: float = NEVER
    start_mc: int | None = None
    hold_until_s: float = NEVER
    slow: int = 0


NO_TRIAL: Final = Trial()


class PairState(NamedTuple):
    """One pair. `slow_ms` is its slow limit now; `given_slow_ms` and `given_recover_ms` are the
    model's own limits, None where they follow its median.

    `samples` are run times of frames that ran cool, until there are enough; `median_ms` is
    theirs, 0.0 while unknown. `streak` slow frames in a row, the last counted at `streak_s`;
    `aged` of them are the frame in flight's. `good_frames` and `frame_s` are those of the model
    elsewhere while this pair is open for its own slowness. `quiet`: a frame that is fast enough
    changes nothing here.
    """

    constants: Constants
    model: str
    slow_ms: float
    given_slow_ms: float | None = None
    given_recover_ms: float | None = None
    breaker: Breaker = Breaker()
    samples: tuple[float, ...] = ()
    median_ms: float = 0.0
    streak: int = 0
    streak_s: float = NEVER
    aged: int = 0
    failures: Failures = NO_FAILURES
    trial: Trial = NO_TRIAL
    good_frames: int = 0
    frame_s: float = NEVER
    quiet: bool = False


class Frame(NamedTuple):
    """A frame that ended well after `run_ms` in the worker.

    `above`: the device is above its trip, or has no sensor. `learns`: it is not, so that the
    frame shows the pair's usual pace.
    """

    run_ms: float
    above: bool
    learns: bool
    first_use: bool = False


class Aging(NamedTuple):
    """A frame is still in flight after `age_ms`."""

    age_ms: float
    above: bool


class Failure(NamedTuple):
    """A frame failed through no fault of the caller."""

    kind: FailureKind
    what: str


class Slow(NamedTuple):
    """This pair alone is left for slowness: the limits were one client's own."""


class Rest(NamedTuple):
    """Time passes for a pair that is open or quarantined. `cool`: its device is cool."""

    cool: bool


class BeginTrial(NamedTuple):
    """The model's other places are gone: it may try this one although the device is hot."""

    temperature_mc: int | None
    hold_until_s: float


class EndTrial(NamedTuple):
    """The device is no longer open: there is nothing to try."""


class TrialHeat(NamedTuple):
    """The temperature of the device during a trial, and its hard limit."""

    temperature_mc: int | None
    hard_mc: int


class TripDevice(NamedTuple):
    """The slow frames are enough: the device is to open."""

    run_ms: float
    limit_ms: float


class Faulted(NamedTuple):
    """The pair was left for failures."""

    kind: FailureKind


class TrialChanged(NamedTuple):
    """The trial took another phase."""

    phase: TrialPhase
    why: str


def new_pair(
    constants: Constants,
    model: str,
    *,
    slow_ms: float | None = None,
    recover_ms: float | None = None,
    seed: int = 0,
) -> PairState:
    """A closed pair. Limits that are None follow its own median; the report knows no others."""
    if not constants.auto_limits:
        slow_ms = recover_ms = None

    limit_ms = constants.slow_ms if slow_ms is None else slow_ms
    return settled(
        PairState(constants, model, limit_ms, slow_ms, recover_ms, breaker=Breaker(seed))
    )


def is_good(state: PairState, run_ms: float) -> bool:
    """Whether a frame is at or under the pair's recover limit, as `Recover` asks for.

    While the median is not known, that of the frames so far stands in, from the tenth on.
    """
    constants = state.constants
    limit_ms = state.given_recover_ms or constants.recover_ms
    if limit_ms is None:
        usual_ms = state.median_ms
        if not usual_ms and len(state.samples) >= constants.recover_known_frames:
            usual_ms = median(state.samples)

        if not usual_ms:
            return False

        limit_ms = max(constants.recover_factor * usual_ms, usual_ms + constants.noise_ms)

    return run_ms <= limit_ms if constants.recover_inclusive else run_ms < limit_ms


def share_of(state: PairState) -> float:
    """The share of the frames that the pair may be given, 0 to 1."""
    if state.breaker.phase == "closed":
        return 1.0

    if state.breaker.phase == "ramping":
        return state.constants.ramp_shares[state.breaker.ramp]

    return 0.0


def learnt(state: PairState) -> bool:
    if not state.constants.auto_limits or state.median_ms:
        return True

    return state.given_slow_ms is not None and state.given_recover_ms is not None


def settled(state: PairState) -> PairState:
    quiet = (
        state.breaker.phase == "closed"
        and not state.streak
        and not state.aged
        and state.failures is NO_FAILURES
        and state.trial is NO_TRIAL
        and learnt(state)
    )
    return state if quiet is state.quiet else state._replace(quiet=quiet)


def put(state: PairState, breaker: Breaker) -> PairState:
    return settled(state._replace(breaker=breaker))
