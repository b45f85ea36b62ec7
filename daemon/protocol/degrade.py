"""Where a model may go: INT4 where the NPU does not support it, and never to what is slower."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from switchgear.daemon.protocol.constants import Constants
    from switchgear.daemon.protocol.records import PairRecord
    from switchgear.daemon.protocol.topology import PairKey


def is_unsupported(record: PairRecord, code: str) -> bool:
    """Whether `domain:code` is how this backend says that it does not support a model."""
    constants = record.state.constants
    return record.key.backend in constants.degrade_backends and code in constants.degrade_codes


def degraded(
    records: Iterable[PairRecord], constants: Constants
) -> tuple[PairRecord, PairRecord] | None:
    """A model's pair that is unsupported, and its INT4 pair where that is ready."""
    refused = refuge = None
    for record in records:
        breaker = record.state.breaker
        if record.key.backend in constants.degrade_backends:
            if breaker.phase == "quarantined" and breaker.cause == "unsupported":
                refused = record
        elif (
            record.ready
            and record.key.backend == constants.refuge_backend
            and record.key.precision == constants.refuge_precision
        ):
            refuge = record

    return (refused, refuge) if refused is not None and refuge is not None else None


def expected_ms(
    record: PairRecord, estimate: Callable[[PairKey], float | None] | None
) -> float | None:
    """How long a pair's frame is expected to take in ms; None where nobody knows."""
    told_ms = estimate(record.key) if estimate is not None else None
    return told_ms if told_ms is not None else record.state.median_ms or None


def faster_than_cpu(
    refuge: PairRecord,
    records: Iterable[PairRecord],
    estimate: Callable[[PairKey], float | None] | None,
) -> bool:
    """Whether the INT4 pair is expected to run faster than every CPU pair of the model."""
    on_cpu = (record for record in records if record.device.state.limits.is_cpu)
    times = (expected_ms(record, estimate) for record in on_cpu if record.ready)
    known = [told_ms for told_ms in times if told_ms is not None]
    if not known:
        # Nothing to compare with: the trial itself will tell.
        return True

    mine_ms = expected_ms(refuge, estimate)
    return mine_ms is not None and mine_ms < min(known)


def slower(
    other: PairRecord, run_ms: float, estimate: Callable[[PairKey], float | None] | None
) -> bool:
    """Whether a pair is known to be slower than the slow frames that ask to leave for it."""
    if not other.state.constants.refuge_faster:
        return False

    told_ms = expected_ms(other, estimate)
    return told_ms is not None and told_ms > run_ms
