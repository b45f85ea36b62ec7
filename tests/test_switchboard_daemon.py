"""The loop in real processes: zones that heat, frames that slow down, where they go then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_command import switchgear, switchgear_json
from daemon_process import DaemonProcess
from held_worker import held
from npu_rig import Rig, wait_for_device, wait_for_reading, wait_for_temperature
from preparing_faults import workers
from random_frame import frame
from small_network import small_network

from switchgear.client import Client, Result, Session, connect
from switchgear.ipc.errors import BadRequest, DeadlineExceeded, NoBackend, PermissionDenied

pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]

# Of the field report's rules: so many frames of over so long.
SLOW_FRAMES = 3
SLOW_MS = 200.0


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("rig"))


@pytest.fixture(scope="module")
def client(rig: Rig) -> Iterator[Client]:
    environment = {"SWITCHGEAR_PREPARE__ENABLED": "true"}
    with (
        DaemonProcess(config=rig.config, environment=environment) as process,
        connect(process.socket) as client,
    ):
        client.load_model(small_network(), "net")
        model = client.prepare_model("net")
        assert model.pairs[0].state == "ready", model.pairs[0].reason
        wait_for_device(client, "npu")
        yield client


def test_every_choice_is_explained(client: Client) -> None:
    with client.open_session("net", backends=["npu", "cpu"]) as session:
        inputs = frame(client.describe("net"))
        while session.run(inputs).backend != "npu":
            pass

    (newest,) = client.explain(1)
    assert "npu/fp32 chosen" in newest["text"]
    assert newest["record"]["verdict"]["chosen"] >= 0
    assert client.explain(3, session=newest["session"])[-1]["request"] == newest["request"]
    assert client.explain(1, session=2**31) == []


def test_a_dump_is_replayed_to_the_same_choices(client: Client, tmp_path: Path) -> None:
    with client.open_session("net", backends=["npu", "cpu"]) as session:
        inputs = frame(client.describe("net"))
        for _ in range(3):
            session.run(inputs)

    file = tmp_path / "decisions"
    dump = switchgear("explain", "--last", "20", "--dump", file, "--socket", client.path)
    assert (dump.returncode, len(file.read_text().splitlines()) > 1) == (0, True)
    again = switchgear_json("explain", "--replay", file)
    assert again["different"] == []
    assert again["decisions"] > 0
    changed = file.read_text().replace('"chosen": 0', '"chosen": 1')
    file.write_text(changed.replace('"chosen": -1', '"chosen": 1'))
    assert switchgear("explain", "--replay", file).returncode == 1


def test_the_operators_word(client: Client) -> None:
    from switchgear.client.control import Control

    control = Control(client.path, 5.0)
    try:
        control.call("Operate", {"level": "backend", "name": "npu", "word": "isolated"})
        with client.open_session("net", backends=["npu", "cpu"]) as session:
            inputs = frame(client.describe("net"))
            assert {session.run(inputs).backend for _ in range(5)} == {"cpu"}

        with (
            client.open_session("net", backends=["npu"], strict=True) as session,
            pytest.raises(NoBackend),
        ):
            session.run(inputs)

        control.call("Operate", {"level": "backend", "name": "npu", "word": "auto"})
        with pytest.raises(BadRequest):
            control.call("Operate", {"level": "backend", "name": "none", "word": "auto"})
    except PermissionDenied:
        pytest.fail("the daemon's own user is an operator")
    finally:
        control.close()

    heard: list[dict[str, Any]] = []
    client.watch_events(heard.append, 0.0)
    # A watch ends its connection: the next test finds one, as this one did.
    client.info()
    assert [e["after"] for e in heard if e["kind"] == "operator"] == ["isolated", "auto"]


def test_a_policy_that_does_not_exist_is_refused(client: Client) -> None:
    with pytest.raises(BadRequest, match="max_performance"):
        client.open_session("net", policy="fastest")


def hurry(session: Session, inputs: dict[str, Any]) -> Result | None:
    """None where it expired."""
    try:
        return session.run(inputs, deadline_ms=400.0)
    except DeadlineExceeded:
        return None


# The last one: what it trips stays open for two minutes.
def test_heat_and_slow_frames_send_the_next_one_elsewhere(rig: Rig, client: Client) -> None:
    model = client.describe("net")
    inputs = frame(model)
    with client.open_session(
        model, backends=["npu", "cpu"], slow_ms=60.0, recover_ms=30.0
    ) as session:
        while session.run(inputs).backend != "npu":
            pass

        # Slow, but cool: it stays, whatever a session's own limit says.
        rig.pace(80_000)
        slow = [session.run(inputs) for _ in range(6)]
        assert {result.backend for result in slow} <= {"npu", "cpu"}
        rig.temperature(72.0)
        wait_for_temperature(client, 66.0)
        results = []
        for _ in range(200):
            results.append(session.run(inputs))
            if results[-1].backend == "cpu":
                break

        assert results[-1].backend == "cpu", "it never left a hot and slow device"
        assert results[-1].temperature_age_ms is None or results[-1].temperature_age_ms >= 0
        # Closed is not gone: it has what the busy CPU does not answer in time.
        rig.pace(0)
        (cpu,) = workers(client, "cpu")
        with held(cpu["pid"]):
            patient = session.submit(inputs)
            while (hurried := hurry(session, inputs)) is None:
                pass

            assert hurried.backend == "npu"

        assert patient.result().backend == "cpu"

    device = wait_for_reading(client, "npu", "measured")
    assert device["temperature_c"] > 65.0
    assert (device["trip_c"], device["recover_c"]) == (65.0, 58.0)
    assert device["zones"] == ["npu-thermal"]


def test_the_field_reports_sequence_in_a_real_daemon(tmp_path: Path) -> None:
    """66 C and three frames of over 200 ms switch the fourth; 57 C and ten good ones bring the
    probe, and that brings it back."""
    rig = Rig(tmp_path)
    config = rig.config + '[protocol]\nmode = "report"\n'
    environment = {"SWITCHGEAR_PREPARE__ENABLED": "true"}
    with (
        DaemonProcess(config=config, environment=environment) as process,
        connect(process.socket) as client,
    ):
        client.load_model(small_network(), "net")
        model = client.prepare_model("net")
        wait_for_device(client, "npu")
        inputs = frame(model)
        with client.open_session(model, backends=["npu", "cpu"]) as session:
            # One that the machine held up would be the first of the three.
            while (quick := session.run(inputs)).backend != "npu" or quick.run_ms > SLOW_MS:
                pass

            rig.temperature(66.0)
            wait_for_temperature(client, 65.5)
            rig.pace(210_000)
            slow_ms: list[float] = []
            while len(slow_ms) <= SLOW_FRAMES:
                begun_s = time.monotonic()
                if session.run(inputs).backend == "cpu":
                    break

                slow_ms.append((time.monotonic() - begun_s) * 1000)

            assert len(slow_ms) <= SLOW_FRAMES
            # One that is held up counts again for each time that it is as late.
            assert sum(int(ms / SLOW_MS) for ms in slow_ms) >= SLOW_FRAMES
            rig.pace(0)
            rig.temperature(50.0)
            wait_for_temperature(client, 57.5, falling=True)
            states: list[str] = []
            while "ramping" not in states and "closed" not in states[1:]:
                session.run(inputs)
                heard: list[dict[str, Any]] = []
                client.watch_events(heard.append, 0.0)
                states = [e["after"] for e in heard if e["level"] == "device"]

            client.info()

    assert states[0] == "open"
    assert "half_open" in states
