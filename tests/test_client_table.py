"""Who owns which slot: any order of what the two sides do."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from switchgear.client.table import RequestTable
from switchgear.ipc.errors import (
    BadSlot,
    ProtocolError,
    SlotBusy,
)
from switchgear.ipc.record import NO_SLOT

SLOTS = 3
OUTPUT_SLOTS = 6


class TableMachine(RuleBasedStateMachine):
    """Any order of takes, submits, replies (in any output slot) and releases."""

    def __init__(self) -> None:
        super().__init__()
        self.table: RequestTable[str] = RequestTable(SLOTS, OUTPUT_SLOTS)
        self.held: set[int] = set()
        self.flying: dict[int, int] = {}
        self.ended: list[int] = []
        self.next_id = 1

    @rule()
    def take(self) -> None:
        slot = self.table.take()
        if slot is None:
            assert len(self.held) + len(self.flying) == SLOTS
        else:
            assert slot not in self.held
            assert slot not in self.flying.values()
            self.held.add(slot)

    @rule(slot=st.integers(-1, SLOTS))
    def take_one(self, slot: int) -> None:
        if not 0 <= slot < SLOTS:
            with pytest.raises(BadSlot):
                self.table.take_slot(slot)
        elif slot in self.held or slot in self.flying.values():
            with pytest.raises(SlotBusy):
                self.table.take_slot(slot)
        else:
            self.table.take_slot(slot)
            self.held.add(slot)

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        if not self.held:
            return

        slot = data.draw(st.sampled_from(sorted(self.held)))
        owned = self.table.outputs[slot]
        given = self.table.begin(self.next_id, f"request {self.next_id}", slot)
        assert given == owned
        self.held.remove(slot)
        self.flying[self.next_id] = slot
        self.next_id += 1

    @rule(data=st.data())
    def begin_twice(self, data: st.DataObject) -> None:
        if self.flying:
            slot = data.draw(st.sampled_from(sorted(self.flying.values())))
            with pytest.raises(SlotBusy):
                self.table.begin(self.next_id, "second", slot)

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if self.flying:
            request_id = data.draw(st.sampled_from(sorted(self.flying)))
            given = self.table.in_flight[request_id][2]
            # As directly after begin, while no reply has given the output slot to another.
            if given not in self.table.outputs:
                self.table.withdraw(request_id)
                self.held.add(self.flying.pop(request_id))

    @rule(data=st.data())
    def reply(self, data: st.DataObject) -> None:
        if not self.flying:
            return

        request_id = data.draw(st.sampled_from(sorted(self.flying)))
        daemons = sorted(set(range(OUTPUT_SLOTS)) - set(self.table.outputs))
        output = data.draw(st.sampled_from(daemons))
        assert self.table.finish(request_id, output) == f"request {request_id}"
        slot = self.flying.pop(request_id)
        assert self.table.outputs[slot] == output
        self.ended.append(request_id)
        self.held.add(slot)

    @rule(output=st.integers(0, OUTPUT_SLOTS), data=st.data())
    def reply_that_breaks_the_protocol(self, output: int, data: st.DataObject) -> None:
        # To a request that has ended or never was.
        request_id = data.draw(st.sampled_from([*self.ended, self.next_id]))
        with pytest.raises(ProtocolError):
            self.table.finish(request_id, output)

        # With an output slot that the client owns, or that is none.
        if self.flying:
            flying = data.draw(st.sampled_from(sorted(self.flying)))
            clients = [o for o in self.table.outputs if o != NO_SLOT]
            wrong = data.draw(st.sampled_from([*clients, OUTPUT_SLOTS, NO_SLOT]))
            with pytest.raises(ProtocolError):
                self.table.finish(flying, wrong)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.held:
            slot = data.draw(st.sampled_from(sorted(self.held)))
            self.held.remove(slot)
            self.table.give_back(slot)

    @rule()
    def end(self) -> None:
        """All requests in flight end, each once; a new session begins."""
        ended = self.table.end()
        assert sorted(ended) == sorted(f"request {n}" for n in self.flying)
        assert self.table.end() == []
        self.__init__()  # type: ignore[misc]

    @invariant()
    def slots_are_a_partition(self) -> None:
        assert self.table.free + len(self.held) + len(self.flying) == SLOTS
        assert set(self.table.in_flight) == set(self.flying)
        assert len(set(self.ended)) == len(self.ended)

    @invariant()
    def the_client_owns_one_output_slot_for_each_slot_at_rest(self) -> None:
        owned = [output for output in self.table.outputs if output != NO_SLOT]
        assert len(set(owned)) == len(owned) == SLOTS - len(self.flying)


TestRequestTable = TableMachine.TestCase
TestRequestTable.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
