"""Which model the death of a worker counts against."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from switchgear.daemon.lane import Lane
    from switchgear.daemon.request import Request
    from switchgear.daemon.worker_process import WorkerProcess

# A model is quarantined after ending this many workers in a row.
QUARANTINE_DEATHS: Final = 4

log = logging.getLogger(__name__)


def count_death(lane: Lane, worker: WorkerProcess, lost: Sequence[Request]) -> None:
    """Counts a death against the model that was running (the first of `lost`), or that a
    device's worker was loading, unless somebody else killed it."""
    if worker.killed_by_signal_9_from_outside or worker.end_reason == "asked to":
        return

    model = lost[0].session.model if lost else None
    loading = worker.loading if lane.backend != "cpu" else None
    if loading is not None and (model is None or loading[1] < lost[0].dispatch_ns):
        # A load that was asked for first: the runs were behind it.
        model = loading[0]

    if model is not None:
        model.deaths[lane.blamed] += 1
        if model.deaths[lane.blamed] == QUARANTINE_DEATHS:
            model.quarantined.add(lane.blamed)
            log.error(
                "model %s is quarantined on %s: %s",
                model.label,
                lane.backend,
                worker.end_reason,
            )
