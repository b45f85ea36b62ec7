"""Events in the C client, from a daemon that sends what a test wants; also with sanitizers."""

from __future__ import annotations

import random
import socket
from typing import TYPE_CHECKING, Final

import pytest
from c_client_program import Driver, build, filled, floats, sanitized
from event_records import told
from fake_daemon import FakeDaemon
from fake_session import FakeSession, collected, hold, model_bytes

from switchgear.ipc.event import EventKind, State
from switchgear.ipc.record import (
    RECORD_BYTES,
    RECORD_VERSION,
    Kind,
    Record,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Nothing in it depends on the Python.
pytestmark = pytest.mark.engine

# Wrong bytes tried in one run of the program; the seed makes a failure happen again.
MUTATIONS: Final = 500
SEED: Final = 11


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with collected(), FakeDaemon(tmp_path / "s.sock") as served:
        yield served
        assert served.violations == []


@pytest.fixture(params=["sanitized", "plain"])
def driver(
    daemon: FakeDaemon, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Driver]:
    program = sanitized() if request.param == "sanitized" else build("driver", "-O2")
    model = tmp_path / "model"
    model.write_bytes(model_bytes())
    with Driver(program) as running:
        running.do("connect", daemon.path)
        running.do("load", model, "add-one")
        yield running
        running.do("close")


def send(fake: FakeSession, *packets: bytes) -> None:
    for packet in packets:
        fake.sock.send(packet, socket.MSG_NOSIGNAL)


def test_every_field_arrives(daemon: FakeDaemon, driver: Driver) -> None:
    driver.do("open", "add-one", "events=1")
    assert daemon.called("OpenSession")[-1]["events"] is True
    first_event = told(
        7,
        kind=EventKind.TRIPPED,
        state=State.TRIPPED,
        device_state=State.RECOVERING,
        share=125,
        headroom_mc=-2500,
        temperature_age_ms=12,
        retry_after_ms=90_000,
        at_ns=2**63 + 5,
    )
    send(daemon.sessions[0], first_event.pack(), told(8, backend=9, precision=9, kind=9).pack())
    assert driver.do("take", 10_000) == "took 2"
    first, second = driver.do("events").removeprefix("| ").split(" | ")
    assert first == (
        "tripped vulkan fp16 tripped recovering share 0.125 headroom -2500 age 12"
        f" retry 90000 number 7 epoch 1 at {2**63 + 5}"
    )
    assert second == (
        "unknown unknown unknown shedding normal share 1 headroom 0 age -1"
        " retry 0 number 8 epoch 1 at 0"
    )


def test_events_come_between_replies(daemon: FakeDaemon, driver: Driver) -> None:
    def answer(fake: FakeSession, record: Record) -> None:
        send(fake, told(2 * record.request_id - 1).pack())
        fake.answer(record)
        send(fake, told(2 * record.request_id).pack())

    daemon.on_infer = answer
    driver.do("open", "add-one", "events=1")
    for number in range(1, 6):
        filled(driver, 0, [number] * 4)
        assert floats(driver.do("run", 0)) == [number + 1.0] * 4

    driver.do("submit", 0)
    driver.do("submit", 1)
    ended = {driver.do("any", 10_000).split()[1] for _ in range(2)}
    assert ended == {"0", "1"}
    # Woken by the last one, with nothing in flight.
    found: list[str] = []
    while len(found) < 14:
        assert driver.fails("any", 0).name == "BadSlot"
        found += [line.split()[14] for line in driver.do("events").split("|") if line.strip()]

    assert found == [str(number) for number in range(1, 15)]


def test_a_wait_for_events_keeps_replies(daemon: FakeDaemon, driver: Driver) -> None:
    daemon.on_infer = hold
    driver.do("open", "add-one", "events=1")
    filled(driver, 0, [1, 2, 3, 4])
    driver.do("submit", 0)
    assert driver.do("take", 0) == "took 0"
    fake = daemon.sessions[0]
    while not fake.held:
        pass

    fake.answer(next(iter(fake.held.values())))
    send(fake, told(1).pack())
    assert driver.do("take", 10_000) == "took 1"
    assert floats(driver.do("wait", 0, 0)) == [2.0, 3.0, 4.0, 5.0]


def test_the_end_is_told_behind_the_last_event(daemon: FakeDaemon, driver: Driver) -> None:
    driver.do("open", "add-one", "events=1")
    send(daemon.sessions[0], told(1).pack())
    daemon.sessions[0].close()
    assert driver.do("take", 10_000) == "took 1"
    assert driver.fails("take", 10_000).name == "ConnectionLost"
    assert driver.fails("any", 0).name == "ConnectionLost"


def test_who_did_not_ask_is_not_called(daemon: FakeDaemon, driver: Driver) -> None:
    driver.do("open", "add-one")
    assert "events" not in daemon.called("OpenSession")[-1]
    send(daemon.sessions[0], told(1).pack())
    filled(driver, 0, [1, 1, 1, 1])
    assert floats(driver.do("run", 0)) == [2.0] * 4
    assert driver.do("events") == ""


def test_wrong_bytes_in_events_do_no_harm(daemon: FakeDaemon, driver: Driver) -> None:
    draw = random.Random(SEED)
    driver.do("open", "add-one", "events=1")
    taken = 0
    for number in range(MUTATIONS):
        data = bytearray(draw.randbytes(RECORD_BYTES))
        data[:2] = Kind.EVENT, RECORD_VERSION
        if number % 2:
            data[2 : RECORD_BYTES // 2] = bytes(RECORD_BYTES // 2 - 2)

        send(daemon.sessions[0], bytes(data))
        while taken <= number:
            taken += int(driver.do("take", 10_000).split()[1])

        driver.do("events")

    filled(driver, 0, [1, 1, 1, 1])
    assert floats(driver.do("run", 0)) == [2.0] * 4
    send(daemon.sessions[0], told(1).pack()[:-1])
    assert driver.fails("take", 10_000).name == "ProtocolError"
