"""The screen of `switchgear top`, driven as a person does, at 80 x 24."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cli_command import environment
from daemon_process import DaemonProcess
from terminal import Terminal
from top_helpers import metrics, screen_text, status, worker

from switchgear.backends import generate
from switchgear.client import connect
from switchgear.daemon.cli import top_screen
from switchgear.daemon.cli.top import Looker
from switchgear.daemon.cli.top_picture import History, Picture

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.pilot import Pilot

    from switchgear.client import Client
    from switchgear.daemon.cli.top_screen import TopScreen

# textual comes with the first Python's packages only. A screen takes its time where CPUs are
# busy.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]

SIZE = (80, 24)
SNAPSHOT = Path(__file__).parent / "data" / "top_80x24.txt"


@pytest.fixture(autouse=True)
def no_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The screen's own timer asks nothing: a screen may take longer than a second to begin."""
    monkeypatch.setattr(top_screen, "EVERY_S", 3600.0)


def minute() -> Callable[[], Picture]:
    """Answers of a daemon under load, one a second; the GPU trips at the fourth."""
    history = History()
    seconds = iter(range(100))
    cpu, gpu = [0] * 5, [0] * 5

    def look() -> Picture:
        second = next(seconds)
        (gpu if second < 4 else cpu)[second % 4] += 30 + second
        breaker = "closed" if second < 4 else "open"
        answer = status(
            workers=[
                worker("cpu", "interactive", 4712, queued=second // 2, running=2),
                worker("vulkan", "interactive", 4713, rss_mb=210.0),
            ]
        )
        families = metrics(
            {"cpu": list(cpu), "vulkan": list(gpu)},
            breaker=breaker,
            temperature_mc=60_000 + 1_500 * second,
        )
        return history.add(answer, families, float(second), f"12:00:{second:02}")

    return look


async def answer(app: TopScreen) -> Picture:
    """Asks once more, after the question that may still be on its way."""
    async with app.asking:
        pass

    await app.ask()
    assert app.picture is not None
    return app.picture


async def settled(app: TopScreen, pilot: Pilot[None]) -> list[str]:
    """The screen once it changes no more: one layout may follow another."""
    lines: list[str] = []
    while True:
        await pilot.pause()
        before, lines = lines, screen_text(app)
        if lines == before:
            return lines


def lines_after(looks: int, size: tuple[int, int] = SIZE, keys: str = "") -> list[str]:
    """The screen after some answers and keys."""

    async def scenario() -> list[str]:
        app = top_screen.TopScreen(minute())
        async with app.run_test(size=size) as pilot:
            for _ in range(looks - 1):
                await answer(app)

            for key in keys:
                await pilot.press(key)

            await app.workers.wait_for_complete()
            return await settled(app, pilot)

    return asyncio.run(scenario())


def test_the_screen_is_as_the_snapshot() -> None:
    text = "\n".join(lines_after(7)) + "\n"
    if os.environ.get("SWITCHGEAR_WRITE_SNAPSHOTS"):
        SNAPSHOT.write_text(text, encoding="utf-8")

    assert text == SNAPSHOT.read_text(encoding="utf-8")


def test_all_parts_are_there_without_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    colored = lines_after(7)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = lines_after(7)
    assert plain == colored, "colour says nothing that the words do not"
    text = "\n".join(plain)
    for part in ("BACKENDS", "LATENCY", "QUEUES", "ZONES", "EVENTS", "q Quit"):
        assert part in text, part

    row = next(line for line in plain if line.startswith("vulkan   tripped"))
    assert "69.0C" in row
    assert "breaker of device gpu0: closed -> open" in text


@pytest.mark.parametrize("size", [(40, 12), (200, 60), (80, 10)])
def test_other_sizes_have_the_headline_and_no_failure(size: tuple[int, int]) -> None:
    lines = lines_after(3, size)
    assert lines[0].startswith("fine: serving")
    assert all(len(line) <= size[0] for line in lines)


def test_pause_stops_the_clock_and_r_asks_once() -> None:
    assert lines_after(2, keys="p")[0].startswith("[paused] fine")
    assert lines_after(2, keys="pp")[0].startswith("fine")
    before = "\n".join(lines_after(4))
    after = "\n".join(lines_after(4, keys="r"))
    assert "closed -> open" not in before
    assert "closed -> open" in after


def test_q_ends_it() -> None:
    async def scenario() -> bool:
        app = top_screen.TopScreen(minute())
        async with app.run_test(size=SIZE) as pilot:
            await pilot.press("q")
            await pilot.pause()
            return not app.is_running

    assert asyncio.run(scenario())


def test_a_slow_daemon_is_asked_one_question_at_a_time() -> None:
    async def scenario() -> int:
        asked = 0
        free = asyncio.Event()
        loop = asyncio.get_running_loop()

        def look() -> Picture:
            nonlocal asked
            asked += 1
            asyncio.run_coroutine_threadsafe(free.wait(), loop).result(10)
            return Picture("fine", True, "")

        app = top_screen.TopScreen(look)
        async with app.run_test(size=SIZE) as pilot:
            # The screen's own first question is on its way; keys work meanwhile.
            await pilot.press("r", "r", "p")
            assert (await settled(app, pilot))[0] == "asking the daemon"
            free.set()
            await app.workers.wait_for_complete()
            assert (await settled(app, pilot))[0] == "[paused] fine"
            return asked

    assert asyncio.run(scenario()) == 1


def test_a_real_daemon_on_the_screen() -> None:
    async def scenario(daemon: DaemonProcess) -> None:
        app = top_screen.TopScreen(Looker(str(daemon.socket)).look)
        async with app.run_test(size=SIZE) as pilot:
            with connect(daemon.socket) as client:
                client.load_model(generate.two_inputs(), "pair")
                await answer(app)
                await use(client, app)

            text = "\n".join(await settled(app, pilot))
            assert "the cpu interactive worker ended: signal:9 SIGKILL" in text
            daemon.stop()
            await answer(app)
            assert (await settled(app, pilot))[0].startswith("NOT FINE: no daemon answers")

    async def use(client: Client, app: TopScreen) -> None:
        with client.open_session("pair") as session:
            for _ in range(50):
                session.run(a=[1.0] * 4, b=[2.0] * 4)

            picture = await answer(app)
            (served,) = [line for line in picture.backends if line.name == "cpu"]
            assert served.rate is not None
            assert served.rate > 0
            assert served.median_s is not None
            assert 0 < served.median_s < 5
            (lane,) = [w for w in client.status()["workers"] if w["backend"] == "cpu"]
            os.kill(lane["pid"], signal.SIGKILL)
            while not client.status()["counters"]["worker_restarts"]:
                pass

            await answer(app)

    with DaemonProcess(config="[cpu]\nthreads = 1\n") as daemon:
        asyncio.run(scenario(daemon))
        # Stopped on the way.
        assert not daemon.running


def test_on_a_terminal_without_colour(tmp_path: Path) -> None:
    """The real thing: a pseudo-terminal of 80 x 24, no daemon, NO_COLOR, and `q`."""
    missing = str(tmp_path / "none.sock")
    script = (
        "import argparse, sys; from switchgear.daemon.cli import top; "
        f"sys.exit(top.run(argparse.Namespace(socket={missing!r}, json=False)))"
    )
    command = [sys.executable, "-W", "error", "-c", script]
    with Terminal(command, {**environment(), "NO_COLOR": "1"}) as terminal:
        written = terminal.read_until("no daemon answers")
        assert "BACKENDS" not in written, "a section with nothing to tell takes no room"
        os.write(terminal._master, b"q")
        assert terminal.end() == 0

    # Of colours there are shades of grey at most.
    colors = re.findall(r"\x1b\[[0-9;]*?[34]8;2;(\d+);(\d+);(\d+)", terminal.output)
    assert all(len(set(color)) == 1 for color in colors)
