"""A session's events in the clients, with a daemon that sends them when a test says so."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from event_records import told
from fake_daemon import FakeDaemon
from fake_session import FakeSession, Holding, collected, model_bytes, wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from switchgear.client import Client, Session, SessionEvent, aio, connect
from switchgear.client.events import KEPT_PLACES, Inbox
from switchgear.ipc.errors import BadRequest, ConnectionLost, StateLost
from switchgear.ipc.event import EventKind, EventRecord, State
from switchgear.ipc.record import Backend, Record

ONES = [1.0, 1, 1, 1]


def send(fake: FakeSession, *events: EventRecord) -> None:
    for event in events:
        # A client that has its reply may be gone.
        with contextlib.suppress(OSError):
            fake.sock.send(event.pack(), socket.MSG_NOSIGNAL)


def eventful(fake: FakeSession, record: Record) -> None:
    """For `on_infer`: an event before the reply, and one behind it."""
    send(fake, told(2 * record.request_id - 1))
    fake.answer(record)
    send(fake, told(2 * record.request_id, backend=Backend.CPU))


class Eventful:
    """`eventful`, and a way to wait for the events behind replies that are there already."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self._ended = threading.Semaphore(0)
        daemon.on_infer = self

    def __call__(self, fake: FakeSession, record: Record) -> None:
        eventful(fake, record)
        self._ended.release()

    def wait(self, frames: int) -> None:
        """Until all was sent of so many more frames."""
        for _ in range(frames):
            assert self._ended.acquire(timeout=10)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with collected(), FakeDaemon(tmp_path / "s.sock") as served:
        yield served
        assert served.violations == []


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Client]:
    with connect(daemon.path, reconnect_s=5) as connected:
        connected.load_model(model_bytes(), name="add one")
        yield connected


@pytest.fixture
def session(client: Client) -> Iterator[Session]:
    with client.open_session("add one", events=True) as opened:
        yield opened


def numbers(events: list[SessionEvent]) -> list[int]:
    return [event.number for event in events]


# What an event says.


def test_an_event_in_words(daemon: FakeDaemon, session: Session) -> None:
    send(
        daemon.sessions[0],
        told(
            7,
            kind=EventKind.TRIPPED,
            state=State.TRIPPED,
            device_state=State.RECOVERING,
            share=125,
            headroom_mc=-2500,
            temperature_age_ms=12,
            retry_after_ms=90_000,
            at_ns=5,
        ),
        told(8, backend=Backend.CPU, precision=0, kind=EventKind.HEADROOM),
        told(9, backend=77, kind=99, state=98, device_state=0),
    )
    first, second, third = session.events(timeout_s=0)
    assert first == SessionEvent(
        *("tripped", "vulkan", "fp16", "tripped", "recovering", 0.125),
        *(-2.5, 12, 90_000, 7, 1, 5),
    )
    assert (second.kind, second.backend, second.precision) == ("headroom", "cpu", "none")
    assert (second.headroom_c, second.temperature_age_ms, second.share) == (None, None, 1.0)
    assert (third.kind, third.backend, third.state, third.device_state) == (
        *("99", "77", "98", "none"),
    )


def test_the_daemon_is_asked_only_where_the_app_asks(
    daemon: FakeDaemon, client: Client, session: Session
) -> None:
    with client.open_session("add one") as silent:
        with pytest.raises(BadRequest, match="events=True"):
            silent.events()

        # Events that nobody asked for do no harm.
        daemon.on_infer = eventful
        for _ in range(3):
            assert silent.run(input=ONES)["output"].tolist() == [2, 2, 2, 2]

    asked = [options.get("events") for options in daemon.called("OpenSession")]
    assert asked == [True, None]


