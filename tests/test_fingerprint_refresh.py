"""The stored profile brought up to date: what runs, what is kept, what is told.

The runner is replaced, for these tests are about what it is asked to run; the real one runs in
`test_fingerprint_cli.py`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from profile_helpers import ZONES, profile, reports

from switchgear.fingerprints import refresh as refresh_module
from switchgear.fingerprints.measurement import (
    CPU,
    NPU_UTILISATION,
    TESTS,
    Report,
)
from switchgear.fingerprints.refresh import Refreshed, Surroundings, refresh
from switchgear.fingerprints.runner import Plan
from switchgear.fingerprints.store import ProfileStore

HERE = Surroundings(ZONES, ("soc",), {"gpu": 62.5})


class Recorder:
    """Stands in for the runner: remembers what was asked, answers the helpers' reports."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    async def run(self, plan: Plan, **_: Any) -> list[Report]:
        self.asked.append(plan.tests)
        return [report for report in reports() if report.test in plan.tests]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(refresh_module, "runner", recorder)
    return recorder


def go(store: ProfileStore, plan: Plan | None = None, **options: Any) -> Refreshed:
    return asyncio.run(refresh(store, plan or Plan(), HERE, clock=lambda: 5000.0, **options))


def test_the_first_start_measures_all_and_the_second_nothing(
    tmp_path: Path, runner: Recorder
) -> None:
    store = ProfileStore(tmp_path)
    first = go(store)
    assert (first.saved, first.problems, list(first.stale)) == (True, (), list(TESTS))
    assert first.profile is not None
    assert first.profile.devices[1].threshold.source == "operator"
    second = go(store)
    assert (second.saved, dict(second.stale), second.profile) == (False, {}, first.profile)
    assert runner.asked == [TESTS]


def test_force_measures_all_again(tmp_path: Path, runner: Recorder) -> None:
    store = ProfileStore(tmp_path)
    go(store)
    assert list(go(store, force=True).stale) == list(TESTS)
    assert runner.asked == [TESTS, TESTS]


def test_an_updated_delegate_measures_the_npu_only(tmp_path: Path, runner: Recorder) -> None:
    delegate = tmp_path / "npu.so"
    delegate.write_text("one")
    store = ProfileStore(tmp_path / "state")
    plan = Plan(delegate=str(delegate))
    go(store, plan)
    delegate.write_text("another")
    again = go(store, plan)
    assert list(again.stale) == [NPU_UTILISATION]
    assert again.saved
    assert go(store, plan).stale == {}
    assert runner.asked == [TESTS, (NPU_UTILISATION,)]


def test_a_plan_of_one_test_leaves_the_others_stale(tmp_path: Path, runner: Recorder) -> None:
    store = ProfileStore(tmp_path)
    go(store, Plan(tests=(CPU,)))
    assert set(go(store).stale) == set(TESTS) - {CPU}
    assert runner.asked[1] == tuple(test for test in TESTS if test != CPU)


def test_a_bad_file_is_told_and_measured_again(tmp_path: Path, runner: Recorder) -> None:
    store = ProfileStore(tmp_path)
    store.path.write_bytes(bytes(400))
    done = go(store)
    assert done.saved
    (problem,) = done.problems
    assert "NUL" in problem
    assert ".bad-" in problem
    assert go(store).problems == ()
    assert runner.asked == [TESTS]


def test_a_store_that_takes_nothing_still_gives_a_profile(
    tmp_path: Path, runner: Recorder
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the folder's place")
    done = go(ProfileStore(blocked / "state"))
    assert not done.saved
    assert done.profile is not None
    assert "could not be stored" in done.problems[-1]


def test_while_another_measures_the_old_profile_serves(
    tmp_path: Path, runner: Recorder
) -> None:
    store = ProfileStore(tmp_path)
    assert store.save(profile()) is None
    with ProfileStore(tmp_path).measuring() as mine:
        assert mine
        done = go(store)

    assert (done.measured_elsewhere, done.saved, done.profile) == (True, False, profile())
    assert runner.asked == []


def test_a_cancelled_run_stores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless:
        started = asyncio.Event()

        async def run(self, plan: Plan, **_: Any) -> list[Report]:
            self.started.set()
            await asyncio.Event().wait()
            return []

    async def cancelled() -> None:
        endless = Endless()
        endless.started = asyncio.Event()
        monkeypatch.setattr(refresh_module, "runner", endless)
        task = asyncio.create_task(refresh(store, Plan(), HERE))
        await endless.started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    store = ProfileStore(tmp_path)
    asyncio.run(cancelled())
    assert store.load().profile is None
    with store.measuring() as mine:
        assert mine
