"""Counting failures: in a row, and as a share of a window, apart from slowness.

The window opens with a failure: frames that went well before the first one say nothing about
whether the target fails now, and while there is none a frame costs nothing to count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from switchgear.daemon.protocol.constants import Constants

# The window moves in steps of a sixth of its length.
_STEPS: Final = 6


class Bucket(NamedTuple):
    """What ended in one step of the window."""

    number: int
    good: int
    bad: int


class Failures(NamedTuple):
    """`streak` failures in a row, of `models`; `buckets` is the window, oldest first."""

    streak: int = 0
    models: tuple[str, ...] = ()
    buckets: tuple[Bucket, ...] = ()


NO_FAILURES: Final = Failures()


def _window(
    failures: Failures, now_s: float, good: int, bad: int, constants: Constants
) -> tuple[Bucket, ...]:
    number = int(now_s / (constants.failure_window_s / _STEPS))
    kept = [bucket for bucket in failures.buckets if number - _STEPS < bucket.number]
    if kept and kept[-1].number >= number:
        last = kept[-1]
        kept[-1] = Bucket(last.number, last.good + good, last.bad + bad)
    else:
        kept.append(Bucket(number, good, bad))

    while kept and kept[0].bad == 0:
        del kept[0]

    return tuple(kept)


def failed(failures: Failures, now_s: float, model: str, constants: Constants) -> Failures:
    """One more failure, of a frame of `model`."""
    models = failures.models if model in failures.models else (*failures.models, model)
    window = _window(failures, now_s, 0, 1, constants)
    return Failures(failures.streak + 1, models[-2:], window)


def went_well(failures: Failures, now_s: float, constants: Constants) -> Failures:
    """One frame that went well ends the streak; it counts in the window."""
    window = _window(failures, now_s, 1, 0, constants)
    return Failures(0, failures.models, window) if window else NO_FAILURES


def too_many(failures: Failures, constants: Constants) -> bool:
    """Enough in a row, or enough of the window."""
    if failures.streak >= constants.failures:
        return True

    bad = sum(bucket.bad for bucket in failures.buckets)
    total = bad + sum(bucket.good for bucket in failures.buckets)
    return total >= constants.failure_minimum and bad >= total * constants.failure_share
