"""The blocking client against real sockets and arenas: frames, slots, threads, losses."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_daemon import FakeDaemon, FakeSession, collected, hold, model_bytes, tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from switchgear.client import Client, Session, connect
from switchgear.ipc.errors import (
    BackendFailed,
    BadInput,
    BadModel,
    BadSlot,
    Busy,
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    NotRunning,
    SlotBusy,
    StateLost,
    SwitchgearError,
    TimedOut,
    UnknownModel,
)
from switchgear.ipc.record import Flag, Kind, Record

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


def wait_until(event: threading.Event) -> None:
    assert event.wait(10)


class Holding:
    """An `on_infer` that keeps requests and tells when `count` are there."""

    def __init__(self, daemon: FakeDaemon, count: int) -> None:
        self._left = count
        self.all_there = threading.Event()
        daemon.on_infer = self

    def __call__(self, session: FakeSession, record: Record) -> None:
        self._left -= 1
        if self._left == 0:
            self.all_there.set()


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


# Threads.


def test_threads_share_a_session(daemon: FakeDaemon, client: Client) -> None:
    """Each thread gets its own answers; none is lost, whoever receives them."""
    threads, rounds = 4, 60
    model = client.load_model(model_bytes())
    wrong: list[object] = []
    with client.open_session(model, slots=threads) as session:

        def work(number: int) -> None:
            try:
                for turn in range(rounds):
                    value = number * 1000 + turn
                    result = session.run(input=[value, 0, 0, 0], copy=True, timeout_s=10)
                    if result["output"][0] != value + 1:
                        wrong.append((value, result["output"][0]))
            except SwitchgearError as error:
                wrong.append(error)

        workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
        for worker in workers:
            worker.start()

        for worker in workers:
            worker.join()

    assert wrong == []
    assert len(daemon.sessions[0].records) == threads * rounds


def test_a_thread_that_gives_up_hands_the_receiving_over(
    daemon: FakeDaemon, session: Session
) -> None:
    holding = Holding(daemon, 2)
    first, second = session.submit({"input": ONES}), session.submit({"input": [2, 2, 2, 2]})
    wait_until(holding.all_there)
    got: list[float] = []
    ready = threading.Event()

    def follow() -> None:
        ready.set()
        got.append(float(second.result()["output"][0]))

    follower = threading.Thread(target=follow)
    follower.start()
    wait_until(ready)
    with pytest.raises(TimedOut):
        first.result(timeout_s=0.05)

    fake = daemon.sessions[0]
    fake.answer(fake.records[1])
    follower.join()
    assert got == [3]
    fake.answer(fake.records[0])
    assert first.result()["output"][0] == 2


def test_close_wakes_the_threads_that_wait(daemon: FakeDaemon, session: Session) -> None:
    holding = Holding(daemon, 2)
    errors: list[SwitchgearError] = []

    def work() -> None:
        try:
            session.run(input=ONES)
        except SwitchgearError as error:
            errors.append(error)

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()

    wait_until(holding.all_there)
    session.close()
    for worker in workers:
        worker.join()

    assert [type(error) for error in errors] == [ConnectionLost] * 2
    with pytest.raises(ConnectionLost, match="is closed"):
        session.run(input=ONES)


# The daemon goes away.


def test_what_was_in_flight_is_lost_and_the_next_call_connects_again(
    daemon: FakeDaemon, session: Session
) -> None:
    holding = Holding(daemon, 2)
    requests = [session.submit({"input": ONES}) for _ in range(2)]
    wait_until(holding.all_there)
    before = session.id
    daemon.restart()
    daemon.on_infer = FakeSession.answer

    for request in requests:
        with pytest.raises(ConnectionLost):
            request.result()

    assert session.run(input=ONES)["output"][0] == 2
    assert session.id != before
    # The model came from the client's own copy, under its name.
    assert [call.get("name") for call in daemon.called("LoadModel")] == ["add one"] * 2


def test_a_loss_with_nothing_in_flight_is_not_seen(
    daemon: FakeDaemon, client: Client, session: Session
) -> None:
    kept = session.run(input=ONES)
    daemon.restart()
    assert session.run(input=[4, 4, 4, 4])["output"][0] == 5
    assert kept["output"].tolist() == [2, 2, 2, 2]
    daemon.restart()
    assert session.submit({"input": ONES}).result()["output"][0] == 2
    daemon.restart()
    assert client.models() == []
    daemon.stop()
    back = threading.Timer(0.1, daemon.start)
    back.start()
    assert session.run(input=ONES)["output"][0] == 2
    back.join()


def test_without_reconnect_a_loss_stays(daemon: FakeDaemon) -> None:
    with connect(daemon.path, reconnect=False) as client:
        session = client.open_session(client.load_model(model_bytes()))
        daemon.restart()
        for _ in range(2):
            with pytest.raises(ConnectionLost):
                session.run(input=ONES)


def test_a_daemon_that_stays_away_is_named(daemon: FakeDaemon) -> None:
    with connect(daemon.path, reconnect_s=0.05) as client:
        session = client.open_session(client.load_model(model_bytes()))
        daemon.stop()
        with pytest.raises(NotRunning, match="switchgear serve"):
            session.run(input=ONES)

        with pytest.raises(NotRunning, match=r"s\.sock"):
            client.info()

        daemon.start()
        assert session.run(input=ONES)["output"][0] == 2


def test_a_model_that_the_client_has_no_copy_of_cannot_come_back(
    daemon: FakeDaemon, client: Client
) -> None:
    with connect(daemon.path) as other:
        other.load_model(model_bytes(), name="theirs")

    with client.open_session("theirs") as session:
        daemon.restart()
        with pytest.raises(UnknownModel):
            session.run(input=ONES)


def test_the_clients_copy_is_of_the_file_that_was_loaded(
    daemon: FakeDaemon, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "model.tflite"
    path.write_bytes(model_bytes())
    model = client.load_model(path)
    replaced = tmp_path / "new"
    replaced.write_bytes(model_bytes(salt="another"))
    replaced.rename(path)
    with client.open_session(model) as session:
        daemon.restart()
        assert session.run(input=ONES)["output"][0] == 2

    # One that is written over in place is another model.
    overwritten = client.load_model(path)
    with client.open_session(overwritten) as session:
        path.write_bytes(model_bytes(salt="a third"))
        daemon.restart()
        with pytest.raises(BadModel, match="has changed"):
            session.run(input=ONES)


def test_a_slot_belongs_to_its_connection(daemon: FakeDaemon, session: Session) -> None:
    slot = session.slot()
    slot.inputs["input"][:] = 1
    daemon.restart()
    for _ in range(2):
        with pytest.raises(ConnectionLost):
            slot.run()

    with session.slot() as again:
        again.inputs["input"][:] = 2
        assert again.run()["output"][0] == 3

    slot.close()


def test_a_session_that_the_daemon_ends_on_purpose_stays_ended(
    daemon: FakeDaemon, session: Session
) -> None:
    session.run(input=ONES)
    daemon.sessions[0].go_away(106)
    daemon.sessions[0].close()

    for _ in range(2):
        with pytest.raises(
            ConnectionLost, match="the daemon ended the session: No loaded model"
        ) as caught:
            session.run(input=ONES)

    assert caught.value.details["cause"] == "UnknownModel"


def test_a_stopping_daemon_is_waited_for(daemon: FakeDaemon, session: Session) -> None:
    holding = Holding(daemon, 1)
    request = session.submit({"input": ONES})
    wait_until(holding.all_there)
    fake = daemon.sessions[0]
    fake.go_away(405)
    fake.answer(fake.records[0])
    assert request.result()["output"][0] == 2
    daemon.restart()
    daemon.on_infer = FakeSession.answer

    assert session.run(input=ONES)["output"][0] == 2


def test_garbage_on_the_socket_ends_the_session(daemon: FakeDaemon, session: Session) -> None:
    daemon.on_infer = lambda fake, record: fake.send(Record(Kind.REPLY, 999, output_slot=0))

    with pytest.raises(ConnectionLost, match="not in flight") as caught:
        session.run(input=ONES)

    assert caught.value.details["cause"] == "ProtocolError"


# State.


def test_state_and_its_reset(daemon: FakeDaemon, client: Client) -> None:
    model = client.load_model(model_bytes(state=True))
    with client.open_session(model) as session:
        assert session.state
        assert [session.run(input=ONES)["output"][0] for _ in range(3)] == [1, 2, 3]
        assert session.run(input=ONES, reset=True)["output"][0] == 1
        session.reset()
        assert session.run(input=ONES)["output"][0] == 1
        assert session.run(input=ONES)["output"][0] == 2
        flags = [record.flags for record in daemon.sessions[0].records]
        assert flags == [0, 0, 0, Flag.RESET, Flag.RESET, 0]


def test_a_lost_state_is_told_once_and_the_epoch_adopted(
    daemon: FakeDaemon, client: Client
) -> None:
    model = client.load_model(model_bytes(state=True))
    with client.open_session(model) as session:
        session.run(input=ONES)
        daemon.sessions[0].lose_state()
        with pytest.raises(StateLost):
            session.run(input=ONES)

        assert session.epoch == 2
        assert session.run(input=ONES)["output"][0] == 1


def test_a_state_that_went_with_the_daemon_is_told(daemon: FakeDaemon, client: Client) -> None:
    model = client.load_model(model_bytes(state=True))
    with client.open_session(model) as session:
        session.run(input=ONES)
        daemon.restart()
        with pytest.raises(StateLost, match="fresh"):
            session.run(input=ONES)

        assert session.run(input=ONES)["output"][0] == 1
        daemon.restart()
        session.reset()
        assert session.run(input=ONES)["output"][0] == 1
        daemon.restart()
        assert session.run(input=ONES, reset=True)["output"][0] == 1


# Hygiene.


def test_what_is_not_closed_is_told(daemon: FakeDaemon) -> None:
    client = connect(daemon.path)
    session = client.open_session(client.load_model(model_bytes()))
    with pytest.warns(ResourceWarning, match="Session"):
        del session

    with pytest.warns(ResourceWarning, match="Client"):
        del client


def test_closing_the_client_closes_its_sessions(daemon: FakeDaemon) -> None:
    with connect(daemon.path) as client:
        session = client.open_session(client.load_model(model_bytes()))
        result = session.run(input=ONES)

    assert session.closed
    # A view outlives it.
    assert result["output"].tolist() == [2, 2, 2, 2]
    with pytest.raises(ConnectionLost, match="client is closed"):
        client.info()


def test_descriptors_and_mappings_go(daemon: FakeDaemon, client: Client) -> None:
    def held() -> tuple[int, int]:
        with open("/proc/self/maps", encoding="ascii") as maps:
            mapped = sum("memfd:test-arena" in line for line in maps)

        return len(os.listdir("/proc/self/fd")), mapped

    model = client.load_model(model_bytes())

    def use() -> None:
        with client.open_session(model) as session:
            session.run(input=ONES)
            session.submit({"input": ONES})
            with session.slot() as slot:
                slot.inputs["input"][0] = 1

            with pytest.raises(BadInput):
                session.run(input=0)

        daemon.sessions.pop().close()

    use()
    before = held()
    for _ in range(5):
        use()

    assert held() == before


def test_a_forked_child_leaves_the_parents_session_alone(
    daemon: FakeDaemon, session: Session
) -> None:
    there = threading.Event()

    def answer_the_child(fake: FakeSession, record: Record) -> None:
        if fake is daemon.sessions[0]:
            there.set()
        else:
            fake.answer(record)

    daemon.on_infer = answer_the_child
    request = session.submit({"input": ONES})
    wait_until(there)
    child = os.fork()
    if child == 0:
        # The child ends without cleaning up, for nothing else here is its own.
        status = 1
        try:
            with pytest.raises(ConnectionLost, match="forked"):
                request.result(timeout_s=5)

            if session.run(input=ONES, timeout_s=5)["output"][0] == 2:
                status = 0
        finally:
            os._exit(status)

    _, waited = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(waited) == 0
    daemon.sessions[0].answer(daemon.sessions[0].records[0])
    assert request.result()["output"][0] == 2


def test_the_examples_of_the_guide_run(
    daemon: FakeDaemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "model.tflite").write_bytes(model_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWITCHGEAR_SOCKET", str(daemon.path))
    guide = Path(__file__).resolve().parent.parent / "docs" / "client.md"
    parts = guide.read_text().split("```python\n")[1:]
    namespace: dict[str, object] = {}
    for part in parts:
        exec(part.partition("```")[0], namespace)

    said = capsys.readouterr().out
    assert said.count("[2. 2. 2. 2.]") == 5
    assert said.count("[1.5 1.5 1.5 1.5]") == 1
