"""`switchgear status`, against daemons that are fine, that are not, and that go away."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_command import PREFIX, environment, switchgear, switchgear_json
from daemon_process import DaemonProcess
from terminal import COLUMNS, Terminal

from switchgear.backends import generate
from switchgear.client import Status, connect
from switchgear.client.models import BackendStatus
from switchgear.daemon.cli.status import faults, headline, render, serves

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(config="[cpu]\nthreads = 1\n") as running:
        yield running


@pytest.fixture
def status(daemon: DaemonProcess) -> Status:
    """A real one, with a model and a session in it."""
    with connect(daemon.socket) as client:
        client.load_model(generate.two_inputs(), "pair")
        with client.open_session("pair", slots=3) as session:
            session.run(a=[1.0] * 4, b=[2.0] * 4)
            return client.status()


def test_the_first_line_says_that_it_is_fine(daemon: DaemonProcess, status: Status) -> None:
    done = switchgear("status", "--socket", daemon.socket)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("fine: serving for ")
    assert "on cpu; 1 model, " in lines[0]
    assert f"pid {daemon.pid}" in lines[1]
    assert max(map(len, lines)) <= COLUMNS
    told = switchgear_json("status", "--socket", daemon.socket)
    assert told["pid"] == daemon.pid
    assert told["models"][0]["name"] == "pair"


def test_all_parts_are_shown(status: Status) -> None:
    text = render(status)
    for part in ("backends", "workers", "models", "sessions", "since the start"):
        assert f"\n{part}\n" in text, part

    row = next(line for line in text.splitlines() if line.endswith("  pair"))
    assert row.split()[3:6] == ["3", "0", "1"]
    assert "requests answered" in text
    assert max(map(len, text.splitlines())) <= COLUMNS


def test_an_absent_backend_says_when_it_is_tried_again(status: Status) -> None:
    again = "tried again when a driver's files change (next look in 35 s), at a reload"
    long = "no library " * 20
    absent: BackendStatus = {
        "name": "npu",
        "state": "absent",
        "reason": long,
        "again": again,
    }
    others = [row for row in status["backends"] if row["name"] != "npu"]
    lines = render(changed(status, backends=[*others, absent])).splitlines()
    (number,) = [n for n, line in enumerate(lines) if line.startswith("  npu")]
    # The reason is cut, what to wait for is not.
    assert lines[number].endswith("...")
    assert " ".join(" ".join(lines[number + 1 : number + 3]).split()) == again
    assert max(map(len, lines)) <= COLUMNS


def changed(status: Status, **fields: Any) -> Status:
    other = copy.deepcopy(status)
    other.update(fields)  # type: ignore[typeddict-item]
    return other


def test_the_first_line_says_why_it_is_not_fine(status: Status) -> None:
    assert faults(status) == []
    starting = changed(
        status,
        ready=False,
        state="starting",
        backends=[{"name": "cpu", "state": "starting", "reason": "its run has not ended"}],
    )
    assert not serves(starting)
    assert headline(starting) == "NOT FINE: the daemon is starting (and 1 more)"
    assert "\n  cpu is starting: its run has not ended\n" in render(starting)

    absent = {"name": "npu", "state": "absent", "reason": "errno:2 no delegate"}
    partly = changed(status, backends=[*status["backends"], absent])
    assert headline(partly).startswith("fine: "), "what a machine does not have is no fault"
    failed = {"name": "npu", "state": "failed", "reason": "errno:2 no delegate"}
    partly = changed(status, backends=[*status["backends"], failed])
    assert serves(partly)
    assert headline(partly) == "serves, but: npu is failed: errno:2 no delegate"

    bad = [{**entry, "status": "quarantined"} for entry in status["models"]]
    assert headline(changed(status, models=bad)) == "serves, but: model pair is quarantined"


def test_a_daemon_without_an_engine_is_a_failure(tmp_path: Path) -> None:
    for package in ("ai_edge_litert", "tflite_runtime"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('hidden by a test')\n")

    with DaemonProcess(environment={"PYTHONPATH": str(tmp_path)}, wait="listening") as daemon:
        done = switchgear("status", "--socket", daemon.socket)
        assert done.returncode == 1
        assert done.stdout.startswith("NOT FINE: the daemon is starting")
        # Once the worker has told why, the reason stands in the first lines.
        command = [*PREFIX, "status", "--watch", "--socket", str(daemon.socket)]
        with Terminal(command, environment()) as terminal:
            terminal.read_until("hidden by a test")
            terminal.interrupt()
            assert terminal.end() == 0


def test_watch_repaints_in_place_until_interrupted(daemon: DaemonProcess) -> None:
    command = [*PREFIX, "status", "--watch", "--socket", str(daemon.socket)]
    with Terminal(command, environment()) as terminal:
        # The second picture is complete when its last line is there; what was read may have
        # the beginning of the third.
        parts = terminal.read_until("sessions opened", 2).split("sessions opened")
        written = "sessions opened".join(parts[:2])
        terminal.interrupt()
        assert terminal.end() == 0

    assert written.count("\x1b[2J") == 1, "cleared once: a repaint does not flicker"
    assert written.count("\x1b[H") == 2
    assert terminal.output.endswith("\x1b[?25h")


# Three processes start, one after the other.
@pytest.mark.timeout(60)
def test_watch_shows_a_daemon_that_goes_away_and_comes_back() -> None:
    with DaemonProcess() as daemon:
        command = [*PREFIX, "status", "--watch", "--socket", str(daemon.socket)]
        with Terminal(command, environment()) as terminal:
            terminal.read_until("fine: serving")
            daemon.stop()
            terminal.read_until("NOT FINE: no daemon answers")
            daemon.start()
            terminal.read_until("fine: serving", terminal.output.count("fine: serving") + 1)
            terminal.interrupt()
            assert terminal.end() == 0


def test_watch_with_json_prints_a_line_each_time(daemon: DaemonProcess) -> None:
    command = [*PREFIX, "status", "--watch", "--json", "--socket", str(daemon.socket)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        pids = [json.loads(process.stdout.readline())["pid"] for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0

    assert pids == [daemon.pid] * 2
