"""Models through the daemon on the test delegate: prepared behind the CPU; bad delegates."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import native_build
import numpy as np
import pytest
from daemon_process import DaemonProcess
from random_frame import frame
from small_network import small_network

from switchgear.client import Client, Model, Pair, connect
from switchgear.ipc.errors import NoBackend, UnsupportedModel

# What prepares a model runs when nobody else wants the CPU.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]

ENABLED = {"SWITCHGEAR_PREPARE__ENABLED": "true"}
# This NPU has no sensor: one frame in which the machine stood still would close it for minutes.
NEVER_TRIPS = "[protocol]\ndry_run = true"


def configuration(more: str = "", **options: str) -> str:
    rows = "\n".join(f'{name} = "{value}"' for name, value in options.items())
    return f"""
[prepare]
backends = ["npu"]
{more}
[npu]
delegate = "{native_build.delegate()}"
[npu.delegate_options]
{rows}
"""


@contextmanager
def daemon(more: str = "", **options: str) -> Iterator[tuple[DaemonProcess, Client]]:
    with (
        DaemonProcess(config=configuration(more, **options), environment=ENABLED) as process,
        connect(process.socket) as client,
    ):
        yield process, client


def prepared(client: Client) -> tuple[Model, Pair]:
    """The small network, once it is decided whether the NPU serves it."""
    client.load_model(small_network(), "net")
    model = client.prepare_model("net", ["npu"])
    (pair,) = [pair for pair in model.pairs if pair.backend == "npu"]
    return model, pair


def the_cpu_still_serves(client: Client, model: Model) -> None:
    with client.open_session(model) as session:
        for seed in range(3):
            result = session.run(frame(model, seed))
            assert (result.backend, result.tried) == ("cpu", ())


@pytest.fixture(scope="module")
def good() -> Iterator[tuple[Client, Model, Pair]]:
    with daemon(NEVER_TRIPS) as (_, client):
        model, pair = prepared(client)
        yield client, model, pair


def test_the_check_holds_and_is_told_with_its_figures(good: tuple[Client, Model, Pair]) -> None:
    _, _, pair = good
    assert (pair.state, pair.precision, pair.reason) == ("ready", "fp32", "")
    figures = pair.figures
    assert figures["inputs"] >= 8
    assert 0 <= figures["error"] <= figures["tolerance"] == 1e-3
    assert figures["coverage"]["nodes"] == 4
    assert figures["run_us"] >= 0
    assert figures["warm_load_us"] > 0
    names = [step.name for step in pair.timeline]
    assert names.index("reference") < names.index("compile") < names.index("check")


def test_the_answers_are_those_of_the_cpu(good: tuple[Client, Model, Pair]) -> None:
    client, model, _ = good
    with (
        client.open_session(model, backends=["npu"], strict=True) as on_npu,
        client.open_session(model, backends=["cpu"], strict=True) as on_cpu,
    ):
        for seed in range(5):
            inputs = frame(model, seed)
            one = on_npu.run(inputs, copy=True)
            two = on_cpu.run(inputs, copy=True)
            assert (one.backend, one.precision, one.reason) == ("npu", "fp32", "requested")
            assert two.backend == "cpu"
            for name, value in two.items():
                np.testing.assert_allclose(one[name], value, atol=1e-3 * np.abs(value).max())


def test_the_lowest_precision_is_kept(good: tuple[Client, Model, Pair]) -> None:
    client, model, _ = good
    with client.open_session(model, backends=["npu"], strict=True, precision="fp32") as session:
        assert session.run(frame(model, 1)).precision == "fp32"


def test_a_worker_that_is_killed_costs_one_retry(good: tuple[Client, Model, Pair]) -> None:
    client, model, _ = good
    with client.open_session(model, backends=["npu", "cpu"], policy="prefer_npu") as session:
        inputs = frame(model, 1)
        while session.run(inputs).backend != "npu":
            pass

        (pid,) = [w["pid"] for w in client.status()["workers"] if w["backend"] == "npu"]
        os.kill(pid, signal.SIGSTOP)
        pending = session.submit(inputs)
        os.kill(pid, signal.SIGKILL)
        result = pending.result()
        # It is answered, from wherever; and nothing is lost after it.
        assert result.backend in ("npu", "cpu")
        for seed in range(5):
            session.run(frame(model, seed))


@pytest.mark.parametrize("mode", ["lie", "fail_create", "fail_prepare", "fail_invoke"])
def test_a_delegate_that_fails_says_why(mode: str) -> None:
    with daemon(mode=mode) as (_, client):
        model, pair = prepared(client)
        # Its own known-answer run fails already: the backend is not there, for any model.
        assert pair.state == "absent"
        assert "delegate" in pair.reason
        if mode == "lie":
            assert "wrong numbers" in pair.reason

        with pytest.raises(NoBackend, match="delegate"):
            client.open_session(model, backends=["npu"], strict=True)

        the_cpu_still_serves(client, model)


def test_a_delegate_that_takes_too_little_is_refused_with_both_figures() -> None:
    with daemon(mode="add_only") as (_, client):
        model, pair = prepared(client)
        assert pair.state in ("unsupported", "absent")
        with pytest.raises((UnsupportedModel, NoBackend)):
            client.open_session(model, backends=["npu"], strict=True)

        the_cpu_still_serves(client, model)


def test_a_delegate_that_kills_the_process_is_not_asked_a_third_time() -> None:
    with daemon(mode="abort_prepare") as (_, client):
        model, pair = prepared(client)
        assert pair.state in ("failed", "refused", "absent")
        assert "signal" in pair.reason or "SIGABRT" in pair.reason
        the_cpu_still_serves(client, model)
        again = client.prepare_model("net", ["npu"], again=True).pairs[0]
        assert again.state in ("refused", "absent"), again
        the_cpu_still_serves(client, model)


def test_a_delegate_that_hangs_is_ended_at_the_limit() -> None:
    with daemon("time_limit_s = 4.0", mode="hang") as (_, client):
        model, pair = prepared(client)
        assert pair.state in ("failed", "absent")
        assert "4 s" in pair.reason or "no known answer" in pair.reason
        the_cpu_still_serves(client, model)
