"""Events of a real daemon: an NPU that heats and trips, clients that listen, and some that do
not read."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest
from c_client_program import Driver, build, floats, sanitized
from daemon_health import Witness, leaves_nothing, rss_kib
from daemon_process import DaemonProcess
from npu_rig import Rig, wait_for_device
from raw_client import Control
from small_network import small_network

from switchgear.backends import generate
from switchgear.client import Client, Session, SessionEvent, aio, connect
from switchgear.daemon.session_events import AHEAD_RECORDS
from switchgear.ipc.event import EventKind, EventRecord, State
from switchgear.ipc.record import RECORD_BYTES, Backend, Kind, Record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from raw_client import RawSession

pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]

WHERE = ["npu", "cpu"]
# Of a daemon that has told some thousand events to sessions that did not read one.
GROWTH_LIMIT_KIB = 2048


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("rig"))


@pytest.fixture(scope="module")
def daemon(rig: Rig) -> Iterator[DaemonProcess]:
    environment = {"SWITCHGEAR_PREPARE__ENABLED": "true"}
    with DaemonProcess(config=rig.config, environment=environment) as process:
        with connect(process.socket) as client:
            client.load_model(generate.identity((4,)), "echo")
            client.prepare_model("echo")
            client.load_model(small_network(), "net")
            model = client.prepare_model("net")
            assert model.pairs[0].state == "ready", model.pairs[0].reason
            # Its events tell a headroom from its first reading on.
            while "temperature_c" not in wait_for_device(client, "npu"):
                pass

        yield process


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with connect(daemon.socket) as connected:
        yield connected


class Operator:
    """Says of the NPU what makes its places tripped, and takes it back."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self.isolated = False

    def flip(self) -> None:
        self.isolated = not self.isolated
        word = "isolated" if self.isolated else "auto"
        self._control.call("Operate", level="backend", name="npu", word=word)

    def end(self) -> None:
        if self.isolated:
            self.flip()


@pytest.fixture
def operator(daemon: DaemonProcess) -> Iterator[Operator]:
    with Control(daemon.socket) as control:
        speaks = Operator(control)
        yield speaks
        speaks.end()


def next_event(session: RawSession) -> EventRecord:
    return EventRecord.unpack(session.sock.recv(RECORD_BYTES + 1))


def test_who_asked_is_told_and_no_other(daemon: DaemonProcess, operator: Operator) -> None:
    with (
        Control(daemon.socket) as control,
        control.open_session("net", backends=WHERE, events=True) as hears,
        control.open_session("net", backends=WHERE) as never_asked,
        control.open_session("echo", backends=["cpu"], strict=True, events=True) as elsewhere,
    ):
        assert hears.is_silent(0.1)
        operator.flip()
        event = next_event(hears)
        assert (event.kind, event.backend, event.number) == (
            *(EventKind.TRIPPED, Backend.NPU, 1),
        )
        assert (event.state, event.device_state) == (State.TRIPPED, State.NORMAL)
        assert (event.share, event.epoch) == (0, 1)
        assert event.headroom_mc is not None
        assert 20_000 < event.headroom_mc < 30_000
        operator.flip()
        event = next_event(hears)
        assert (event.kind, event.share, event.number) == (EventKind.NORMAL, 1000, 2)
        assert hears.is_silent(0.05)
        assert never_asked.is_silent(0.05)
        assert elsewhere.is_silent(0.05)


def test_one_that_comes_later_hears_how_it_stands(
    daemon: DaemonProcess, operator: Operator
) -> None:
    operator.flip()
    with (
        Control(daemon.socket) as control,
        control.open_session("net", backends=WHERE, events=True) as late,
    ):
        event = next_event(late)
        assert (event.kind, event.backend) == (EventKind.TRIPPED, Backend.NPU)
        assert late.is_silent(0.05)


def test_who_never_reads_gets_a_few_and_harms_nobody(
    daemon: DaemonProcess, operator: Operator
) -> None:
    with (
        Witness(daemon.socket),
        leaves_nothing(daemon),
        Control(daemon.socket) as control,
    ):
        hostile = [
            control.open_session("net", backends=WHERE, events=True, slots=1 + number % 16)
            for number in range(32)
        ]
        for _ in range(20):
            operator.flip()

        before = rss_kib(daemon.pid)
        for _ in range(201):
            operator.flip()

        assert rss_kib(daemon.pid) - before < GROWTH_LIMIT_KIB
        for session in hostile:
            found = [next_event(session) for _ in range(session.slots + AHEAD_RECORDS)]
            assert [event.number for event in found] == list(range(1, len(found) + 1))
            # It reads again: where that is another, the state of now comes, once.
            if found[-1].state != State.TRIPPED:
                last = next_event(session)
                assert (last.state, last.number) == (State.TRIPPED, 221)

            assert session.is_silent(0.001)
            session.close()


def test_every_reply_comes_to_one_that_reads_late(
    daemon: DaemonProcess, operator: Operator
) -> None:
    slots = 16
    with (
        Control(daemon.socket) as control,
        control.open_session("net", backends=WHERE, events=True, slots=slots) as session,
    ):
        free = list(range(slots))
        for turn in range(5):
            for _ in range(30):
                operator.flip()

            wanted = {turn * slots + slot + 1 for slot in range(slots)}
            for slot, number in enumerate(sorted(wanted)):
                session.infer(number, slot, free.pop())
                operator.flip()

            replies: dict[int, Record] = {}
            events = 0
            while len(replies) < slots:
                data = session.sock.recv(RECORD_BYTES + 1)
                if data[0] == Kind.EVENT:
                    events += 1
                    continue

                reply = Record.unpack(data)
                assert (reply.kind, reply.status_domain) == (Kind.REPLY, 0)
                assert session.header_id(reply.output_slot) == reply.request_id
                free.append(reply.output_slot)
                replies[reply.request_id] = reply

            assert set(replies) == wanted
            assert events


