"""The asyncio client against the same daemon: what differs is how it waits."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from fake_daemon import FakeDaemon
from fake_session import FakeSession, collected, hold, model_bytes, tensor

from switchgear.client.aio import Client, Session, connect
from switchgear.client.aio.control import AsyncControl
from switchgear.ipc.errors import (
    BadInput,
    BadModel,
    Cancelled,
    ConnectionLost,
    InternalError,
    NotRunning,
    ProtocolError,
    SlotBusy,
    StateLost,
    TimedOut,
)
from switchgear.ipc.record import Record

ONES = [1.0, 1, 1, 1]
Work = Callable[[FakeDaemon, Client], Awaitable[None]]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with collected(), FakeDaemon(tmp_path / "s.sock") as served:
        yield served
        assert served.violations == []


def in_loop(daemon: FakeDaemon, work: Work) -> None:
    async def main() -> None:
        async with await connect(daemon.path, timeout_s=5, reconnect_s=5) as client:
            await work(daemon, client)

    asyncio.run(main())


@asynccontextmanager
async def session_of(client: Client, slots: int = 2) -> AsyncIterator[Session]:
    model = await client.load_model(model_bytes(), name="add one")
    async with await client.open_session(model, slots) as session:
        yield session


class Arrivals:
    """An `on_infer` that keeps requests; `wait` returns when `count` have come."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self._semaphore = threading.Semaphore(0)
        daemon.on_infer = lambda fake, record: self._semaphore.release()

    async def wait(self, count: int) -> None:
        for _ in range(count):
            assert await asyncio.to_thread(self._semaphore.acquire, timeout=10)


def test_control_calls(daemon: FakeDaemon) -> None:
    async def work(daemon: FakeDaemon, client: Client) -> None:
        seen: list[str] = []
        model = await client.load_model(
            model_bytes(), "add one", lambda progress: seen.append(progress.state)
        )
        assert seen == ["running", "done"]
        assert (await client.info())["ready"]
        assert (await client.status())["ready"]
        assert await client.models() == [model]
        assert await client.describe("add one") == model
        assert await client.check_model(model) == model
        assert (await client.infer(model, {"input": ONES}))["output"].tolist() == [2] * 4
        with pytest.raises(BadModel):
            await client.load_model(b"text")

        await client.unload_model(model)
        assert await client.models() == []
        # All of it on one connection.
        assert len(daemon._connections) == 1

    in_loop(daemon, work)


def test_calls_at_the_same_time(daemon: FakeDaemon) -> None:
    async def work(daemon: FakeDaemon, client: Client) -> None:
        go_on = daemon.stalled["WatchJob"] = threading.Event()
        loading = asyncio.create_task(client.load_model(model_bytes()))
        infos = await asyncio.gather(*(client.info() for _ in range(3)))
        assert [info["ready"] for info in infos] == [True] * 3
        assert not loading.done()
        go_on.set()
        assert (await loading).inputs == (tensor("input"),)

    in_loop(daemon, work)


def test_a_cancelled_call_does_not_harm_the_next(daemon: FakeDaemon) -> None:
    async def work(daemon: FakeDaemon, client: Client) -> None:
        go_on = daemon.stalled["GetInfo"] = threading.Event()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.info()

        go_on.set()
        assert await client.models() == []

    in_loop(daemon, work)


def test_time_limits_and_losses_of_calls(daemon: FakeDaemon) -> None:
    async def main() -> None:
        async with await connect(daemon.path, timeout_s=0.05) as client:
            daemon.stalled["GetInfo"] = threading.Event()
            with pytest.raises(TimedOut, match="GetInfo"):
                await client.info()

            daemon.stalled.pop("GetInfo").set()
            # What comes now is answered or lost, however late that is on a busy machine.
            client._operations.timeout_s = 10
            daemon.dropped.add("GetStatus")
            with pytest.raises(ConnectionLost):
                await client.status()

            await asyncio.to_thread(daemon.restart)
            assert await client.models() == []

    asyncio.run(main())


def test_a_large_message_goes_through(daemon: FakeDaemon) -> None:
    async def work(daemon: FakeDaemon, client: Client) -> None:
        model = await client.load_model(model_bytes(tensor("input", shape=(350_000,))))
        value = np.arange(350_000, dtype=np.float32)
        result = await client.infer(model, {"input": value})
        assert np.array_equal(result["output"], value + 1)

    in_loop(daemon, work)


