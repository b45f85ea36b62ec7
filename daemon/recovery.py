"""The way on for a request whose run failed, or whose worker is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from switchgear.ipc.errors import ModelQuarantined, NoBackend, StateLost, WorkerDied
from switchgear.ipc.record import NO_SLOT, Reason

if TYPE_CHECKING:
    from switchgear.daemon.lane import Lane
    from switchgear.daemon.lane_settings import Watcher
    from switchgear.daemon.request import Request

# A request is run so often: what has ended two workers ends the third.
MAX_ATTEMPTS: Final = 2


def run_elsewhere(lane: Lane, watcher: Watcher, request: Request) -> bool:
    """A driver failed a request: whether another backend has it now. What was answered already
    needs none, and what has a second copy is there."""
    if request.answered or request.twin is not None or request.attempts + 1 >= MAX_ATTEMPTS:
        return False

    other = watcher.elsewhere(request, lane)
    if other is None:
        return False

    request.tried |= 1 << lane.number
    request.attempts += 1
    request.reason = Reason.RETRIED
    request.session.resubmit(request, other)
    return True


def recover(lane: Lane, request: Request, *, was_running: bool, abandoned: bool) -> None:
    """Finds a way on for a request that a worker took with it. `abandoned`: the worker is left
    behind in the kernel and may still write."""
    session = request.session
    request.tried |= 1 << lane.number
    session.give_way(request)
    # A device may go on writing when the process is gone: the lane's next answer shows.
    stains = was_running and lane.backend != "cpu" and not abandoned
    if request.answered and stains:
        if not session.ended:
            lane.stain(session, request.output_slot)

        return

    if not (session.poison(request) if abandoned else session.unpoison(request)):
        return

    if was_running:
        request.attempts += 1
        if stains:
            old = session.move(request)
            if old != NO_SLOT:
                lane.stain(session, old)

    if session.model.state:
        session.refuse(request, StateLost)
        return

    request.reason = Reason.RETRIED
    other = lane.watcher.elsewhere(request, lane) if lane.watcher is not None else None
    if other is not None:
        session.resubmit(request, other)
    elif lane.blamed in session.model.quarantined:
        session.refuse(request, ModelQuarantined)
    elif lane.stopping:
        session.refuse(request, NoBackend)
    elif request.attempts >= MAX_ATTEMPTS:
        session.refuse(request, WorkerDied)
    else:
        lane.wait_again(request)
