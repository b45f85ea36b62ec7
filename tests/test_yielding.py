"""A test process keeps still while requests run, at no cost of its limits, but not for ever."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from switchgear.daemon import yielding as yielding_module
from switchgear.daemon.yielding import Yielding
from switchgear.fingerprints.child import Limits, Outcome, TestProcess
from switchgear.fingerprints.measure.options import Options
from switchgear.fingerprints.measurement import CPU, NPU_UTILISATION, Value

SILENCE_S = 3.0


class Lanes:
    """Stands in for the pool: requests come and go as the test says."""

    def __init__(self) -> None:
        self.callback: Callable[[], None] | None = None
        self.idle = float("inf")

    def watch_requests(self, callback: Callable[[], None]) -> None:
        self.callback = callback

    def unwatch_requests(self, callback: Callable[[], None]) -> None:
        assert self.callback == callback
        self.callback = None

    def idle_s(self) -> float:
        return self.idle

    def request(self) -> None:
        self.idle = 0.0
        if self.callback is not None:
            self.callback()


class Process:
    """Stands in for a test process: remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.news = asyncio.Event()

    def pause(self) -> None:
        self.told.append("pause")

    def go_on(self) -> None:
        self.told.append("go on")
        self.news.set()


def test_it_pauses_at_a_request_and_goes_on_after_the_last() -> None:
    async def scene() -> list[str]:
        lanes, process = Lanes(), Process()
        with Yielding(lanes) as yielding:  # type: ignore[arg-type]
            yielding.started(process)
            assert process.told == []
            lanes.request()
            lanes.request()
            assert process.told == ["pause"]
            # Still running at the next look: it goes on keeping still.
            await asyncio.sleep(3 * yielding_module.QUIET_S)
            assert process.told == ["pause"]
            lanes.idle = 1.0
            await process.news.wait()

        assert lanes.callback is None
        return process.told

    assert asyncio.run(scene()) == ["pause", "go on"]


def test_one_that_starts_during_a_request_pauses_at_once() -> None:
    async def scene() -> list[str]:
        lanes, process = Lanes(), Process()
        lanes.request()
        with Yielding(lanes) as yielding:  # type: ignore[arg-type]
            yielding.started(process)
            assert process.told == ["pause"]

        # Whoever leaves lets it go.
        return process.told

    assert asyncio.run(scene()) == ["pause", "go on"]


def test_requests_without_end_hold_it_up_for_so_long_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(yielding_module, "PAUSED_LIMIT_S", 0.02)

    async def scene() -> list[str]:
        lanes, process = Lanes(), Process()
        with Yielding(lanes) as yielding:  # type: ignore[arg-type]
            yielding.started(process)
            lanes.request()
            await process.news.wait()
            lanes.request()
            return list(process.told)

    assert asyncio.run(scene()) == ["pause", "go on"]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def pid_of(process: TestProcess) -> int:
    assert process._process is not None
    return process._process.pid


def test_the_time_of_a_pause_counts_against_no_limit() -> None:
    async def scene() -> Outcome:
        stopped = asyncio.Event()

        def started(process: TestProcess) -> None:
            process.pause()
            process.pause()
            stopped.set()

        process = TestProcess(
            NPU_UTILISATION,
            Options(quick=True, yield_cpu=False),
            Limits(total_s=SILENCE_S, silence_s=SILENCE_S),
            started=started,
        )
        run = asyncio.create_task(process.run())
        await stopped.wait()
        # Longer than both limits: that it passes is what is tested.
        await asyncio.sleep(SILENCE_S + 0.5)
        assert state_of(pid_of(process)) == "T"
        assert not run.done()
        process.go_on()
        outcome = await run
        process.pause()
        process.go_on()
        return outcome

    outcome = asyncio.run(scene())
    assert outcome.death is None
    assert [report.test for report in outcome.reports] == [NPU_UTILISATION]


@pytest.mark.engine
def test_what_is_measured_across_a_pause_is_noisy() -> None:
    async def scene() -> Outcome:
        def progress(*_: object) -> None:
            process.pause()
            process.go_on()

        process = TestProcess(
            CPU,
            Options(quick=True, yield_cpu=False, budget_s=0.1),
            Limits(),
            progress=progress,
        )
        return await process.run()

    outcome = asyncio.run(scene())
    values = [v for report in outcome.reports for v in report.values if isinstance(v, Value)]
    assert len(values) > 3
    assert all(value.noisy for value in values)


def test_a_paused_process_ends_when_it_is_cancelled() -> None:
    async def scene() -> int:
        stopped = asyncio.Event()

        def started(process: TestProcess) -> None:
            process.pause()
            stopped.set()

        process = TestProcess(CPU, Options(quick=True), Limits(), started=started)
        run = asyncio.create_task(process.run())
        await stopped.wait()
        pid = pid_of(process)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

        return pid

    with pytest.raises(ProcessLookupError):
        os.kill(asyncio.run(scene()), 0)