def test_no_daemon_and_a_full_backlog(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")

    async def main() -> None:
        with pytest.raises(NotRunning, match="switchgear serve"):
            await connect(path)

        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(0)
            first = await AsyncControl.open(path, 5)
            with pytest.raises(NotRunning, match="does not accept"):
                await AsyncControl.open(path, 0.05)

            waiting = asyncio.create_task(AsyncControl.open(path, 5))
            accepted = listener.accept()[0]
            (await waiting).close()
            first.close()
            accepted.close()

    asyncio.run(main())


def test_garbage_instead_of_a_reply(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")

    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            control = await AsyncControl.open(path, 5)
            with listener.accept()[0] as server:
                server.sendall(b"no json\0")
                with pytest.raises(ProtocolError):
                    await control.call("GetInfo", timeout_s=5)

                assert not control.usable

    asyncio.run(main())


def test_frames(daemon: FakeDaemon) -> None:
    async def work(daemon: FakeDaemon, client: Client) -> None:
        async with session_of(client) as session:
            result = await session.run({"input": np.ones(4, np.float32)})
            assert result["output"].tolist() == [2, 2, 2, 2]
            assert (result.backend, result.run_ms) == ("cpu", 2)
            kept = await session.run(input=[4, 4, 4, 4], copy=True)
            request = await session.submit({"input": [5, 5, 5, 5]}, priority="high", slot=1)
            assert (await request.result())["output"][0] == 6
            assert request.done
            assert kept["output"].tolist() == [5, 5, 5, 5]
            with pytest.raises(BadInput):
                await session.run(input=np.zeros(4))

            async with await session.slot() as slot:
                slot.inputs["input"][:] = 7
                assert (await slot.run())["output"][0] == 8

    in_loop(daemon, work)


def test_replies_in_any_order_and_in_other_output_slots(daemon: FakeDaemon) -> None:
    async def work(daemon: FakeDaemon, client: Client) -> None:
        async with session_of(client, slots=3) as session:
            arrivals = Arrivals(daemon)
            tasks = [
                asyncio.create_task(session.run(input=[n, 0, 0, 0], copy=True))
                for n in range(3)
            ]
            await arrivals.wait(3)
            with pytest.raises(SlotBusy):
                await session.run(input=ONES)

            fake = daemon.sessions[0]
            for record in reversed(fake.records):
                fake.answer(record, swap=True)

            results = await asyncio.gather(*tasks)
            assert [result["output"][0] for result in results] == [1, 2, 3]

    in_loop(daemon, work)


def test_several_tasks_wait_for_one_request(daemon: FakeDaemon) -> None:
    async def work(daemon: FakeDaemon, client: Client) -> None:
        async with session_of(client) as session:
            arrivals = Arrivals(daemon)
            request = await session.submit({"input": ONES})
            await arrivals.wait(1)
            first, second = (asyncio.create_task(request.result()) for _ in range(2))
            with pytest.raises(TimedOut):
                await request.result(timeout_s=0.01)

            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first

            # The request itself goes on.
            daemon.sessions[0].answer(daemon.sessions[0].records[0])
            assert (await second)["output"][0] == 2

    in_loop(daemon, work)


def test_a_cancelled_task_cancels_its_request(daemon: FakeDaemon) -> None:
    async def work(daemon: FakeDaemon, client: Client) -> None:
        async with session_of(client, slots=1) as session:
            arrivals = Arrivals(daemon)
            task = asyncio.create_task(session.run(input=ONES))
            await arrivals.wait(1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

            daemon.on_infer = FakeSession.answer
            assert await asyncio.to_thread(daemon.sessions[0].cancel_answered.wait, 10)
            assert (await session.run(input=ONES))["output"][0] == 2
            assert daemon.sessions[0].cancelled == [1]
            daemon.on_infer = hold
            request = await session.submit({"input": ONES})
            await request.cancel()
            with pytest.raises(Cancelled):
                await request.result()

    in_loop(daemon, work)


def test_a_loss_and_the_next_call(daemon: FakeDaemon) -> None:
    async def work(daemon: FakeDaemon, client: Client) -> None:
        async with session_of(client) as session:
            arrivals = Arrivals(daemon)
            requests = [await session.submit({"input": ONES}) for _ in range(2)]
            await arrivals.wait(2)
            await asyncio.to_thread(daemon.restart)
            daemon.on_infer = FakeSession.answer
            for request in requests:
                with pytest.raises(ConnectionLost):
                    await request.result()

            # Both open it again: once.
            results = await asyncio.gather(
                *(session.run(input=ONES, copy=True) for _ in range(2))
            )
            assert [result["output"][0] for result in results] == [2, 2]
            # The restarted daemon refuses the first call: it has not got the model yet.
            assert len(daemon.called("OpenSession")) == 3
            slot = await session.slot()
            await asyncio.to_thread(daemon.restart)
            with pytest.raises(ConnectionLost):
                await slot.run({"input": ONES})

            assert (await session.run(input=ONES))["output"][0] == 2

    in_loop(daemon, work)


def test_state_is_told_lost(daemon: FakeDaemon) -> None:
    async def work(daemon: FakeDaemon, client: Client) -> None:
        model = await client.load_model(model_bytes(state=True))
        async with await client.open_session(model) as session:
            assert [(await session.run(input=ONES))["output"][0] for _ in range(2)] == [1, 2]
            session.reset()
            assert (await session.run(input=ONES))["output"][0] == 1
            await asyncio.to_thread(daemon.restart)
            with pytest.raises(StateLost):
                await session.run(input=ONES)

            assert (await session.run(input=ONES))["output"][0] == 1

    in_loop(daemon, work)


def test_garbage_and_errors_on_the_socket(daemon: FakeDaemon) -> None:
    async def work(daemon: FakeDaemon, client: Client) -> None:
        async with session_of(client) as session:
            daemon.on_infer = lambda fake, record: fake.fail(record, "switchgear", 599)
            with pytest.raises(InternalError):
                await session.run(input=ONES)

            daemon.on_infer = lambda fake, record: fake.send(Record(2, 999, output_slot=0))
            with pytest.raises(ConnectionLost, match="not in flight"):
                await session.run(input=ONES)

    in_loop(daemon, work)


def test_what_is_not_closed_is_told(daemon: FakeDaemon) -> None:
    async def main() -> None:
        client = await connect(daemon.path)
        session = await client.open_session(await client.load_model(model_bytes()))
        with pytest.warns(ResourceWarning, match="Session"):
            del session

        with pytest.warns(ResourceWarning, match="Client"):
            del client

        async with await connect(daemon.path) as closing:
            opened = await closing.open_session(await closing.load_model(model_bytes()))

        assert opened.closed
        with pytest.raises(ConnectionLost, match="closed"):
            await opened.run(input=ONES)

        with pytest.raises(ConnectionLost, match="closed"):
            await closing.info()

    asyncio.run(main())