def test_the_newest_of_each_place_is_kept_in_order() -> None:
    news: list[None] = []
    inbox = Inbox()
    inbox.on_news = lambda: news.append(None)
    inbox.put(told(1).pack())
    assert inbox.take() is None
    inbox.wanted = True
    for number, backend in enumerate((1, 2, 1, 3, 1), 1):
        inbox.put(told(number, backend=backend).pack())

    taken = iter(inbox.take, None)
    assert [(event.number, event.backend) for event in taken] == [
        *((2, "vulkan"), (4, "opencl"), (5, "cpu")),
    ]
    assert len(news) == 5
    for number in range(3 * KEPT_PLACES):
        inbox.put(told(number, backend=number % 256, precision=number // 256).pack())

    assert numbers(list(iter(inbox.take, None))) == list(
        range(2 * KEPT_PLACES, 3 * KEPT_PLACES)
    )


# The blocking client.


def test_events_come_between_replies(daemon: FakeDaemon, session: Session) -> None:
    fake = Eventful(daemon)
    for frame in range(1, 6):
        assert session.run(input=[frame] * 4)["output"].tolist() == [frame + 1] * 4

    pending = [session.submit({"input": ONES}) for _ in range(2)]
    assert [request.result(timeout_s=10)["output"][0] for request in pending] == [2, 2]
    with session.slot() as slot:
        assert slot.run({"input": ONES})["output"][0] == 2

    fake.wait(8)
    assert sorted(numbers(list(session.events(timeout_s=0)))) == [15, 16]
    assert list(session.events(timeout_s=0)) == []
    assert list(session.events(timeout_s=0.01)) == []


def test_a_thread_listens_while_another_runs_frames(
    daemon: FakeDaemon, session: Session
) -> None:
    heard: list[SessionEvent] = []
    first = threading.Event()

    def listen() -> None:
        for event in session.events():
            heard.append(event)
            first.set()

    thread = threading.Thread(target=listen)
    thread.start()
    send(daemon.sessions[0], told(1))
    assert first.wait(10)
    daemon.on_infer = eventful
    for frame in range(1, 40):
        assert session.run(input=[frame] * 4)["output"].tolist() == [frame + 1] * 4

    # Its own close ends the iteration.
    session.close()
    thread.join(10)
    assert not thread.is_alive()
    found = numbers(heard)
    assert found[0] == 1
    assert max(found) >= 77
    # In the order of each place.
    for place in ("cpu", "vulkan"):
        mine = [event.number for event in heard if event.backend == place]
        assert mine == sorted(mine)


def test_who_listens_is_not_stopped_by_one_who_waits_for_a_reply(
    daemon: FakeDaemon, session: Session
) -> None:
    holding = Holding(daemon, 1)
    request = session.submit({"input": ONES})
    wait_until(holding.all_there)
    waiter = threading.Thread(target=request.result)
    waiter.start()
    while not session._channel._receiving:
        pass

    fake = daemon.sessions[0]
    send(fake, told(1))
    assert next(session.events()).number == 1
    for record in list(fake.held.values()):
        fake.answer(record)

    waiter.join(10)
    assert request.done


def test_the_end_of_the_daemon_is_told_and_the_session_goes_on_after(
    daemon: FakeDaemon, client: Client, session: Session
) -> None:
    fake = daemon.sessions[0]
    send(fake, told(1))
    fake.close()
    heard = session.events()
    assert next(heard).number == 1
    with pytest.raises(ConnectionLost):
        next(heard)

    # It does not open the session again; a frame does, with the same options.
    with pytest.raises(ConnectionLost):
        next(session.events(timeout_s=0))

    assert len(daemon.sessions) == 1
    assert session.run(input=ONES)["output"][0] == 2
    send(daemon.sessions[1], told(2))
    assert next(session.events()).number == 2
    session.close()
    assert list(session.events()) == []


def test_a_lost_state_is_told_to_the_frame(daemon: FakeDaemon, client: Client) -> None:
    model = client.load_model(model_bytes(state=True))
    with client.open_session(model, events=True) as session:
        session.run(input=ONES)
        daemon.sessions[-1].close()
        with pytest.raises(ConnectionLost):
            next(session.events())

        with pytest.raises(StateLost):
            session.run(input=ONES)


@settings(
    max_examples=15,
    deadline=None,
    # The other one is of the machine's speed.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), min_size=1, max_size=8
    )
)
def test_any_number_of_events_around_replies(
    daemon: FakeDaemon, client: Client, frames: list[tuple[int, int, bool]]
) -> None:
    sent: dict[int, int] = {}
    ended = threading.Semaphore(0)

    def answer(fake: FakeSession, record: Record) -> None:
        before, after, _ = frames[record.request_id - 1]
        for backend in range(before + after):
            if backend == before:
                fake.answer(record)

            number = 10 * record.request_id + backend
            sent[backend] = number
            send(fake, told(number, backend=backend))

        if after == 0:
            fake.answer(record)

        ended.release()

    daemon.on_infer = answer
    last: dict[str, int] = {}
    with client.open_session("add one", events=True) as session:
        for number, (_, _, short) in enumerate(frames):
            if short:
                result = session.run(input=[number] * 4)
            else:
                result = session.run(input=[number] * 4, timeout_s=10)

            assert result["output"].tolist() == [number + 1] * 4

        # A reply may be here before the events behind it are sent.
        for _ in frames:
            assert ended.acquire(timeout=10)

        for event in session.events(timeout_s=0.05):
            last[event.backend] = event.number

    names = ("none", "cpu", "vulkan", "opencl", "npu", "other")
    assert last == {names[backend]: number for backend, number in sent.items()}


# The asyncio client.


def in_loop(
    daemon: FakeDaemon, work: Callable[[aio.Client, aio.Session], Awaitable[None]]
) -> None:
    async def main() -> None:
        async with await aio.connect(daemon.path, reconnect_s=5) as client:
            model = await client.load_model(model_bytes(), name="add one")
            async with await client.open_session(model, events=True) as session:
                await work(client, session)

    asyncio.run(main())


def test_asyncio_hears_between_replies(daemon: FakeDaemon) -> None:
    async def work(client: aio.Client, session: aio.Session) -> None:
        fake = Eventful(daemon)
        for frame in range(1, 6):
            result = await session.run(input=[frame] * 4)
            assert result["output"].tolist() == [frame + 1] * 4

        await asyncio.to_thread(fake.wait, 5)
        found = [event.number async for event in session.events(timeout_s=0.05)]
        assert sorted(found) == [9, 10]
        assert [event async for event in session.events(timeout_s=0)] == []
        async with await client.open_session("add one") as silent:
            with pytest.raises(BadRequest):
                silent.events()

    in_loop(daemon, work)


def test_asyncio_listens_beside_frames(daemon: FakeDaemon) -> None:
    async def work(client: aio.Client, session: aio.Session) -> None:
        heard: list[int] = []
        first = asyncio.Event()

        async def listen() -> None:
            async for event in session.events():
                heard.append(event.number)
                first.set()

        tasks = [asyncio.create_task(listen()) for _ in range(2)]
        send(daemon.sessions[0], told(1))
        await first.wait()
        daemon.on_infer = eventful
        for _ in range(10):
            await session.run(input=ONES)

        await session.close()
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert heard[0] == 1
        # Each went to one of the two; number 1 was sent twice.
        assert len(heard) - len(set(heard)) == heard.count(1) - 1
        assert heard.count(1) <= 2

    in_loop(daemon, work)


def test_asyncio_is_told_of_the_end(daemon: FakeDaemon) -> None:
    async def work(client: aio.Client, session: aio.Session) -> None:
        heard = session.events()
        waiting = asyncio.create_task(anext(heard))
        await asyncio.sleep(0)
        send(daemon.sessions[0], told(1))
        assert (await waiting).number == 1
        waiting = asyncio.create_task(anext(heard))
        await asyncio.sleep(0)
        daemon.sessions[0].close()
        with pytest.raises(ConnectionLost):
            await waiting

        assert (await session.run(input=ONES))["output"][0] == 2
        send(daemon.sessions[1], told(2))
        assert (await anext(session.events())).number == 2
        waiting = asyncio.create_task(anext(session.events()))
        await asyncio.sleep(0)
        await session.close()
        with pytest.raises(StopAsyncIteration):
            await waiting

    in_loop(daemon, work)
