"""When a backend that is absent is tried again: only for a reason, and ever more seldom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from switchgear.backends.driver_files import signature
from switchgear.daemon import proofs
from switchgear.daemon.presence import Facts
from switchgear.daemon.proofs import Proofs


class Driver:
    """In place of the process that tries a driver; counts how often it is started."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tried = 0
        self.settled = True
        self.tried_again = asyncio.Event()

    async def prove(self, name: str, options: Mapping[str, Any], limit_s: float) -> Facts:
        self.tried += 1
        if self.tried > 1:
            self.tried_again.set()

        if self.path.exists():
            driver = self.path.read_text()
            return Facts("present", "it runs", identity={"driver": driver})

        return Facts("absent", "no such file", settled=self.settled)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "FIRST_LOOK_S", 0.01)


def made(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, on_proven: Callable[[str, bool], None]
) -> Proofs:
    monkeypatch.setattr(proofs, "prove_backend", driver.prove)
    options = {"delegate": str(driver.path)}
    return Proofs(["npu"], lambda _: True, lambda _: options, 1.0, on_proven)


async def first_proven(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Driver, Proofs, list[bool]]:
    """A driver that runs, and of each later time that it does: whether it was absent before."""
    driver, told = Driver(folder / "npu.so"), list[bool]()
    driver.path.write_text("one")
    proof = made(driver, monkeypatch, lambda _, was_absent: told.append(was_absent))
    await proof.first()
    return driver, proof, told


def after_looks(count: int, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once the files have been looked at as often."""
    looks, enough = iter(range(1, count + 1)), asyncio.Event()
    loop = asyncio.get_running_loop()

    def look(options: Mapping[str, Any]) -> str:
        if next(looks, count) == count:
            loop.call_soon_threadsafe(enough.set)

        return signature(options)

    monkeypatch.setattr(proofs, "signature", look)
    return enough


def test_nothing_is_started_while_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    async def test() -> None:
        driver, present = Driver(tmp_path / "npu.so"), asyncio.Event()
        proof = made(driver, monkeypatch, lambda *_: present.set())
        enough = after_looks(5, monkeypatch)
        await proof.first()
        looks = asyncio.create_task(proof.run())
        await enough.wait()
        assert driver.tried == 1
        assert "when a driver's files change" in proof.outlook("npu")
        driver.path.write_bytes(b"driver")
        await present.wait()
        assert driver.tried == 2
        assert proof.facts["npu"].state == "present"
        looks.cancel()

    asyncio.run(test())


def test_what_did_not_answer_is_tried_again_by_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    async def test() -> None:
        driver = Driver(tmp_path / "npu.so")
        driver.settled = False
        proof = made(driver, monkeypatch, lambda *_: None)
        await proof.first()
        looks = asyncio.create_task(proof.run())
        await driver.tried_again.wait()
        assert proof.outlook("npu").startswith("tried again in")
        looks.cancel()

    asyncio.run(test())


def test_who_asks_gets_a_fresh_answer_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        driver, found = Driver(tmp_path / "npu.so"), list[str]()
        proof = made(driver, monkeypatch, lambda name, _: found.append(name))
        await proof.first()
        # Nothing has changed since a moment ago.
        assert (await proof.ask("npu")).state == "absent"
        assert driver.tried == 1
        assert (await proof.ask("npu", force=True)).state == "absent"
        assert driver.tried == 2
        driver.path.write_bytes(b"driver")
        answers = await asyncio.gather(*(proof.ask("npu") for _ in range(3)))
        assert [facts.state for facts in answers] == ["present"] * 3
        assert (driver.tried, found) == (3, ["npu"])

    asyncio.run(test())


def test_a_driver_that_is_replaced_is_tried_once_its_files_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    async def test() -> None:
        driver, told = Driver(tmp_path / "npu.so"), list[tuple[str, bool]]()
        driver.path.write_text("one")
        renewed = asyncio.Event()

        def proven(name: str, was_absent: bool) -> None:
            told.append((name, was_absent))
            renewed.set()

        proof = made(driver, monkeypatch, proven)
        # What each look sees: it is unpacked file by file.
        seen = iter(["one", "tw", "twoo"])
        looks = []

        def look(_: Mapping[str, Any]) -> str:
            looks.append(next(seen, "two"))
            return looks[-1]

        monkeypatch.setattr(proofs, "signature", look)
        await proof.first()
        driver.path.write_text("two")
        running = asyncio.create_task(proof.run())
        await renewed.wait()
        assert looks[:5] == ["one", "tw", "twoo", "two", "two"]
        assert (driver.tried, told) == (2, [("npu", False)])
        assert proof.facts["npu"].identity == {"driver": "two"}
        running.cancel()

    asyncio.run(test())


def test_a_worker_that_found_another_driver_has_it_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        driver, proof, told = await first_proven(tmp_path, monkeypatch)
        # It is the one that was found a moment ago.
        assert (await proof.ask("npu", renew=True)).identity == {"driver": "one"}
        assert driver.tried == 1
        driver.path.write_text("another")
        answers = await asyncio.gather(*(proof.ask("npu", renew=True) for _ in range(3)))
        assert [facts.identity for facts in answers] == [{"driver": "another"}] * 3
        assert (driver.tried, told) == (2, [False])

    asyncio.run(test())


@pytest.mark.parametrize(("settled", "state"), [(True, "absent"), (False, "present")])
def test_a_driver_that_runs_is_absent_only_where_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: bool, state: str
) -> None:
    async def test() -> None:
        driver, proof, told = await first_proven(tmp_path, monkeypatch)
        driver.path.unlink()
        driver.settled = settled
        assert (await proof.ask("npu", renew=True)).state == proof.facts["npu"].state == state
        driver.path.write_text("two")
        assert (await proof.ask("npu", renew=True)).identity == {"driver": "two"}
        assert told == [settled]

    asyncio.run(test())
