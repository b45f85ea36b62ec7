"""What systemd is told, on a real datagram socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from daemon_process import DaemonProcess
from raw_client import Control

from switchgear.backends import generate
from switchgear.daemon import notify
from switchgear.daemon.notify import Announcer, Condition, Notifier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT_S = 15.0


class Systemd:
    """The receiving end: what was said so far, line by line."""

    def __init__(self, address: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(address)
        self.sock.settimeout(LIMIT_S)
        self.lines: list[str] = []

    def receive(self) -> list[str]:
        lines = self.sock.recv(4096).decode().split("\n")
        self.lines += lines
        return lines

    def drain(self) -> int:
        """Takes what is there; how many messages that were."""
        self.sock.setblocking(False)
        count = 0
        while True:
            try:
                self.receive()
            except BlockingIOError:
                self.sock.settimeout(LIMIT_S)
                return count

            count += 1

    def until(self, wanted: str) -> list[str]:
        """Receives until a line begins with this; that message."""
        while True:
            lines = self.receive()
            if any(line.startswith(wanted) for line in lines):
                return lines


@contextmanager
def systemd(address: str) -> Iterator[Systemd]:
    end = Systemd(address)
    try:
        yield end
    finally:
        end.sock.close()


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Systemd]:
    with systemd(str(tmp_path / "notify")) as end:
        yield end


def address_of(end: Systemd) -> str:
    name: str | bytes = end.sock.getsockname()
    return name.decode() if isinstance(name, bytes) else name


def test_the_variables_are_taken_out_of_the_environment(heard: Systemd) -> None:
    environment = {
        "NOTIFY_SOCKET": address_of(heard),
        "WATCHDOG_USEC": "3000000",
        "WATCHDOG_PID": str(os.getpid()),
        "HOME": "/",
    }
    notifier = Notifier.from_environment(environment)
    assert environment == {"HOME": "/"}
    assert notifier.watchdog_s == 3.0
    assert notifier.send("READY=1", "STATUS=there")
    assert heard.receive() == ["READY=1", "STATUS=there"]
    notifier.close()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WATCHDOG_USEC": "3000000"},
        {"NOTIFY_SOCKET": "vsock:2:1234"},
    ],
)
def test_nobody_who_listens(environment: dict[str, str]) -> None:
    notifier = Notifier.from_environment(environment)
    assert not notifier.listens
    assert notifier.watchdog_s == 0.0
    assert notifier.send("READY=1")


@pytest.mark.parametrize("pid", ["1", "x"])
def test_a_watchdog_of_another_process_is_not_ours(heard: Systemd, pid: str) -> None:
    environment = {
        "NOTIFY_SOCKET": address_of(heard),
        "WATCHDOG_USEC": "3000000",
        "WATCHDOG_PID": pid,
    }
    notifier = Notifier.from_environment(environment)
    assert notifier.watchdog_s == 0.0
    notifier.close()


def test_an_abstract_address() -> None:
    name = f"switchgear-test-{os.getpid()}"
    with systemd(f"\0{name}") as end:
        notifier = Notifier(f"@{name}")
        notifier.send("READY=1")
        assert end.receive() == ["READY=1"]
        notifier.close()


def test_what_finds_no_room_is_sent_later_in_order(heard: Systemd) -> None:
    notifier = Notifier(address_of(heard))
    sent = 0
    while notifier.send(f"STATUS={sent}"):
        sent += 1

    assert notifier.send("READY=1") is False
    for number in range(sent):
        assert heard.receive() == [f"STATUS={number}"]

    assert notifier.flush()
    assert heard.receive() == [f"STATUS={sent}"]
    assert heard.receive() == ["READY=1"]
    notifier.close()


def test_a_receiver_that_went_away_stops_nothing(tmp_path: Path) -> None:
    notifier = Notifier(str(tmp_path / "gone"))
    assert notifier.send("READY=1")
    notifier.close()


def test_the_conditions_of_a_life(heard: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "BUSY_STEP_S", 0.01)
    monkeypatch.setattr(notify, "IDLE_STEP_S", 0.01)
    now = Condition("starting", "starting: 0 of 1\nmodels")

    async def live() -> None:
        nonlocal now
        receive = asyncio.get_running_loop().run_in_executor
        announcer = Announcer(Notifier(address_of(heard)), lambda: now)
        announcer.reloading()
        announcer.start()
        first = await receive(None, heard.receive)
        # A line break would be another variable.
        assert first == ["EXTEND_TIMEOUT_USEC=15000000", "STATUS=starting: 0 of 1 models"]
        # It goes on asking for time, until it is ready.
        assert await receive(None, heard.receive) == ["EXTEND_TIMEOUT_USEC=15000000"]
        now = Condition("serving", "serving")
        announcer.update()
        assert await receive(None, heard.until, "READY=1") == ["READY=1", "STATUS=serving"]
        announcer.reloading()
        lines = await receive(None, heard.receive)
        assert lines[0] == "RELOADING=1"
        assert lines[1].startswith("MONOTONIC_USEC=")
        now = Condition("serving", "serving; reloaded")
        announcer.reloaded()
        assert await receive(None, heard.receive) == ["READY=1"]
        assert await receive(None, heard.receive) == ["STATUS=serving; reloaded"]
        now = Condition("stopping", "stopping")
        announcer.update()
        wanted = ["STOPPING=1", "EXTEND_TIMEOUT_USEC=15000000", "STATUS=stopping"]
        assert await receive(None, heard.until, "STOPPING=1") == wanted
        announcer.reloading()
        announcer.reloaded()
        announcer.close()

    asyncio.run(live())
    heard.drain()
    # Neither before it was ready nor while it stops.
    assert heard.lines.count("RELOADING=1") == 1


def test_one_that_will_not_become_ready_asks_for_no_time(heard: Systemd) -> None:
    async def live() -> None:
        announcer = Announcer(
            Notifier(address_of(heard)), lambda: Condition("failed", "no cpu")
        )
        announcer.start()
        announcer.close()

    asyncio.run(live())
    assert heard.receive() == ["STATUS=no cpu"]


def test_the_loop_that_serves_feeds_the_watchdog(heard: Systemd) -> None:
    """A loop that is held up says nothing, whatever other threads do."""

    async def live() -> None:
        serving = Condition("serving", "serving")
        announcer = Announcer(Notifier(address_of(heard), watchdog_s=0.03), lambda: serving)
        announcer.start()
        receive = asyncio.get_running_loop().run_in_executor
        for _ in range(3):
            assert "WATCHDOG=1" in await receive(None, heard.receive)

        heard.drain()
        time.sleep(0.2)  # noqa: ASYNC251 - the loop hangs
        assert heard.drain() == 0
        announcer.close()

    asyncio.run(live())


def test_a_daemon_tells_its_life(heard: Systemd, tmp_path: Path) -> None:
    model = tmp_path / "kept.tflite"
    model.write_bytes(generate.identity((4,)))
    # The socket has room for 10 messages: at one a second none is lost while nobody listens.
    environment = {"NOTIFY_SOCKET": address_of(heard), "WATCHDOG_USEC": "3000000"}
    with DaemonProcess(environment=environment, wait="") as daemon:
        heard.until("READY=1")
        # Not before it was ready.
        assert heard.lines[0].startswith("EXTEND_TIMEOUT_USEC=")
        heard.until("WATCHDOG=1")
        with Control(daemon.socket) as control:
            assert control.call("GetInfo")["ready"] is True
            daemon.config.write_text(
                f'[daemon]\nlog_level = "debug"\n[[models]]\npath="{model}"\n'
            )
            os.kill(daemon.pid, signal.SIGHUP)
            heard.until("RELOADING=1")
            heard.until("READY=1")
            assert [m["name"] for m in control.call("ListModels")["models"]] == ["kept"]
            daemon.config.write_text("[cpu]\nthreds = 1\n")
            os.kill(daemon.pid, signal.SIGHUP)
            heard.until("RELOADING=1")
            heard.until("READY=1")
            (problem,) = control.call("GetStatus")["problems"]
            assert "the old configuration holds" in problem
            assert "did you mean threads?" in problem
            # The model is still there; without it in a sound file it goes.
            assert control.call("ListModels")["models"]
            daemon.config.write_text("")
            os.kill(daemon.pid, signal.SIGHUP)
            heard.until("RELOADING=1")
            heard.until("READY=1")
            assert control.call("ListModels")["models"] == []
            assert control.call("GetStatus")["problems"] == []

        daemon.stop()
        heard.until("STOPPING=1")
