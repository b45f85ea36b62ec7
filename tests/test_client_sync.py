"""The blocking client against real sockets and arenas: frames, slots, threads, losses."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_daemon import FakeDaemon
from fake_session import FakeSession, Holding, collected, hold, model_bytes, tensor, wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from switchgear.client import Client, Session, connect
from switchgear.ipc.errors import (
    BackendFailed,
    BadInput,
    BadSlot,
    Busy,
    Cancelled,
    DeadlineExceeded,
    SlotBusy,
    TimedOut,
)
from switchgear.ipc.record import Record

ONES = [1.0, 1, 1, 1]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with collected(), FakeDaemon(tmp_path / "s.sock") as served:
        yield served
        assert served.violations == []


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Client]:
    with connect(daemon.path, reconnect_s=5) as connected:
        yield connected


@pytest.fixture
def session(client: Client) -> Iterator[Session]:
    with client.open_session(client.load_model(model_bytes(), name="add one")) as opened:
        yield opened


def test_a_frame_goes_there_and_back(session: Session) -> None:
    result = session.run({"input": np.array([1, 2, 3, 4], np.float32)})

    assert result["output"].tolist() == [2, 3, 4, 5]
    assert dict(result).keys() == {"output"}
    assert (result.backend, result.precision, result.reason) == ("cpu", "fp32", "only_ready")
    assert (result.queue_ms, result.run_ms, result.total_ms) == (1, 2, 4)
    assert (result.retries, result.tried, result.late) == (0, (), False)
    assert (result.temperature_age_ms, result.request_id, result.epoch) == (None, 1, 1)


def test_inputs_as_keywords_and_as_both(client: Client) -> None:
    model = client.load_model(model_bytes(tensor("a"), tensor("b", "int32", (2,))))
    with client.open_session(model) as session:
        for result in (
            session.run(a=ONES, b=[1, 2], copy=True),
            session.run({"a": ONES}, b=[1, 2], copy=True),
            session.run({"a": ONES, "b": [1, 2]}, copy=True),
        ):
            assert result["a_plus_one"].tolist() == [2, 2, 2, 2]
            assert result["b_plus_one"].tolist() == [2, 3]

        with pytest.raises(BadInput, match="'b' is given twice"):
            session.run({"a": ONES, "b": [1, 2]}, b=[1, 2])


def test_nothing_is_sent_when_an_input_does_not_fit(
    daemon: FakeDaemon, session: Session
) -> None:
    for wrong in ({}, {"x": ONES}, {"input": np.zeros(4)}, {"input": np.zeros(5, np.float32)}):
        with pytest.raises(BadInput):
            session.run(wrong)

    session.run(input=ONES)
    assert len(daemon.sessions[0].records) == 1


def test_views_are_valid_until_the_slot_is_used_again(session: Session) -> None:
    first = session.run(input=ONES)
    kept = session.run(input=[5, 5, 5, 5], copy=True)
    assert first["output"].tolist() == [2, 2, 2, 2]

    session.run(input=[7, 7, 7, 7])

    assert first["output"].tolist() == [8, 8, 8, 8]
    assert kept["output"].tolist() == [6, 6, 6, 6]


def test_replies_in_any_order_and_in_other_output_slots(
    daemon: FakeDaemon, client: Client
) -> None:
    model = client.load_model(model_bytes())
    holding = Holding(daemon, 3)
    with client.open_session(model, slots=3) as session:
        requests = [session.submit({"input": [n, n, n, n]}) for n in range(3)]
        with pytest.raises(SlotBusy, match="all 3 slots"):
            session.submit({"input": ONES})

        wait_until(holding.all_there)
        fake = daemon.sessions[0]
        first, second, third = fake.held.values()
        fake.answer(third, swap=True)
        fake.answer(first, swap=True)
        assert requests[2].result()["output"].tolist() == [3, 3, 3, 3]
        fake.answer(second)

        assert [request.result()["output"][0] for request in requests] == [1, 2, 3]
        # Each slot goes on with the output slot that it was given.
        daemon.on_infer = lambda fake, record: fake.answer(record, swap=True)
        for n in range(12):
            assert session.run(input=[n, 0, 0, 0])["output"][0] == n + 1


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    plan=st.lists(
        st.tuples(st.sampled_from(["ok", "swap", "fail", "cancel"]), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    )
)
def test_each_request_ends_exactly_once(
    daemon: FakeDaemon, client: Client, plan: list[tuple[str, int]]
) -> None:
    """Replies in any order, cancels, failures, slot switches; then the session still runs."""
    model = client.load_model(model_bytes())
    arrived = threading.Semaphore(0)
    daemon.on_infer = lambda fake, record: arrived.release()
    with client.open_session(model, slots=4) as session:
        fake = daemon.sessions[-1]
        waiting: list[tuple[Any, Record, int]] = []
        for number, (how, which) in enumerate(plan):
            while len(waiting) <= which and len(waiting) < 4:
                value = number * 10 + len(waiting)
                request = session.submit({"input": [value, 0, 0, 0]})
                assert arrived.acquire(timeout=10)
                waiting.append((request, fake.records[-1], value))

            request, record, value = waiting.pop(min(which, len(waiting) - 1))
            if how == "cancel":
                request.cancel()
                with pytest.raises(Cancelled):
                    request.result()
            elif how == "fail":
                fake.fail(record, "switchgear", 300, retry_after_ms=7)
                with pytest.raises(Busy):
                    request.result()
            else:
                fake.answer(record, swap=how == "swap")
                assert request.result()["output"][0] == value + 1

        for request, record, value in waiting:
            fake.answer(record)
            assert request.result()["output"][0] == value + 1

        daemon.on_infer = FakeSession.answer
        for value in range(8):
            assert session.run(input=[value, 0, 0, 0])["output"][0] == value + 1

    assert daemon.violations == []


def test_a_slot_is_taken_until_its_result_is(daemon: FakeDaemon, session: Session) -> None:
    first, second = session.submit({"input": ONES}), session.submit({"input": ONES})
    assert second.result() is second.result()

    answered = threading.Event()

    def answer(fake: FakeSession, record: Record) -> None:
        fake.answer(record)
        answered.set()

    daemon.on_infer = answer
    third = session.submit({"input": [3, 3, 3, 3]})
    wait_until(answered)
    with pytest.raises(SlotBusy):
        session.run(input=ONES)

    # A slot whose request nobody has any more is free again.
    del third
    gc.collect()
    assert session.run(input=ONES, timeout_s=10)["output"][0] == 2
    assert first.result()["output"].tolist() == [2, 2, 2, 2]


def test_done_tells_without_blocking(daemon: FakeDaemon, session: Session) -> None:
    holding = Holding(daemon, 1)
    request = session.submit({"input": ONES})
    wait_until(holding.all_there)
    assert (request.done, session.in_flight) == (False, 1)

    daemon.sessions[0].answer(next(iter(daemon.sessions[0].held.values())))

    assert (request.done, session.in_flight) == (True, 0)


def test_a_slot_is_filled_in_place(daemon: FakeDaemon, session: Session) -> None:
    with session.slot() as slot, session.slot() as other:
        with pytest.raises(SlotBusy):
            session.run(input=ONES)

        slot.inputs["input"][:] = [1, 2, 3, 4]
        assert slot.run()["output"].tolist() == [2, 3, 4, 5]
        assert slot.run({"input": ONES})["output"].tolist() == [2, 2, 2, 2]
        assert list(slot.inputs) == ["input"]
        assert len(other.inputs) == 1
        daemon.on_infer = hold
        request = slot.submit()
        with pytest.raises(SlotBusy, match="in flight"):
            slot.submit()

        with pytest.raises(BadInput, match="no input 'y'"):
            other.submit({"y": ONES})

        assert not request.done

    with pytest.raises(SlotBusy, match="given back"):
        slot.run()

    # The one that is in flight becomes free with its reply.
    request.cancel()
    with pytest.raises(Cancelled):
        request.result()

    daemon.on_infer = FakeSession.answer
    results = [session.submit({"input": ONES}) for _ in range(2)]
    assert [result.result()["output"][0] for result in results] == [2, 2]


def test_a_slot_by_its_number(session: Session) -> None:
    request = session.submit({"input": ONES}, slot=1)
    with pytest.raises(SlotBusy):
        session.submit({"input": ONES}, slot=1)

    with pytest.raises(BadSlot):
        session.submit({"input": ONES}, slot=2)

    assert request.slot == 1
    request.result()
    session.submit({"input": ONES}, slot=1).result()


def test_what_the_caller_said_travels_with_the_request(
    daemon: FakeDaemon, session: Session
) -> None:
    session.submit(
        {"input": ONES},
        deadline_ms=2.5,
        priority="high",
        trace_id=b"0123456789abcdef",
        capture_ns=77,
        capture_clock="realtime",
    ).result()

    record = daemon.sessions[0].records[0]
    assert (record.timeout_us, record.priority, record.capture_ns) == (2500, 1, 77)
    assert (record.trace_id, record.capture_clock) == (b"0123456789abcdef", 3)


def test_cancel_has_one_reply(daemon: FakeDaemon, session: Session) -> None:
    daemon.on_infer = hold
    request = session.submit({"input": ONES})
    request.cancel()
    request.cancel()
    with pytest.raises(Cancelled):
        request.result()

    request.cancel()
    daemon.on_infer = FakeSession.answer
    late = session.submit({"input": ONES})
    assert late.result()["output"][0] == 2
    late.cancel()
    session.run(input=ONES)
    assert daemon.sessions[0].cancelled == [1]


def test_a_cancel_that_comes_too_late_gives_the_result(
    daemon: FakeDaemon, session: Session
) -> None:
    holding = Holding(daemon, 1)
    daemon.cancels = False
    request = session.submit({"input": ONES})
    wait_until(holding.all_there)
    request.cancel()
    daemon.sessions[0].answer(next(iter(daemon.sessions[0].held.values())))

    assert request.result()["output"][0] == 2


def test_the_time_limit_of_a_wait(daemon: FakeDaemon, session: Session) -> None:
    holding = Holding(daemon, 2)
    request = session.submit({"input": ONES})
    with pytest.raises(TimedOut, match="still in flight"):
        request.result(timeout_s=0.01)

    with pytest.raises(TimedOut):
        session.run(input=[8, 8, 8, 8], timeout_s=0.01)

    wait_until(holding.all_there)
    fake = daemon.sessions[0]
    fake.answer(fake.records[0])
    assert request.result()["output"][0] == 2
    # `run` gave up and cancelled: its slot is free with the reply to that.
    daemon.on_infer = FakeSession.answer
    requests = [session.submit({"input": ONES}, slot=slot) for slot in (0,)]
    assert requests[0].result()["output"][0] == 2
    assert fake.cancelled == [2]


def test_errors_of_the_daemon_and_of_backends(daemon: FakeDaemon, session: Session) -> None:
    daemon.on_infer = lambda fake, record: fake.fail(record, "switchgear", 202)
    with pytest.raises(DeadlineExceeded, match="time was over"):
        session.run(input=ONES, deadline_ms=1)

    daemon.on_infer = lambda fake, record: fake.fail(
        record, "opencl", -5, backend=3, text="CL_OUT_OF_RESOURCES", swap=True
    )
    with pytest.raises(BackendFailed, match="opencl:-5: CL_OUT_OF_RESOURCES") as caught:
        session.run(input=ONES)

    assert caught.value.details["driver_code"] == -5
    daemon.on_infer = FakeSession.answer
    session.run(input=ONES)


def test_an_output_of_unknown_size(client: Client) -> None:
    model = client.load_model(model_bytes(dynamic=True))
    with client.open_session(model) as session:
        assert session.run(input=[3, 0, 0, 0])["output"].tolist() == [4, 1, 1]
        assert session.run(input=[1, 0, 0, 0])["output"].tolist() == [2]
        assert session.run(input=[0, 0, 0, 0])["output"].shape == (0,)


def test_shapes_are_prepared_when_they_are_new(daemon: FakeDaemon, client: Client) -> None:
    model = client.load_model(model_bytes(tensor("input", shape=(1,), signature=(-1,))))
    for _ in range(2):
        with client.open_session(model, input_shapes={"input": (int(np.int64(3)),)}) as session:
            assert session.inputs[0].shape == (3,)
            assert session.run(input=[1, 2, 3])["output"].tolist() == [2, 3, 4]

    assert daemon.called("PrepareShapes") == [
        {"model": model.hash, "input_shapes": {"input": [3]}}
    ]


def test_options_of_the_session_reach_the_daemon(daemon: FakeDaemon, client: Client) -> None:
    model = client.load_model(model_bytes())
    with client.open_session(
        model, 4, "reject", "batch", ["npu", "cpu"], True, output_capacity_bytes=99
    ) as session:
        assert session.slots == 4

    assert daemon.called("OpenSession") == [
        {
            "model": model.hash,
            "slots": 4,
            "on_busy": "reject",
            "priority": "batch",
            "strict": True,
            "backends": ["npu", "cpu"],
            "output_capacity_bytes": 99,
        }
    ]
