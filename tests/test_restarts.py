"""When a lane's next worker is due: delays, streaks, patience."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from switchgear.daemon.restarts import (
    RESTART_FIRST_S,
    RESTART_LAST_S,
    RESTART_PATIENCE_S,
    Restarts,
)


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time stands still, so that delays are exact."""

    def time(self) -> float:
        return 1000.0


def in_loop(test: Callable[[list[str], Restarts], None], *, still: bool = True) -> None:
    async def run() -> None:
        due: list[str] = []
        restarts = Restarts(lambda: due.append("due"))
        test(due, restarts)
        restarts.cancel()

    loop: Any = Clock() if still else None
    with asyncio.Runner(loop_factory=(lambda: loop) if still else None) as runner:
        runner.run(run())


def delays(restarts: Restarts, count: int, **how: bool) -> list[float]:
    """The delay after each of so many ends in a row."""
    found = []
    for _ in range(count):
        restarts.ended(**{"wanted": True, "absent": False, **how})
        found.append(restarts.wait_s)
        restarts.cancel()

    return found


def test_the_first_is_at_once_and_the_others_double_up_to_a_bound() -> None:
    def test(_due: list[str], restarts: Restarts) -> None:
        expected = [0.0, *(RESTART_FIRST_S * 2**n for n in range(9)), RESTART_LAST_S]
        assert delays(restarts, 11) == pytest.approx(expected)
        assert restarts.streak == 11

    in_loop(test)


def test_no_streak_is_too_long() -> None:
    def test(_due: list[str], restarts: Restarts) -> None:
        restarts.streak = 100_000
        assert delays(restarts, 1) == pytest.approx([RESTART_LAST_S])

    in_loop(test)


def test_an_answer_ends_the_streak() -> None:
    def test(_due: list[str], restarts: Restarts) -> None:
        delays(restarts, 5)
        restarts.streak = 0
        assert delays(restarts, 2) == pytest.approx([0.0, RESTART_FIRST_S])

    in_loop(test)


def test_an_owner_that_wants_a_worker_at_once_starts_it_itself() -> None:
    def test(_due: list[str], restarts: Restarts) -> None:
        restarts.ended(wanted=True, absent=False)
        assert not restarts.pending

    in_loop(test)


def test_where_nobody_wants_it_the_loops_next_turn_brings_it() -> None:
    async def run() -> None:
        came = asyncio.Event()
        restarts = Restarts(came.set)
        restarts.ended(wanted=False, absent=False)
        assert restarts.pending
        assert not came.is_set()
        await came.wait()
        assert not restarts.pending

    asyncio.run(run())


def test_what_is_absent_is_tried_again_late_whatever_the_streak() -> None:
    def test(_due: list[str], restarts: Restarts) -> None:
        assert delays(restarts, 1, absent=True) == pytest.approx([RESTART_LAST_S])

    in_loop(test)


def test_a_process_that_the_system_has_no_room_for_is_not_tried_at_once() -> None:
    def test(_due: list[str], restarts: Restarts) -> None:
        restarts.not_started()
        assert restarts.wait_s == pytest.approx(RESTART_FIRST_S)
        assert restarts.streak == 2

    in_loop(test)


@pytest.mark.parametrize(("streak", "far"), [(0, False), (4, False), (5, True)])
def test_what_is_waited_for(streak: int, far: bool) -> None:
    """0.8 s after the fourth end in a row, 1.6 s after the fifth."""

    def test(_due: list[str], restarts: Restarts) -> None:
        restarts.streak = streak
        restarts.ended(wanted=False, absent=False)
        assert restarts.far is far
        assert (restarts.wait_s > RESTART_PATIENCE_S) is far

    in_loop(test)


def test_what_is_hastened_is_due_once() -> None:
    def test(due: list[str], restarts: Restarts) -> None:
        restarts.hasten()
        assert due == []
        restarts.ended(wanted=True, absent=True)
        restarts.hasten()
        assert (due, restarts.pending) == (["due"], False)
        restarts.hasten()
        assert due == ["due"]

    in_loop(test)


def test_what_is_cancelled_never_comes() -> None:
    async def run() -> None:
        due: list[str] = []
        restarts = Restarts(lambda: due.append("due"))
        restarts.ended(wanted=False, absent=False)
        restarts.cancel()
        restarts.cancel()
        for _ in range(5):
            await asyncio.sleep(0)

        assert (due, restarts.pending, restarts.wait_s) == ([], False, 0.0)

    asyncio.run(run())
