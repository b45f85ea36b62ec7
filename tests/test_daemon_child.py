"""The end of a child process of the daemon: it is reaped, or left behind where it hangs."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from switchgear.daemon import child as children
from switchgear.daemon.child import Child

# The loop's own watch of the process is what is tested.
POLL_S = 0.005


@pytest.fixture(autouse=True)
def with_tests_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


class Started:
    """A child that has said that it runs; `ends` has its status once it is reaped."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        self._runs = asyncio.Event()
        self.child = Child(
            "waiting_child",
            [],
            [],
            self.ends.append,
            capture_limit_bytes=1024,
            on_stdout_line=lambda _: self._runs.set(),
        )

    async def runs(self) -> Started:
        await self._runs.wait()
        return self


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("stopped", [False, True])
def test_it_is_reaped_when_end_returns(stopped: bool) -> None:
    async def test() -> None:
        started = await Started().runs()
        if stopped:
            started.child.pause()

        assert await started.child.end() is True
        assert started.ends == [-signal.SIGKILL]
        assert not is_there(started.child.pid)
        # Again is harmless.
        assert await started.child.end() is True
        assert started.ends == [-signal.SIGKILL]

    asyncio.run(test())


def test_two_may_wait_for_one_end() -> None:
    async def test() -> None:
        started = await Started().runs()
        one, two = await asyncio.gather(started.child.end(), started.child.end())
        assert (one, two) == (True, True)
        assert started.ends == [-signal.SIGKILL]

    asyncio.run(test())


def test_one_that_does_not_end_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        started = await Started().runs()
        # As one that hangs inside the kernel: the signal waits.
        with monkeypatch.context() as patch:
            patch.setattr(started.child, "kill", lambda: None)
            patch.setattr(children, "REAP_LIMIT_S", 0.01)
            assert await started.child.end() is False

        assert not started.child.running
        assert started.ends == []
        pid = started.child.pid
        assert is_there(pid)
        # It ends after all: no zombie stays, and nobody is told a second time.
        os.kill(pid, signal.SIGKILL)
        while is_there(pid):  # noqa: ASYNC110 (nobody is told of it)
            await asyncio.sleep(POLL_S)

        assert started.ends == []

    asyncio.run(test())
