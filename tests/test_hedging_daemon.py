"""Requests in two places, in a real daemon: an NPU of the test's pace, beside the CPU."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import raw_client
from c_client_program import Driver, build
from daemon_process import DaemonProcess
from held_worker import held
from npu_rig import Rig, wait_for_device
from small_network import SIDE, small_network

from switchgear.backends.generate.state import accumulator
from switchgear.client import Client, Session, aio, connect
from switchgear.client.control import Control
from switchgear.ipc.record import Reason

pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]

# In time wherever it runs, and so dear on the CPU that the NPU is chosen.
DEADLINE_MS = 10_000.0
THRIFTY = 'policy = "max_efficiency"\nbusy_w = { cpu = 1e6 }'
WHERE = ("npu", "cpu")
SLOW_US = 300_000
# A worker that is held for as long as a test needs it does not hang.
PATIENT = "[workers]\nhang_s = 60.0\n"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("rig"))


@pytest.fixture(scope="module")
def daemon(rig: Rig) -> Iterator[DaemonProcess]:
    config = PATIENT + rig.config.replace('policy = "prefer_npu"', THRIFTY)
    environment = {"SWITCHGEAR_PREPARE__ENABLED": "true"}
    with DaemonProcess(config=config, environment=environment) as process:
        with connect(process.socket) as client:
            client.load_model(small_network(), "net")
            client.load_model(accumulator(), "sum")
            model = client.prepare_model("net")
            assert model.pairs[0].state == "ready", model.pairs[0].reason
            wait_for_device(client, "npu")

        yield process


@pytest.fixture
def client(daemon: DaemonProcess, rig: Rig) -> Iterator[Client]:
    rig.pace(0)
    with connect(daemon.socket) as client:
        yield client


def frame() -> dict[str, Any]:
    draw = np.random.default_rng(3)
    return {"image": draw.uniform(-1, 1, (1, SIDE, SIDE, 3)).astype(np.float32)}


def warm(session: Session, inputs: dict[str, Any]) -> None:
    """Until the NPU is chosen; the CPU answers while it loads the model, or outruns it."""
    while not _on_npu(session, inputs):
        pass


def _on_npu(session: Session, inputs: dict[str, Any]) -> bool:
    result = session.run(inputs, deadline_ms=DEADLINE_MS)
    return result.backend == "npu" or result.reason == "hedged"


def batch(session: Session, inputs: dict[str, Any]) -> str:
    """The reason of a batch frame's reply."""
    request = session.submit(inputs, deadline_ms=DEADLINE_MS, priority="batch")
    return request.result().reason


def answered(client: Client) -> int:
    return int(client.status()["counters"]["requests_answered"])


def idle(client: Client) -> None:
    """Until no worker runs anything."""
    while any(worker["running"] for worker in client.status()["workers"]):
        pass


@contextmanager
def held_npu(client: Client) -> Iterator[int]:
    """The NPU's worker stands still, whatever the pace of this machine; its pid."""
    (pid,) = (w["pid"] for w in client.status()["workers"] if w["backend"] == "npu")
    with held(pid):
        yield pid


def outcomes(client: Client) -> float:
    """All requests that the metrics have counted."""
    control = Control(client.path, 5.0)
    try:
        text = str(control.call("GetMetrics").parameters["text"])
    finally:
        control.close()

    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("switchgear_requests_total{")
    )


def test_the_cpu_answers_for_a_slow_npu(client: Client) -> None:
    inputs = frame()
    with client.open_session("net", backends=WHERE, hedge=True) as session:
        warm(session, inputs)
        expected = session.run(inputs, deadline_ms=DEADLINE_MS, copy=True)
        idle(client)
        with held_npu(client):
            result = session.run(inputs, deadline_ms=DEADLINE_MS, copy=True)

        assert (result.backend, result.reason) == ("cpu", "hedged")
        assert result.tried == ()
        for name, value in expected.items():
            np.testing.assert_allclose(result[name], value, atol=1e-2)

        (decision,) = client.explain(1)
        assert "npu/fp32 chosen" in decision["text"]
        assert "a copy runs there" in decision["text"]
        verdict = decision["record"]["verdict"]
        assert decision["record"]["inputs"]["rows"][verdict["hedge"]][0] == "cpu/auto"
        idle(client)


