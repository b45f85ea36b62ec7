"""Requests that run in two places: one answer each, whichever copy fails, is first or late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fake_worker import FakeWorker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from session_world import World, play, step

from switchgear.daemon import lane as lane_module
from switchgear.daemon import restarts as restarts_module
from switchgear.daemon.protocol.topology import PairKey
from switchgear.daemon.session import Session
from switchgear.daemon.slots import Slot
from switchgear.ipc.errors import ModelInUse
from switchgear.ipc.record import Backend, Priority, Reason, Record

CPU, NPU = 0, 1
FREE = [Slot.CLIENT] * 2 + [Slot.SPARE] * 4


@pytest.fixture(autouse=True)
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "WorkerProcess", FakeWorker)
    # Restarts are due at the loop's next turn.
    monkeypatch.setattr(restarts_module, "RESTART_FIRST_S", 0.0)


@pytest.mark.parametrize("on_busy", ["wait", "reject", "replace_oldest"])
@given(steps=st.lists(step, max_size=50))
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_each_request_is_answered_and_counted_once(
    on_busy: str, steps: list[tuple[str, int, int, int]]
) -> None:
    """`World` holds that no slot that a copy may still write to is anybody else's."""
    asyncio.run(play(steps, state=False, on_busy=on_busy, hedge=True))


class Pair:
    """One client with one request that runs on the CPU (the first copy) and on the NPU."""

    def __init__(self, *, ready: bool = True, on_busy: str = "wait") -> None:
        self.world = World(state=False, on_busy=on_busy, hedge=True)
        self.client = self.world.clients[0]
        self.replies: list[Record] = []
        self.client.session.deliver = self._take
        if ready:
            for number in (CPU, NPU):
                self.worker(number).become_ready()

        self.send()

    def _take(self, data: bytes | bytearray) -> None:
        self.replies.append(Record.unpack(bytes(data)))
        self.client.deliver(data)

    def owner(self, slot: int) -> Slot:
        return self.session.output_slots[slot]

    def send(self, slot: int = 0) -> None:
        self.client.send(slot, slot, Priority.DEFAULT)
        self.world.check()

    def worker(self, number: int) -> Any:
        return self.world.lanes[number].worker

    @property
    def session(self) -> Session:
        return self.client.session

    def answer(self, number: int, *, failed: bool = False) -> None:
        self.worker(number).answer(failed=failed)
        self.world.check()


def with_pair(test: Callable[[Pair], None], **how: Any) -> None:
    async def run() -> None:
        pair = Pair(**how)
        test(pair)
        await pair.world.settle()
        pair.world.close()

    asyncio.run(run())


def test_the_second_copy_is_first() -> None:
    def test(pair: Pair) -> None:
        pair.answer(NPU)
        (reply,) = pair.replies
        assert (reply.status_domain, reply.reason) == (0, Reason.HEDGED)
        assert reply.output_slot == 2, "its own slot, which the reply names"
        assert [pair.owner(slot) for slot in range(3)] == [
            Slot.POISONED,
            Slot.CLIENT,
            Slot.CLIENT,
        ]
        pair.answer(CPU)
        assert len(pair.replies) == 1
        assert pair.owner(0) is Slot.SPARE

    with_pair(test)


def test_the_first_copy_is_first() -> None:
    def test(pair: Pair) -> None:
        pair.answer(CPU)
        (reply,) = pair.replies
        assert (reply.status_domain, reply.reason, reply.output_slot) == (0, Reason.NONE, 0)
        assert pair.owner(2) is Slot.POISONED
        pair.answer(NPU)
        assert len(pair.replies) == 1
        assert pair.session.output_slots == FREE

    with_pair(test)


@pytest.mark.parametrize("first", [CPU, NPU])
def test_an_error_of_one_copy_is_not_the_answer(first: int) -> None:
    def test(pair: Pair) -> None:
        pair.answer(first, failed=True)
        assert pair.replies == []
        assert pair.session.in_flight == 1
        pair.answer(1 - first)
        (reply,) = pair.replies
        assert reply.status_domain == 0
        backend = pair.world.lanes[first].number
        assert reply.tried == 1 << backend, "nothing silent"
        assert pair.session.output_slots.count(Slot.SPARE) == pair.world.spare

    with_pair(test)