def c_events(driver: Driver) -> list[dict[str, str]]:
    """The events that the driver has kept, by the words of its lines."""
    found = []
    for line in driver.do("events").split("|"):
        words = line.split()
        if words:
            kind, backend, precision, state, device_state, *rest = words
            found.append(
                {
                    "kind": kind,
                    "backend": backend,
                    "precision": precision,
                    "state": state,
                    "device_state": device_state,
                    **dict(zip(rest[::2], rest[1::2], strict=True)),
                }
            )

    return found


def is_tripped(event: SessionEvent) -> bool:
    return event.backend == "npu" and event.kind == "tripped"


def heats_up(rig: Rig, session: Session) -> list[SessionEvent]:
    """Warms the NPU past its trip, and lets no step of the way there go by untold, although the
    daemon or its sensor reader may see several at once; what was told."""
    heard: list[SessionEvent] = []
    # Past 20 and past 15 degrees of headroom: at one of them at least nothing else changes.
    for celsius, headroom_c in ((47.0, 20.0), (53.0, 15.0)):
        rig.temperature(celsius)
        while not any(e.backend == "npu" and is_below(e, headroom_c) for e in heard):
            heard += session.events(timeout_s=0.2)

    rig.temperature(72.0)
    while not any(event.backend == "npu" and event.kind == "shedding" for event in heard):
        heard += session.events(timeout_s=0.2)

    return heard


def is_below(event: SessionEvent, headroom_c: float) -> bool:
    return event.headroom_c is not None and event.headroom_c <= headroom_c


# The last one: what it trips stays open for two minutes.
def test_heat_is_told_to_every_client(daemon: DaemonProcess, rig: Rig, client: Client) -> None:
    heard_aio: list[SessionEvent] = []
    listening = threading.Event()

    async def listen() -> None:
        async with (
            await aio.connect(daemon.socket) as own,
            await own.open_session("net", backends=WHERE, events=True) as session,
        ):
            listening.set()
            async for event in session.events():
                heard_aio.append(event)
                if is_tripped(event):
                    break

            result = await session.run(frame)
            assert result.backend == "cpu"

    model = client.describe("net")
    frame = {tensor.name: bytes(tensor.capacity_bytes) for tensor in model.inputs}
    programs = (sanitized(), build("driver", "-O2"))
    with (
        Driver(programs[0]) as careful,
        Driver(programs[1]) as plain,
        Control(daemon.socket) as control,
        control.open_session("echo", backends=["cpu"], strict=True, events=True) as elsewhere,
        client.open_session(model, backends=WHERE, events=True) as session,
        client.open_session(model, backends=["npu"], strict=True, events=True) as insists,
    ):
        for driver in (careful, plain):
            driver.do("connect", daemon.socket)
            driver.do("open", "net", "events=1", "backend=npu", "backend=cpu")

        thread = threading.Thread(target=lambda: asyncio.run(listen()))
        thread.start()
        assert listening.wait(20)
        while session.run(frame).backend != "npu":
            pass

        assert list(session.events(timeout_s=0)) == []
        # No frame is slow before, so that it sheds load before it trips.
        heard = heats_up(rig, session)
        rig.pace(210_000)
        while not any(is_tripped(event) for event in heard):
            # The router leaves a slow place by itself; this one does not let it.
            assert insists.run(frame).backend == "npu"
            assert len(session.run(frame)) == len(model.outputs)
            heard += session.events(timeout_s=0)

        # The way there: the trip comes nearer, step by step, and load is shed.
        shorter = [event.headroom_c for event in heard if event.backend == "npu"]
        assert all(now is not None for now in shorter)
        assert shorter == sorted(shorter, key=lambda now: -(now or 0))
        assert "headroom" in {event.kind for event in heard}
        assert [event.number for event in heard if event.backend == "npu"] == sorted(
            {event.number for event in heard if event.backend == "npu"}
        )
        trip = next(event for event in heard if is_tripped(event))
        assert (trip.state, trip.device_state, trip.share) == ("tripped", "tripped", 0.0)
        assert trip.headroom_c is not None
        assert trip.headroom_c < 0
        assert 60_000 < trip.retry_after_ms <= 132_000
        assert session.run(frame).backend == "cpu"
        # The last usable place is not taken away for heat.
        *_, last = insists.events(timeout_s=0.1)
        assert (last.kind, last.state, last.share) == ("tripped", "tripped", 1.0)
        assert insists.run(frame).backend == "npu"

        thread.join(20)
        assert is_tripped(heard_aio[-1])
        assert heard_aio[-1].at_ns == pytest.approx(trip.at_ns, abs=1e9)
        for driver in (careful, plain):
            found: list[dict[str, str]] = []
            while not any(e["kind"] == "tripped" and e["backend"] == "npu" for e in found):
                driver.do("take", 10_000)
                found += c_events(driver)

            assert found[-1]["device_state"] == "tripped"
            assert int(found[-1]["headroom"]) < 0
            assert int(found[-1]["retry"]) > 60_000
            assert next(event["number"] for event in found if event["backend"] == "npu") == "1"
            assert {"headroom", "shedding"} <= {event["kind"] for event in found}
            assert {event["epoch"] for event in found} == {"1"}
            # In between, and with nothing in flight.
            assert floats(driver.do("run", 0))
            assert driver.fails("any", 0).name == "BadSlot"
            assert driver.do("take", 0) == "took 0"

        told = []
        while not elsewhere.is_silent(0.05):
            told.append(next_event(elsewhere))

        assert {event.backend for event in told} <= {Backend.CPU}
