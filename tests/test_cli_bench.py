"""`switchgear bench`, against a daemon. How fast it is, is not tested here: what is told is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cli_command import PREFIX, environment, switchgear, switchgear_json
from daemon_process import DaemonProcess
from terminal import Terminal

from switchgear.backends import generate
from switchgear.client import connect
from switchgear.client.models import Tensor
from switchgear.daemon.cli.bench import Local, Side, percentile
from switchgear.daemon.cli.bench_client import make_inputs

# Each command is a new process: on a busy machine that takes its time.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(config="[cpu]\nthreads = 1\n") as running:
        yield running


def test_both_sides_in_the_same_run(daemon: DaemonProcess) -> None:
    told = switchgear_json(
        *("bench", "generated:slow_100_ms", "--seconds", "1", "--threads", "1"),
        *("--socket", daemon.socket),
    )
    for side in (told["daemon"], told["in_process"]):
        assert side["frames"] >= 2, "one in each window at least"
        assert 0 < side["p50_ms"] <= side["p90_ms"] <= side["p99_ms"] <= side["max_ms"]

    # The run is part of the round trip, and both sides ran the same model.
    assert told["worker_run_p50_ms"] > 1
    assert told["overhead_ms"] == told["daemon"]["p50_ms"] - told["worker_run_p50_ms"]
    ratio = told["daemon"]["p50_ms"] / told["in_process"]["p50_ms"]
    assert told["p50_over_in_process"] == pytest.approx(ratio)
    assert (told["threads"], told["backend"]) == (1, "cpu")


def test_clients_each_have_a_session(daemon: DaemonProcess, tmp_path: Path) -> None:
    with connect(daemon.socket) as client:
        before = client.status()["counters"]
        file = tmp_path / "pair.tflite"
        file.write_bytes(generate.two_inputs())
        done = switchgear(
            *("bench", file, "--seconds", "0.4", "--clients", "3", "--slots", "2"),
            *("--socket", daemon.socket),
        )
        assert done.returncode == 0, done.stderr
        after = client.status()

    lines = done.stdout.splitlines()
    assert lines[0] == "pair on cpu, 2 frames in flight of each client"
    frames = int(lines[2].split("clients")[1].split()[0])
    assert lines[2].startswith("  daemon, 3 clients")
    assert lines[3].startswith("  in-process, ")
    assert max(map(len, lines)) <= 80
    counted = after["counters"]
    assert counted["sessions_opened"] - before["sessions_opened"] == 3
    # Each frame was answered; those of the warm-up are not in the table.
    assert counted["requests_answered"] - before["requests_answered"] > frames > 0
    assert after["sessions"] == [], "the clients have gone"


def test_a_loaded_model_has_no_in_process_side(daemon: DaemonProcess) -> None:
    with connect(daemon.socket) as client:
        client.load_model(generate.identity(), "same")

    common = ("bench", "same", "--seconds", "0.1", "--socket", daemon.socket)
    assert switchgear_json(*common)["in_process"] is None
    assert "in-process: give the .tflite file" in switchgear(*common).stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--clients", "0"), "--clients needs a number above 0"),
        (("--slots", "17"), "--slots goes from 1 to 16"),
        (("--seconds", "nan"), "--seconds needs a number above 0"),
        (("--seconds", "inf"), "--seconds needs a number above 0"),
        (("--threads", "0"), "--threads needs a number above 0"),
    ],
)
def test_wrong_usage(arguments: tuple[str, str], sentence: str) -> None:
    done = switchgear("bench", "generated:identity", *arguments, "--socket", "/nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr


def test_more_clients_than_a_user_may_have() -> None:
    with DaemonProcess(config="[limits]\nsessions_per_user = 1\n") as daemon:
        done = switchgear(
            "bench", "generated:identity", "--clients", "2", "--socket", daemon.socket
        )
        assert done.returncode == 1
        assert "a client failed: QuotaExceeded: " in done.stderr


def test_an_interrupt_ends_the_clients_too(daemon: DaemonProcess) -> None:
    command = [*PREFIX, "bench", "generated:identity", "--seconds", "60"]
    with Terminal([*command, "--socket", str(daemon.socket)], environment()) as terminal:
        terminal.read_until("identity: running")
        terminal.interrupt()
        assert terminal.end() == 130

    assert "%" in terminal.output, "a bar on a terminal"
    assert "Traceback" not in terminal.output


def test_a_client_alone_reports_its_error() -> None:
    arguments = '{"socket": "/nowhere.sock", "model": "x", "slots": 1}'
    done = subprocess.run(
        [
            *(sys.executable, "-m", "switchgear.daemon.cli.bench_client"),
            *("--json-args", arguments),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert '"error": "NotRunning"' in done.stdout


def test_in_process_runs_the_same_frames(tmp_path: Path) -> None:
    path = tmp_path / "pair.tflite"
    path.write_bytes(generate.two_inputs())
    side = Side()
    values = {"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)}
    Local(str(path), 1).window(values, side, 0.01)
    assert side.summary()["frames"] == len(side.latencies_ms) > 0
    assert side.seconds >= sum(side.latencies_ms) / 1000 * 0.99


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, p) for p in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert percentile([7.0], 50) == percentile([7.0], 99) == 7


def test_inputs_are_the_same_in_each_process() -> None:
    tensors = [
        Tensor(dtype, dtype, (2, 3), (2, 3), 0)
        for dtype in ("float32", "float16", "int8", "uint8", "int32", "bool")
    ]
    first, second = make_inputs(tensors), make_inputs(tensors)
    for tensor in tensors:
        value = first[tensor.name]
        assert (str(value.dtype), value.shape) == (tensor.dtype, tensor.shape)
        assert np.array_equal(value, second[tensor.name])

    assert np.ptp(first["float32"]) > 0
    assert not first["int32"].any()
