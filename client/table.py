"""Who owns which slot: the client's side of the rules of `docs/protocol.md`, without I/O.

The client's slots are its input slots. Each goes round: free, held (by a caller that fills it),
in flight, answered (its result waits to be taken), free. With each goes one output slot, which
the daemon owns while the slot is in flight; the reply says which output slot comes back.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from switchgear.ipc.errors import BadSlot, ProtocolError, SlotBusy
from switchgear.ipc.record import NO_SLOT

R = TypeVar("R")


class RequestTable(Generic[R]):
    """Slots and the requests in them.

    `take` and `give_back` are single operations on a deque, so they need no lock. The owner
    serialises the others.
    """

    def __init__(self, slots: int, output_slots: int) -> None:
        self.slots = slots
        self.output_slots = output_slots
        # The slot that was used longest ago comes first: results stay valid as long as can be.
        self._free = deque(range(slots))
        # The output slot of each slot; NO_SLOT while the daemon has it.
        self.outputs = list(range(slots))
        # Each request with its slot and the output slot that it gave to the daemon.
        self.in_flight: dict[int, tuple[R, int, int]] = {}

    @property
    def free(self) -> int:
        """How many slots are free."""
        return len(self._free)

    def take(self) -> int | None:
        """A free slot, which the caller holds from now on; None where there is none."""
        try:
            return self._free.popleft()
        except IndexError:
            return None

    def take_slot(self, slot: int) -> None:
        """Takes this slot.

        :raises BadSlot: there is no such slot.
        :raises SlotBusy: it is not free.
        """
        if not 0 <= slot < self.slots:
            raise BadSlot(f"the session has no slot {slot}: it has {self.slots}")

        try:
            self._free.remove(slot)
        except ValueError:
            raise SlotBusy(f"slot {slot} is in use") from None

    def give_back(self, slot: int) -> None:
        """Makes a held or answered slot free."""
        self._free.append(slot)

    def begin(self, request_id: int, request: R, slot: int) -> int:
        """Puts a request in flight in a slot that the caller holds.

        Returns the output slot to give to the daemon.

        :raises SlotBusy: a request is in flight in the slot.
        """
        output = self.outputs[slot]
        if output == NO_SLOT:
            raise SlotBusy(f"slot {slot} has a request in flight")

        self.outputs[slot] = NO_SLOT
        self.in_flight[request_id] = (request, slot, output)
        return output

    def request_in(self, slot: int) -> R | None:
        """The request that is in flight in a slot."""
        for request, its_slot, _ in self.in_flight.values():
            if its_slot == slot:
                return request

        return None

    def withdraw(self, request_id: int) -> None:
        """Undoes `begin` for a request that could not be sent."""
        _, slot, output = self.in_flight.pop(request_id)
        self.outputs[slot] = output

    def finish(self, request_id: int, output: int) -> R:
        """Takes the request that a reply answers out; its slot owns `output` from now on.

        :raises ProtocolError: no such request is in flight, or the daemon does not own that
            output slot.
        """
        entry = self.in_flight.get(request_id)
        if entry is None:
            raise ProtocolError(f"a reply to request {request_id}, which is not in flight")

        if not 0 <= output < self.output_slots or output in self.outputs:
            raise ProtocolError(
                f"a reply gives output slot {output}, which is not the daemon's"
            )

        del self.in_flight[request_id]
        self.outputs[entry[1]] = output
        return entry[0]

    def end(self) -> list[R]:
        """Takes all requests out of flight: the session is over."""
        requests = [request for request, _, _ in self.in_flight.values()]
        self.in_flight.clear()
        return requests