def test_without_the_option_nothing_runs_twice(client: Client, rig: Rig) -> None:
    inputs = frame()
    with client.open_session("net", backends=WHERE) as session:
        warm(session, inputs)
        rig.pace(SLOW_US)
        result = session.run(inputs, deadline_ms=DEADLINE_MS)
        assert result.backend == "npu"
        (decision,) = client.explain(1)
        assert decision["record"]["verdict"]["hedge"] == -1
        rig.pace(0)


def test_each_request_counts_once(client: Client) -> None:
    inputs = frame()
    with client.open_session("net", slots=16, backends=WHERE, hedge=True) as session:
        warm(session, inputs)
        idle(client)
        before = answered(client), outcomes(client)
        sequence = client.explain(1)[0]["record"]["sequence"]
        for _ in range(10):
            requests = [session.submit(inputs, deadline_ms=DEADLINE_MS) for _ in range(16)]
            assert all(request.result().backend in WHERE for request in requests)

        idle(client)
        assert (answered(client), outcomes(client)) == (before[0] + 160, before[1] + 160)
        assert client.explain(1)[0]["record"]["sequence"] == sequence + 160


def test_a_worker_that_dies_with_a_copy_costs_nothing(client: Client) -> None:
    inputs = frame()
    with client.open_session("net", slots=4, backends=WHERE, hedge=True) as session:
        warm(session, inputs)
        idle(client)
        with held_npu(client) as pid:
            first = session.run(inputs, deadline_ms=DEADLINE_MS)
            assert first.reason == "hedged"
            (npu,) = (w for w in client.status()["workers"] if w["pid"] == pid)
            assert npu["running"] == 1, "the other copy goes on"
            os.kill(pid, signal.SIGKILL)

        for _ in range(20):
            result = session.run(inputs, deadline_ms=DEADLINE_MS)
            assert result.backend in WHERE


def test_a_frame_of_another_priority_has_its_copy_in_that_lane(
    client: Client, rig: Rig
) -> None:
    inputs = frame()
    with client.open_session("net", backends=WHERE, hedge=True) as session:
        warm(session, inputs)
        rig.pace(SLOW_US)
        # The batch lane's worker starts at its first need, and the NPU answers meanwhile.
        while batch(session, inputs) != "hedged":
            pass

        lanes = {worker["lane"] for worker in client.status()["workers"]}
        assert "batch" in lanes
        rig.pace(0)
        idle(client)


def test_a_session_with_a_state_never_hedges(client: Client) -> None:
    with client.open_session("sum", hedge=True) as session:
        one = np.ones(4, np.float32)
        totals = [session.run({"x": one}, copy=True)["total"][0] for _ in range(5)]
        assert totals == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("model", "hedge", "slots"), [("net", False, 4), ("net", True, 6), ("sum", True, 4)]
)
def test_a_session_that_hedges_has_twice_as_many_spare_slots(
    daemon: DaemonProcess, model: str, hedge: bool, slots: int
) -> None:
    with (
        raw_client.Control(daemon.socket) as control,
        control.open_session(model, hedge=hedge) as session,
    ):
        assert session.reply["output_slots"] == slots


def test_the_same_with_asyncio(daemon: DaemonProcess, client: Client, rig: Rig) -> None:
    inputs = frame()
    with client.open_session("net", backends=WHERE) as session:
        warm(session, inputs)

    async def main() -> None:
        async with (
            await aio.connect(daemon.socket) as asynchronous,
            await asynchronous.open_session("net", backends=WHERE, hedge=True) as session,
        ):
            reasons = set()
            rig.pace(SLOW_US)
            while "hedged" not in reasons:
                result = await session.run(inputs, deadline_ms=DEADLINE_MS)
                reasons.add(result.reason)

    asyncio.run(main())
    rig.pace(0)


def test_the_same_in_c(daemon: DaemonProcess, client: Client, rig: Rig) -> None:
    with client.open_session("net", backends=WHERE) as session:
        warm(session, frame())

    with Driver(build("driver", "-O2")) as driver:
        driver.do("connect", daemon.socket)
        driver.do("open", "net", "backend=npu", "backend=cpu", "hedge=1")
        rig.pace(SLOW_US)
        answer = ""
        while f" reason {int(Reason.HEDGED)} " not in answer:
            # Whatever lies in the slot will do.
            driver.do("submit", 0, int(DEADLINE_MS * 1000))
            answer = driver.do("wait", 0, int(DEADLINE_MS))

        driver.do("close")

    rig.pace(0)
