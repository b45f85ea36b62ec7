"""The recorder: whose rows a watcher gets, its bounds, and what an idle one costs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from switchgear.daemon.telemetry.recorder import (
    COLUMNS,
    MAX_NAMES,
    MAX_WATCHERS,
    OTHERS_PER_ANSWER,
    RING_ROWS,
    ROWS_PER_ANSWER,
    Recorder,
    Watcher,
)
from switchgear.daemon.telemetry.tracing import MAX_BEHIND_BYTES, Tracing
from switchgear.ipc.errors import ConnectionLost, QuotaExceeded
from switchgear.ipc.record import Kind, Record
from switchgear.ipc.varlink import MAX_VALUES


class Worker:
    def __init__(self, pid: int) -> None:
        self.pid = pid


class Lane:
    name = "interactive"
    restarts = 0
    last_end = ""
    queued = 0
    running = 0

    def __init__(self, backend: str, worker: Worker | None) -> None:
        self.backend = backend
        self.group = "0"
        self.worker = worker


def lane_of(worker: Worker | None, backend: str = "cpu") -> Any:
    return Lane(backend, worker)


def request_of(session: int = 1, uid: int = 1000, lane: Any = None, number: int = 7) -> Any:
    return SimpleNamespace(
        session=SimpleNamespace(
            identity=session,
            peer=SimpleNamespace(pid=4000 + session, uid=uid),
            model=SimpleNamespace(label=f"model{session}"),
        ),
        lane=lane,
        identity=number,
        arrival_ns=1_000,
        dispatch_ns=2_000 if lane is not None else 0,
        attempts=0,
        priority=2,
        reason=5,
    )


def reply(domain: int = 0, code: int = 0) -> bytes:
    return Record(Kind.REPLY, status_domain=domain, status_code=code).pack()


def finish(recorder: Recorder, request: Any, run_ns: int = 500) -> None:
    recorder.finished(request, reply(), run_ns, 9_000)


def column(row: tuple[int, ...], name: str) -> int:
    return row[COLUMNS.index(name)]


def test_it_is_on_only_while_somebody_watches() -> None:
    recorder = Recorder()
    seen = [recorder.on]
    one, two = recorder.watch(None), recorder.watch(5)
    for watcher in (one, two, two):
        recorder.unwatch(watcher)
        seen.append(recorder.on)

    assert seen == [False, True, False, False]


def test_watchers_are_few() -> None:
    recorder = Recorder()
    watchers = [recorder.watch(None) for _ in range(MAX_WATCHERS)]
    with pytest.raises(QuotaExceeded):
        recorder.watch(None)

    recorder.unwatch(watchers[0])
    recorder.watch(None)


def test_a_user_gets_the_own_rows_and_an_operator_all() -> None:
    recorder = Recorder()
    everybody, mine = recorder.watch(None), recorder.watch(1000)
    finish(recorder, request_of(session=1, uid=1000))
    finish(recorder, request_of(session=2, uid=2000))
    recorder.event("breakers", "gpu0 opens", temperature_mc=66_000)
    recorder.event("sessions", "of one user", sees=lambda uid: uid == 2000)
    all_rows, my_rows = everybody.take(), mine.take()
    assert [row[0] for row in all_rows["requests"]] == [1, 2]
    assert [row[0] for row in my_rows["requests"]] == [1]
    assert [one["session"] for one in my_rows["sessions"]] == [1]
    assert [one["name"] for one in all_rows["events"]] == ["gpu0 opens", "of one user"]
    assert [one["name"] for one in my_rows["events"]] == ["gpu0 opens"]
    assert my_rows["events"][0]["details"] == {"temperature_mc": "66000"}


def test_a_row_has_its_columns_and_names_are_told_once() -> None:
    recorder = Recorder()
    watcher = recorder.watch(None)
    lane = lane_of(Worker(77))
    finish(recorder, request_of(lane=lane))
    first = watcher.take()
    (row,) = first["requests"]
    assert row == (1, 7, 0, 1_000, 2_000, 500, 9_000, 0, 0, 0, 2, 5)
    assert first["lanes"] == [
        {"number": 0, "backend": "cpu", "lane": "interactive", "group": "0", "pid": 77}
    ]
    finish(recorder, request_of(lane=lane))
    second = watcher.take()
    assert (second["lanes"], second["sessions"]) == ([], [])
    # Another worker of the lane is another track.
    lane.worker = Worker(78)
    finish(recorder, request_of(lane=lane))
    (third,) = watcher.take()["lanes"]
    assert (third["number"], third["pid"]) == (1, 78)


def test_a_client_that_is_gone_and_one_that_was_given_to_no_worker() -> None:
    recorder = Recorder()
    watcher = recorder.watch(None)
    recorder.finished(request_of(), b"", 0, 9_000)
    recorder.finished(request_of(), reply(1, 300), 0, 9_000)
    gone, busy = watcher.take()["requests"]
    assert column(gone, "code") == ConnectionLost.code
    assert (column(busy, "domain"), column(busy, "code"), column(busy, "lane")) == (1, 300, -1)


def test_numbers_that_others_chose_fit_into_varlinks_integers() -> None:
    recorder = Recorder()
    watcher = recorder.watch(None)
    for number in (0, 2**63 - 1, 2**63, 2**64 - 1):
        finish(recorder, request_of(number=number), run_ns=number)

    rows = watcher.take()["requests"]
    assert [column(row, "request") for row in rows] == [0, 2**63 - 1, -(2**63), -1]
    assert all(-(2**63) <= value < 2**63 for row in rows for value in row)


def test_the_ring_and_the_names_are_bounded_and_the_rest_is_counted() -> None:
    recorder = Recorder()
    watcher = recorder.watch(None)
    for _ in range(RING_ROWS + 10):
        finish(recorder, request_of())

    assert watcher.dropped == 10
    for number in range(RING_ROWS + 5):
        watcher.add_event("e", str(number), {})
        watcher.add_counter("c", "unit", number)

    assert watcher.dropped == 20
    rows = 0
    while watcher.waiting:
        rows += len(watcher.take()["requests"])

    assert rows == RING_ROWS
    for session in range(2, MAX_NAMES + 12):
        finish(recorder, request_of(session=session))

    assert watcher.dropped == 20 + 11


def test_an_answer_fits_into_a_message() -> None:
    recorder = Recorder()
    watcher = recorder.watch(None)
    lane = lane_of(Worker(77))
    for number in range(2 * ROWS_PER_ANSWER):
        finish(recorder, request_of(session=number, lane=lane))
        watcher.add_event("e", "x", dict.fromkeys("abcdefgh", "y"))
        watcher.add_counter("c", "unit", number)

    answer = watcher.take()
    assert len(answer["requests"]) == ROWS_PER_ANSWER
    assert len(answer["events"]) == len(answer["counters"]) == OTHERS_PER_ANSWER
    assert _values(answer) < MAX_VALUES


def _values(item: object) -> int:
    if isinstance(item, dict):
        return 1 + sum(1 + _values(value) for value in item.values())

    if isinstance(item, list | tuple):
        return 1 + sum(_values(value) for value in item)

    return 1


def test_a_counter_that_is_as_it_was_is_not_told_again() -> None:
    watcher = Watcher(None)
    for value in (1.0, 1.0, 2.0, 2.0, 1.0):
        watcher.add_counter("queue", "requests", value)

    assert [one["value"] for one in watcher.take()["counters"]] == [1.0, 2.0, 1.0]


# The stream, with a client that reads as a test wants.


class Reader:
    """What a stream needs of a call; `unsent_bytes` is what its client has not read."""

    def __init__(self, uid: int) -> None:
        self.peer = SimpleNamespace(uid=uid)
        self.connection = SimpleNamespace(unsent_bytes=0)
        self.answers: list[dict[str, Any]] = []
        self.continued: list[bool] = []

    def reply(self, parameters: dict[str, Any], *, continues: bool = False) -> None:
        self.answers.append(parameters)
        self.continued.append(continues)


def service_of(*lanes: Any) -> Any:
    pool = SimpleNamespace(lanes=lambda: list(lanes), group_of=str)
    return SimpleNamespace(pool=pool, is_operator=lambda uid: uid == 0)


def test_the_stream_of_a_user_has_the_own_workers_only() -> None:
    lanes = [lane_of(Worker(1)), lane_of(Worker(2))]
    lanes[0].group, lanes[1].group = "1000", "2000"
    lanes[1].last_end = "signal:11 SIGSEGV"

    async def scenario(uid: int) -> Reader:
        recorder = Recorder()
        tracing = Tracing(service_of(*lanes), recorder)
        tracing.counters.append(lambda: [("zone cpu", "C", 45.5)])
        reader = Reader(uid)
        loop = asyncio.get_running_loop()

        def happen() -> None:
            lanes[1].restarts += 1
            finish(recorder, request_of(uid=1000))
            finish(recorder, request_of(session=2, uid=2000))

        loop.call_later(0.2, happen)
        await tracing.stream(reader, 1)  # type: ignore[arg-type]
        assert not recorder.on
        return reader

    mine = asyncio.run(scenario(1000))
    everybody = asyncio.run(scenario(0))
    assert mine.continued[-1] is False
    assert all(mine.continued[:-1])

    def all_of(reader: Reader, table: str) -> list[Any]:
        return [one for answer in reader.answers for one in answer[table]]

    assert [row[0] for row in all_of(mine, "requests")] == [1]
    assert [row[0] for row in all_of(everybody, "requests")] == [1, 2]
    assert all_of(mine, "events") == []
    (ended,) = all_of(everybody, "events")
    assert ended["details"] == {"reason": "signal:11 SIGSEGV"}
    tracks = {one["track"] for one in all_of(mine, "counters")}
    assert tracks == {
        "queue cpu/interactive of 1000",
        "running cpu/interactive of 1000",
        "zone cpu",
    }


def test_who_does_not_read_gets_no_more_and_is_told_what_was_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("switchgear.daemon.telemetry.tracing.LAST_LIMIT_S", 0.1)

    async def scenario() -> tuple[Reader, int]:
        recorder = Recorder()
        tracing = Tracing(service_of(), recorder)
        reader = Reader(0)
        reader.connection.unsent_bytes = MAX_BEHIND_BYTES
        loop = asyncio.get_running_loop()
        sent = 3 * ROWS_PER_ANSWER

        def happen() -> None:
            for _ in range(sent):
                finish(recorder, request_of())

        loop.call_later(0.1, happen)
        await tracing.stream(reader, 1)  # type: ignore[arg-type]
        return reader, sent

    reader, sent = asyncio.run(scenario())
    first, last = reader.answers
    assert first["requests"] == []
    assert len(last["requests"]) == ROWS_PER_ANSWER
    assert last["dropped"] == sent - ROWS_PER_ANSWER


def test_a_stream_that_is_given_up_stops_the_recorder() -> None:
    async def scenario() -> bool:
        recorder = Recorder()
        tracing = Tracing(service_of(), recorder)
        task = asyncio.create_task(tracing.stream(Reader(0), 60))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert recorder.on
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return recorder.on

    assert asyncio.run(scenario()) is False