def test_what_a_failure_is_blamed_for_goes_with_the_copy_that_goes_on() -> None:
    """It counts once the same request was answered elsewhere."""

    def test(pair: Pair) -> None:
        blame = (PairKey("model", "npu", "fp32"), "delegate", 1)
        second = pair.session._requests[1].twin
        assert second is not None
        second.blame = blame
        pair.answer(NPU, failed=True)
        assert pair.session._requests[1].blame == blame

    with_pair(test)


def test_two_errors_are_one() -> None:
    def test(pair: Pair) -> None:
        pair.answer(NPU, failed=True)
        pair.answer(CPU, failed=True)
        (reply,) = pair.replies
        assert reply.status_domain == 4
        assert reply.tried == 1 << Backend.NPU
        assert pair.session.output_slots == FREE

    with_pair(test)


def test_a_copys_dead_worker_costs_nothing_and_its_slot_waits_for_the_device() -> None:
    def test(pair: Pair) -> None:
        pair.worker(NPU).die()
        pair.world.check()
        assert pair.replies == []
        # The device may go on writing, though the process is gone.
        assert pair.owner(2) is Slot.POISONED
        pair.answer(CPU)
        (reply,) = pair.replies
        assert (reply.status_domain, reply.retries, reply.tried) == (0, 0, 1 << Backend.NPU)
        pair.worker(NPU).become_ready()
        pair.send()
        pair.answer(NPU)
        assert pair.owner(2) is Slot.SPARE

    with_pair(test)


def test_a_copy_that_waits_is_withdrawn() -> None:
    def test(pair: Pair) -> None:
        pair.worker(CPU).become_ready()
        assert (pair.world.lanes[CPU].running, pair.world.lanes[NPU].queued) == (1, 1)
        pair.answer(CPU)
        assert len(pair.replies) == 1
        assert pair.world.lanes[NPU].queued == 0
        assert pair.session.output_slots == FREE

    with_pair(test, ready=False)


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("how", ["cancel", "expire", "go away"])
def test_who_gives_up_is_answered_once_and_both_copies_are_dropped(
    how: str, ready: bool
) -> None:
    def test(pair: Pair) -> None:
        if how == "cancel":
            pair.client.cancel(1)
        elif how == "expire":
            pair.session._expired(pair.session._requests[1])
        else:
            pair.session.go_away(ModelInUse)

        assert len(pair.client.answers) == 1
        if how != "go away":
            pair.world.check()

        for number in (CPU, NPU):
            while pair.worker(number).busy:
                pair.worker(number).answer()

        assert len(pair.client.answers) == 1
        assert not any(lane.queued for lane in pair.world.lanes)

    with_pair(test, ready=ready)


def test_one_that_runs_in_one_place_is_not_superseded() -> None:
    def test(pair: Pair) -> None:
        pair.worker(NPU).become_ready()
        assert pair.world.lanes[CPU].queued == 1
        pair.send(1)
        assert pair.replies == []
        pair.answer(NPU)
        assert [reply.reason for reply in pair.replies] == [Reason.HEDGED]

    with_pair(test, ready=False, on_busy="replace_oldest")


def test_a_slot_is_kept_to_give_a_request_up_with() -> None:
    def test(pair: Pair) -> None:
        pair.send(1)
        pair.answer(CPU)
        pair.answer(CPU)
        # Both copies still run on the NPU and hold their slots.
        assert pair.session.output_slots.count(Slot.POISONED) == 2
        pair.send(0)
        assert pair.world.hedged == 3
        pair.send(1)
        assert pair.world.hedged == 3, "one slot is left"
        assert (pair.session.in_flight, pair.world.lanes[NPU].queued) == (2, 1)
        pair.client.cancel(3)
        assert len(pair.client.answers) == 3
        assert pair.client.answers[-1] == "Cancelled"

    with_pair(test)


def test_the_timer_goes_with_the_copy_that_goes_on() -> None:
    async def run() -> None:
        pair = Pair()
        request = pair.session._requests[1]
        timer = asyncio.get_running_loop().call_later(1000, lambda: None)
        request.timer = timer
        pair.answer(CPU, failed=True)
        twin = pair.session._requests[1]
        assert twin is not request
        assert twin.timer is timer
        pair.answer(NPU)
        assert timer.cancelled()
        pair.world.close()

    asyncio.run(run())
