"""The gate before a test, in virtual time on a made-up /proc."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from switchgear.fingerprints.gate import (
    BUSY_SHARE,
    PATIENCE_S,
    POLL_S,
    REQUEST_GAP_S,
    WINDOW_S,
    Gate,
    Passed,
    Pressure,
)


@dataclass
class World:
    """A clock that only `sleep` moves, and what the gate looks at as functions of its time."""

    root: Path
    busy_until_s: float = 0.0
    hot_until_s: float = 0.0
    request_at_s: float = -1e9
    queued_until_s: float = 0.0
    now_s: float = 0.0
    stalled_us: float = 0.0
    slept: list[float] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def write(self) -> None:
        (self.root / "pressure").mkdir(exist_ok=True)
        (self.root / "pressure/cpu").write_text(
            f"some avg10=99.00 avg60=2.24 avg300=0.82 total={self.stalled_us:.0f}\n"
            "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
        )

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        busy_s = max(0.0, min(seconds, self.busy_until_s - self.now_s))
        self.stalled_us += busy_s * 1e6
        self.now_s += seconds
        self.write()

    def gate(self, patience_s: float = PATIENCE_S, busy_share: float = BUSY_SHARE) -> Gate:
        self.write()
        return Gate(
            pressure=Pressure(self.root),
            hot=lambda: "GPU at 80 C" if self.now_s < self.hot_until_s else "",
            idle_s=self.idle_s,
            patience_s=patience_s,
            busy_share=busy_share,
            tell=self.told.append,
            clock=lambda: self.now_s,
            sleep=self.sleep,
        )

    def idle_s(self) -> float:
        return 0.0 if self.now_s < self.queued_until_s else self.now_s - self.request_at_s


def wait(world: World, patience_s: float = PATIENCE_S) -> Passed:
    return asyncio.run(world.gate(patience_s).wait())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_quiet_machine_passes_after_one_look(world: World) -> None:
    """The kernel's averages, which still show the test before, do not count."""
    assert wait(world) == Passed(WINDOW_S)
    assert world.slept == [WINDOW_S]


def test_waits_while_tasks_wait_for_a_cpu(world: World) -> None:
    world.busy_until_s = 5.0
    passed = wait(world)
    assert passed.waited_s >= 5.0
    assert "busy" in passed.reason
    assert not passed.forced


def test_a_little_pressure_is_none(world: World) -> None:
    world.busy_until_s = WINDOW_S * BUSY_SHARE * 0.9
    assert wait(world).reason == ""


def test_waits_while_hot_without_end(world: World) -> None:
    """Heat is never overruled: the test would add to it."""
    world.hot_until_s = 60.0
    passed = wait(world, patience_s=10)
    assert passed.waited_s >= 60
    assert passed.reason == "GPU at 80 C"
    assert not passed.forced


def test_waits_for_a_gap_between_requests(world: World) -> None:
    world.queued_until_s = 2.0
    world.request_at_s = 2.0
    passed = wait(world)
    assert passed.waited_s >= 2.0 + REQUEST_GAP_S
    assert "request" in passed.reason


def test_a_request_of_a_moment_ago_is_too_near(world: World) -> None:
    world.request_at_s = WINDOW_S - REQUEST_GAP_S / 2
    passed = wait(world)
    assert passed.reason == "a request came 50 ms ago"
    assert passed.waited_s == pytest.approx(2 * WINDOW_S + POLL_S)


def test_runs_all_the_same_when_the_patience_is_over(world: World) -> None:
    world.queued_until_s = 1e9
    passed = wait(world, patience_s=20)
    assert passed.forced
    assert passed.reason == "a request is queued or runs"
    assert 20 <= passed.waited_s < 22


def test_patience_begins_when_the_heat_is_over(world: World) -> None:
    world.hot_until_s = 100.0
    world.queued_until_s = 1e9
    assert wait(world, patience_s=10).waited_s >= 110


def test_one_patience_for_all_waits_of_a_gate(world: World) -> None:
    """Many processes of one run, and a machine that never rests."""
    world.queued_until_s = 1e9

    async def waits() -> list[Passed]:
        gate = world.gate(patience_s=10)
        return [await gate.wait() for _ in range(3)]

    first, *later = asyncio.run(waits())
    assert first.forced
    assert first.waited_s >= 10
    assert all(each.forced and each.waited_s < 1 for each in later)


def test_says_why_it_waits(world: World) -> None:
    world.hot_until_s = 0.5
    world.busy_until_s = 2.0
    wait(world)
    assert world.told[0] == "GPU at 80 C"
    assert "busy" in world.told[-1]


def test_a_share_of_one_is_never_busy(world: World) -> None:
    """For who asks for a measurement now: not even the look is taken."""
    world.busy_until_s = 1e9
    assert asyncio.run(world.gate(busy_share=1.0).wait()) == Passed(0.0)
    assert world.slept == []


def test_without_pressure_information(tmp_path: Path) -> None:
    """A kernel built without it, or a container that hides it."""
    assert Pressure(tmp_path).stalled_us() is None

    async def no_sleep(seconds: float) -> None:
        raise AssertionError(seconds)

    gate = Gate(pressure=Pressure(tmp_path), clock=lambda: 0.0, sleep=no_sleep)
    assert asyncio.run(gate.wait()) == Passed(0.0)


@pytest.mark.parametrize("text", ["", "\0\0\0\0", "some avg10=1.00\n", "full total=5\n"])
def test_pressure_that_cannot_be_understood(text: str, tmp_path: Path) -> None:
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure/cpu").write_text(text)
    assert Pressure(tmp_path).stalled_us() is None


def test_pressure_of_this_machine() -> None:
    if not Path("/proc/pressure/cpu").exists():
        pytest.skip("the kernel has no pressure stall information")

    first = Pressure().stalled_us()
    second = Pressure().stalled_us()
    assert first is not None
    assert second is not None
    assert second >= first
    assert Pressure().stalled_us("memory") is not None
