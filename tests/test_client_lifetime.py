"""The blocking client among threads and processes, and what it leaves behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_daemon import FakeDaemon
from fake_session import FakeSession, Holding, collected, model_bytes, wait_until

from switchgear.client import Client, Session, connect
from switchgear.ipc.errors import (
    BadInput,
    ConnectionLost,
    SwitchgearError,
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
    with connect(daemon.path, reconnect_s=15) as connected:
        yield connected


@pytest.fixture
def session(client: Client) -> Iterator[Session]:
    with client.open_session(client.load_model(model_bytes(), name="add one")) as opened:
        yield opened


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
                request.result(timeout_s=15)

            if session.run(input=ONES, timeout_s=15)["output"][0] == 2:
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
