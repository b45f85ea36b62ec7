"""Sessions and a lane under random records, replies, deaths and cancels.

Whatever happens: each request is answered exactly once, the client always owns as many output
slots as it gave away none of, and nobody else writes to a slot that it owns.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from fake_worker import FakeWorker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from session_world import SLOTS, World, play, step

from switchgear.daemon import lane as lane_module
from switchgear.daemon import restarts as restarts_module
from switchgear.ipc.errors import ModelInUse
from switchgear.ipc.record import Priority

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "WorkerProcess", FakeWorker)
    # Restarts are due at the loop's next turn.
    monkeypatch.setattr(restarts_module, "RESTART_FIRST_S", 0.0)


@pytest.mark.parametrize("on_busy", ["wait", "reject", "replace_oldest"])
@pytest.mark.parametrize("state", [False, True])
@given(steps=st.lists(step, max_size=40))
@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_each_request_is_answered_once_and_no_slot_has_two_writers(
    state: bool, on_busy: str, steps: list[tuple[str, int, int, int]]
) -> None:
    asyncio.run(play(steps, state=state, on_busy=on_busy))


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as loop:
        yield loop


def test_a_death_costs_a_stateful_session_one_state_lost(runner: asyncio.Runner) -> None:
    steps = [("ready", 0, 0, 0), ("infer", 0, 0, 0), ("infer", 0, 0, 0), ("die", 0, 0, 0)]
    world = runner.run(play(steps, state=True, on_busy="wait"))
    assert world.clients[0].answers == ["StateLost", "StateLost"]
    assert world.clients[0].epoch == 2


def test_a_stateless_request_is_run_again_once(runner: asyncio.Runner) -> None:
    steps = [("ready", 0, 0, 0), ("infer", 0, 0, 0), ("die", 0, 0, 0)]
    world = runner.run(play(steps, state=False, on_busy="wait"))
    assert world.clients[0].answers == [""]
    again = [*steps, ("ready", 0, 0, 0), ("die", 0, 0, 0)]
    world = runner.run(play(again, state=False, on_busy="wait"))
    assert world.clients[0].answers == ["WorkerDied"]


def test_a_worker_left_behind_keeps_its_slot(runner: asyncio.Runner) -> None:
    """It may still write: the request goes on with a fresh slot, which the reply names."""
    steps = [("ready", 0, 0, 0), ("infer", 0, 0, 0), ("abandon", 0, 0, 0)]
    world = runner.run(play(steps, state=False, on_busy="wait"))
    client = world.clients[0]
    assert client.answers == [""]
    assert client.owned == {1, 2}


def test_end_of_a_model_tells_the_client_why(runner: asyncio.Runner) -> None:
    async def run() -> None:
        world = World(state=False, on_busy="wait")
        for slot in range(SLOTS):
            world.clients[0].send(slot, slot, Priority.DEFAULT)

        world.clients[0].session.go_away(ModelInUse)
        assert world.clients[0].answers == ["ModelInUse"] * SLOTS
        assert world.clients[0].gone
        assert world.clients[0].session.ended
        world.close()

    runner.run(run())
