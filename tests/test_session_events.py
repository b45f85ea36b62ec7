"""Who is told what of the places of a session, and that no event takes a reply's room."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_events_world import SLOW_MS, TRIP_C, Client, World, turns

from switchgear.daemon import session_events
from switchgear.daemon.protocol.answers import Event
from switchgear.daemon.protocol.topology import PairKey, Target
from switchgear.daemon.session_events import (
    AHEAD_RECORDS,
    HEADROOM_BAND_C,
    HEADROOM_STEPS_C,
    SESSIONS_A_TURN,
    step_of,
    unread_bytes,
)
from switchgear.ipc.errors import NoBackend, ShuttingDown
from switchgear.ipc.event import WHOLE_SHARE, EventKind, EventRecord, State
from switchgear.ipc.record import NO_READING, Backend, Kind, Precision, Priority, Record

Test = Callable[[World], Awaitable[None]]


def in_world(test: Test) -> None:
    async def run() -> None:
        with World() as world:
            await test(world)

    asyncio.run(run())


def newest(events: list[EventRecord]) -> dict[int, EventRecord]:
    """The last event of each backend."""
    return {event.backend: event for event in events}


def test_a_session_whose_places_are_well_hears_nothing() -> None:
    async def test(world: World) -> None:
        client = world.open("vulkan", "npu")
        world.heat("gpu", 30.0)
        await turns()
        assert client.records() == []

    in_world(test)


def test_a_trip_is_told_of_each_place_on_the_device() -> None:
    async def test(world: World) -> None:
        client = world.open("vulkan", "opencl", "npu")
        world.trip("vulkan")
        await turns()
        events = client.events()
        assert sorted(event.backend for event in events) == [Backend.VULKAN, Backend.OPENCL]
        for event in events:
            assert event.kind == EventKind.TRIPPED
            assert event.state == event.device_state == State.TRIPPED
            assert (event.precision, event.share, event.epoch) == (Precision.FP16, 0, 1)
            assert event.headroom_mc == -3000
            assert event.temperature_age_ms == 7
            assert 100_000 < event.retry_after_ms <= 132_000
            assert abs(event.at_ns - monotonic() * 1e9) < 10e9

    in_world(test)


def test_a_trip_of_a_device_that_was_warm_already_is_told() -> None:
    async def test(world: World) -> None:
        client = world.open("vulkan", "npu")
        world.heat("gpu", 30.0)
        world.heat("gpu", TRIP_C + 3)
        await turns()
        (warm,) = client.events()
        assert (warm.kind, warm.headroom_mc) == (EventKind.SHEDDING, -3000)
        world.frames("vulkan", SLOW_MS)
        await turns()
        (event,) = client.events()
        assert (event.kind, event.number) == (EventKind.TRIPPED, 2)

    in_world(test)


def test_a_sessions_own_limits_are_told_to_itself_only() -> None:
    async def test(world: World) -> None:
        strict, other = world.open("npu", slow_ms=20.0), world.open("npu")
        world.heat("npu", 30.0)
        world.heat("npu", TRIP_C + 3)
        await turns()
        for client in (strict, other):
            (warm,) = client.events()
            assert warm.device_state == State.SHEDDING

        # Slow for this session, and for no other.
        world.frames("npu", 50.0, limits=strict.session.seat.limits)  # type: ignore[union-attr]
        await turns()
        (event,) = strict.events()
        assert (event.kind, event.backend) == (EventKind.TRIPPED, Backend.NPU)
        assert event.device_state == State.SHEDDING
        assert event.retry_after_ms > 100_000
        assert other.records() == []

    in_world(test)


def test_who_has_no_place_there_is_not_even_looked_at() -> None:
    async def test(world: World) -> None:
        clients = {
            "gpu": world.open("vulkan"),
            "other model": world.open("vulkan", model="other"),
            "npu": world.open("npu"),
        }
        own = clients["gpu"].session.identity
        key = PairKey("m", "vulkan", "fp16")
        targets = {
            Target("device", "gpu"): {"gpu", "other model"},
            Target("device", "cpu"): set(clients),
            Target("backend", "npu"): {"npu"},
            Target("backend", "opencl"): set(),
            Target("pair", key): {"gpu"},
            Target("pair", key, own): {"gpu"},
            Target("pair", key, own + 1): set(),
        }
        for target, expected in targets.items():
            event = Event(1.0, "transition", target, "closed", "open", "heat", "")
            assert expected == {
                name
                for name, client in clients.items()
                if client.session.listener is not None
                and client.session.listener.concerns(event)
            }, target

    in_world(test)


def test_only_who_asked_and_has_a_place_there_hears_of_it() -> None:
    async def test(world: World) -> None:
        silent = world.open("vulkan", events=False)
        elsewhere = world.open("npu")
        hears = world.open("vulkan", model="other")
        world.trip("vulkan")
        await turns()
        assert silent.records() == []
        assert elsewhere.records() == []
        (event,) = hears.events()
        assert event.state == State.TRIPPED

    in_world(test)


def test_what_befalls_a_pair_is_told_to_its_own_models_sessions_only() -> None:
    async def test(world: World) -> None:
        mine, other = world.open("vulkan"), world.open("vulkan", model="other")
        key = PairKey("m", "vulkan", "fp16")
        world.protocol.failure(key, "crash", "signal", 11, monotonic())
        world.board.tell()
        await turns()
        (event,) = mine.events()
        assert (event.kind, event.state) == (EventKind.DEGRADED, State.DEGRADED)
        assert event.device_state == State.NORMAL
        assert event.retry_after_ms > 3_600_000
        assert other.records() == []

    in_world(test)


def test_a_place_that_is_not_well_at_the_open_is_told_at_once() -> None:
    async def test(world: World) -> None:
        world.open("vulkan")
        world.trip("vulkan")
        late = world.open("vulkan", "npu")
        await turns()
        (event,) = late.events()
        assert (event.kind, event.backend) == (EventKind.TRIPPED, Backend.VULKAN)

    in_world(test)


def test_before_the_switchboard_is_up_nothing_is_known() -> None:
    async def test(world: World) -> None:
        world.open("vulkan")
        world.trip("vulkan")
        world.router.board = None
        early = world.open("vulkan")
        await turns()
        assert early.records() == []
        world.router.board = world.board
        world.events.changed()
        await turns()
        assert [event.kind for event in early.events()] == [EventKind.TRIPPED]

    in_world(test)


def test_sessions_of_one_model_look_again_when_its_pairs_change() -> None:
    async def test(world: World) -> None:
        world.open("vulkan", model="other")
        world.trip("vulkan", model="other")
        client = world.open("npu")
        await turns()
        assert client.records() == []
        # The pair on the GPU is ready now.
        more = world.open("vulkan", events=False)
        client.session.targets = (*client.session.targets, more.session.targets[1])
        client.session.seat = world.board.seat(client.session)
        world.events.changed("other")
        await turns()
        assert client.records() == []
        world.events.changed("m")
        await turns()
        assert [event.backend for event in client.events()] == [Backend.VULKAN]

    in_world(test)


def test_a_batch_session_has_no_share_of_a_cpu_that_is_too_warm() -> None:
    async def test(world: World) -> None:
        normal, batch = world.open(), world.open(priority=Priority.BATCH)
        world.heat("cpu", TRIP_C + 1)
        await turns()
        (event,) = normal.events()
        assert (event.kind, event.share) == (EventKind.SHEDDING, WHOLE_SHARE)
        assert event.precision == Precision.NONE
        (event,) = batch.events()
        assert (event.kind, event.share) == (EventKind.SHEDDING, 0)

    in_world(test)


# Headroom.


def test_headroom_is_told_at_its_steps_only() -> None:
    async def test(world: World) -> None:
        client = world.open("npu")
        told = []
        for tenths in range(300, round(10 * TRIP_C)):
            world.heat("npu", tenths / 10)
            await turns(1)
            # Noise of a sensor around each value.
            world.heat("npu", tenths / 10 - HEADROOM_BAND_C / 2)
            await turns(1)
            told += client.events()

        found = [event for event in told if event.kind == EventKind.HEADROOM]
        assert [round((event.headroom_mc or 0) / 1000) for event in found] == [20, 15, 10, 5, 2]
        assert [event.backend for event in found] == [Backend.NPU] * 5

    in_world(test)


def test_a_lost_sensor_is_told_where_headroom_was_short() -> None:
    async def test(world: World) -> None:
        client = world.open("npu")
        world.heat("npu", TRIP_C - 4)
        await turns()
        world.heat("npu", None)
        await turns()
        short, lost = client.events()
        assert (short.headroom_mc, short.temperature_age_ms) == (4000, 7)
        assert lost.kind == EventKind.HEADROOM
        assert (lost.headroom_mc, lost.temperature_age_ms) == (None, NO_READING)

    in_world(test)


@given(st.lists(st.floats(-50, 100), min_size=1, max_size=30))
def test_a_step_is_left_above_its_band_only(headrooms_c: list[float]) -> None:
    before = 0
    for headroom_c in headrooms_c:
        step = step_of(headroom_c, before)
        assert step >= sum(headroom_c <= limit_c for limit_c in HEADROOM_STEPS_C)
        if step < before:
            assert headroom_c > HEADROOM_STEPS_C[step] + HEADROOM_BAND_C
        elif step > before:
            assert headroom_c <= HEADROOM_STEPS_C[step - 1]

        before = step

    assert step_of(None, before) == 0


# Room.


def unread_records(world: World, client: Client) -> int:
    sock = client.session.data_socket
    assert sock is not None
    return unread_bytes(sock) // world.events.cost_bytes


def waits(client: Client) -> bool:
    """Whether it has to be told something that there was no room for."""
    listener = client.session.listener
    return listener is not None and listener.waits


async def flip(world: World, times: int) -> None:
    """Another state of the vulkan backend, `times` times."""
    for _ in range(times):
        isolated = world.protocol.admit(PairKey("m", "vulkan", "fp16"), 0.0).allowed
        world.word("vulkan", "isolated" if isolated else "auto")
        await turns(2)


def test_changes_within_one_turn_are_told_as_one() -> None:
    async def test(world: World) -> None:
        client = world.open("vulkan")
        world.word("vulkan", "isolated")
        world.word("vulkan", "auto")
        world.word("vulkan", "isolated")
        await turns()
        (event,) = client.events()
        assert (event.kind, event.number) == (EventKind.TRIPPED, 1)

    in_world(test)


def test_who_never_reads_gets_a_few_and_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_events, "RETRY_S", 0.01)

    async def test(world: World) -> None:
        client, reads = world.open("vulkan"), world.open("vulkan")
        told = 0
        for _ in range(301):
            await flip(world, 1)
            told += len(reads.events())
            assert unread_records(world, client) <= client.session.options.slots + AHEAD_RECORDS

        # The other one heard of each.
        assert told == 301
        assert not client.session.ended
        assert waits(client)
        first = client.events()
        assert len(first) == client.session.options.slots + AHEAD_RECORDS
        # It reads again: the newest state comes, with the number of all that was.
        while waits(client):  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.005)

        last = client.events()[-1]
        assert (last.kind, last.number) == (EventKind.TRIPPED, 301)

    in_world(test)


def test_a_change_that_is_over_before_it_could_be_told_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_events, "RETRY_S", 0.01)

    async def test(world: World) -> None:
        client = world.open("vulkan")
        await flip(world, 2 + AHEAD_RECORDS)
        assert unread_records(world, client) == 2 + AHEAD_RECORDS
        await flip(world, 1)
        assert waits(client)
        await flip(world, 1)
        assert not waits(client)
        assert len(client.events()) == 2 + AHEAD_RECORDS
        await flip(world, 1)
        (event,) = client.events()
        assert event.number == 2 + AHEAD_RECORDS + 3

    in_world(test)


@pytest.mark.parametrize("slots", [1, 2, 16])
def test_every_reply_fits_behind_the_events(slots: int) -> None:
    async def test(world: World) -> None:
        # As small as the kernel lets it be, and as large as it usually is.
        for buffer_bytes in (1, 8192, 0):
            client = world.open("vulkan", slots=slots, buffer_bytes=buffer_bytes, refuses=True)
            await turns()
            before = unread_records(world, client)
            await flip(world, 100)
            events = unread_records(world, client) - before
            for number in range(slots):
                client.send(number + 1, number)

            client.session.receive(bytearray(Record(Kind.ARENA_ADD).pack()))
            client.session.go_away(ShuttingDown)
            kinds = [data[0] for data in client.records()]
            assert kinds[:events] == [Kind.EVENT] * events
            if buffer_bytes != 1:
                assert kinds[events:] == [Kind.REPLY] * (slots + 1) + [Kind.GOAWAY]

    in_world(test)


step = st.one_of(
    st.tuples(st.just("flip"), st.integers(1, 8)),
    st.tuples(st.just("frames"), st.integers(1, 4)),
    st.tuples(st.just("read"), st.integers(1, 12)),
    st.tuples(st.just("heat"), st.integers(40, 70)),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(step, max_size=40), st.integers(1, 4), st.sampled_from([0, 16384]))
def test_replies_come_whatever_happens(
    steps: list[tuple[str, int]], slots: int, buffer_bytes: int
) -> None:
    """A client that keeps to its slots, and reads when it likes."""

    async def test(world: World) -> None:
        client = world.open("vulkan", slots=slots, buffer_bytes=buffer_bytes, refuses=True)
        sent: list[int] = []
        replied: list[int] = []

        def read(limit: int) -> None:
            for data in client.records(limit):
                if data[0] == Kind.REPLY:
                    reply = Record.unpack(data)
                    assert reply.status_code == NoBackend.code
                    replied.append(reply.request_id)
                else:
                    EventRecord.unpack(data)

        for what, count in steps:
            if what == "flip":
                await flip(world, count)
            elif what == "heat":
                world.heat("gpu", count)
                await turns(1)
            elif what == "read":
                read(count)
            else:
                # Slots whose reply it has not read are not free.
                for _ in range(min(count, slots - (len(sent) - len(replied)))):
                    sent.append(len(sent) + 1)
                    client.send(sent[-1], len(sent) % slots)

        assert not client.session.ended
        read(1000)
        assert replied == sent

    in_world(test)


# The end.


def test_a_session_that_has_ended_is_told_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_events, "RETRY_S", 0.01)

    async def test(world: World) -> None:
        client, other = world.open("vulkan"), world.open("vulkan")
        await flip(world, 40)
        world.word("vulkan", "isolated")
        client.session.end()
        await asyncio.sleep(0.03)
        await turns()
        assert not world.events._listeners.keys() & {client.session.listener}
        assert {event.kind for event in other.events()} >= {EventKind.TRIPPED}
        # As with one whose client went away without a word.
        other.sock.close()
        await flip(world, 3)

    in_world(test)


def test_many_sessions_are_told_in_several_turns() -> None:
    async def test(world: World) -> None:
        clients = [world.open("vulkan") for _ in range(2 * SESSIONS_A_TURN + 1)]
        await turns(5)
        world.word("vulkan", "isolated")
        await turns(1)
        told = [client for client in clients if unread_records(world, client)]
        assert len(told) == SESSIONS_A_TURN
        await turns(3)
        assert all(len(client.events()) == 1 for client in clients)

    in_world(test)
