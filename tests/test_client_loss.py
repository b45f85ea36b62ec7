"""The blocking client when the daemon, the session or its state goes away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_daemon import FakeDaemon
from fake_session import FakeSession, Holding, collected, model_bytes, wait_until

from switchgear.client import Client, Session, connect
from switchgear.ipc.errors import (
    BadModel,
    ConnectionLost,
    NotRunning,
    StateLost,
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
