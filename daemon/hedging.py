"""A request that runs in two places at once: the first good answer is its only reply.

The two copies are requests with one id and one input slot, and an output slot each; `twin`
names the other one as long as both go on. One of them is the session's: it stands in the tables
and has the timer. When one of them leaves, the other is the session's from then on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from switchgear.daemon.slots import Slot
from switchgear.ipc.record import STATUS, STATUS_OFFSET

if TYPE_CHECKING:
    from switchgear.daemon.request import Request


class Hedges:
    """The copies of one session's requests. The tables are the session's: unanswered requests
    by id, requests by input slot, owners by output slot. Nothing here blocks."""

    def __init__(
        self,
        requests: dict[int, Request],
        inputs: list[Request | None],
        outputs: list[Slot],
    ) -> None:
        self._requests = requests
        self._inputs = inputs
        self._outputs = outputs

    def copy(self, request: Request) -> Request | None:
        """The second copy of a request for which a second place was chosen; the caller submits
        it there. None where that is answered by now, or no spare slot is free."""
        if request.second is None or request.answered or Slot.SPARE not in self._outputs:
            return None

        slot = self._outputs.index(Slot.SPARE)
        self._outputs[slot] = Slot.REQUEST
        return request.copy(request.second, slot)

    def ended(self, request: Request, reply: bytearray) -> None:
        """A worker is done with one of two copies. With a good answer that is the reply, and
        the other is dropped; with an error it is as if it were answered: the other goes on."""
        assert request.twin is not None
        domain, _, _, code = STATUS.unpack_from(reply, STATUS_OFFSET)
        if domain or code:
            if request.lane is not None:
                request.tried |= 1 << request.lane.number

            self.give_way(request)
        else:
            self.drop(request.twin)

    def drop(self, request: Request) -> None:
        """One of two copies is not wanted any more. One that runs keeps its slot from use until
        its worker is done with it."""
        self.give_way(request)
        if request.waiting and request.lane is not None:
            request.lane.withdraw(request)
            self._outputs[request.output_slot] = Slot.SPARE

    def give_way(self, request: Request) -> None:
        """Leaves all to the other copy. Its slot is poisoned: who knows that nobody writes to
        it frees it."""
        twin = request.twin
        assert twin is not None
        request.twin = twin.twin = None
        request.answered = True
        self._outputs[request.output_slot] = Slot.POISONED
        twin.tried |= request.tried
        twin.blame = twin.blame or request.blame
        if request.timer is not None:
            twin.timer, request.timer = request.timer, None

        self._requests[twin.identity] = twin
        self._inputs[twin.input_slot] = twin
