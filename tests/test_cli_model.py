"""`switchgear model`, against a daemon."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_command import switchgear, switchgear_json
from daemon_process import DaemonProcess
from fake_daemon import FakeDaemon
from fake_session import model_bytes

from switchgear.backends import generate
from switchgear.client import connect
from switchgear.client.models import LoadStep
from switchgear.daemon.cli.model import timeline
from switchgear.daemon.cli.models import default_name, generators, is_file

# Each command is a new process: on a busy machine that takes its time.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(config="[cpu]\nthreads = 1\n") as running:
        yield running


def test_load_list_and_unload(daemon: DaemonProcess, tmp_path: Path) -> None:
    file = tmp_path / "my sums.tflite"
    file.write_bytes(generate.two_inputs())
    done = switchgear("model", "load", file, "--socket", daemon.socket)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("my_sums serves; ")
    assert "  in   a: float32 [4]" in lines
    assert "  out  product: float32 [4]" in lines
    assert "  ADD, MUL" in lines
    steps = [line.split()[0] for line in lines[lines.index("  ADD, MUL") + 2 :]]
    assert steps[:3] == ["copy", "hash", "validate"]
    assert max(map(len, lines)) <= 80
    # Which phases it sees depends on how soon it comes to ask.
    assert all(re.fullmatch(r"loading my_sums: \w+", s) for s in done.stderr.splitlines())
    assert "\r" not in done.stderr

    (listed,) = switchgear_json("model", "list", "--socket", daemon.socket)
    assert listed["name"] == "my_sums"
    assert listed["size_bytes"] == file.stat().st_size
    assert [tensor["name"] for tensor in listed["inputs"]] == ["a", "b"]
    row = switchgear("model", "list", "--socket", daemon.socket).stdout.splitlines()[1]
    assert row.split()[:2] == ["my_sums", listed["hash"][:8]]

    done = switchgear("model", "unload", listed["hash"][:8], "--socket", daemon.socket)
    assert (done.returncode, done.stdout) == (0, "my_sums is unloaded\n")
    done = switchgear("model", "list", "--socket", daemon.socket)
    assert (done.returncode, done.stdout) == (0, "")
    assert "no model is loaded" in done.stderr


def test_each_phase_of_a_load_is_told(tmp_path: Path) -> None:
    """Not on a terminal: a line for each phase, and nothing that moves."""
    file = tmp_path / "sums.tflite"
    file.write_bytes(model_bytes())
    with FakeDaemon(tmp_path / "fake.sock") as fake:
        done = switchgear("model", "load", file, "--socket", fake.path)

    assert (done.returncode, done.stderr) == (0, "loading sums: copy\n")


def test_generated_models_load_by_name(daemon: DaemonProcess) -> None:
    model = switchgear_json(
        "model", "load", "generated:two_inputs", "--name", "pair", "--socket", daemon.socket
    )
    assert model["name"] == "pair"
    assert model["operators"] == {"ADD": 1, "MUL": 1}
    assert model["backends"] == {"cpu": "ready"}
    assert switchgear("model", "unload", "pair", "--socket", daemon.socket).returncode == 0


def test_steps_of_a_load_follow_each_other(daemon: DaemonProcess) -> None:
    model = switchgear_json("model", "load", "generated:slow_100_ms", "--socket", daemon.socket)
    steps = model["timeline"]
    names = ["copy", "hash", "validate", "start worker", "compile", "first run"]
    assert [step["name"] for step in steps] == names
    for before, after in itertools.pairwise(steps):
        # Each is rounded down to microseconds.
        end_ms = before["start_ms"] + before["duration_ms"]
        assert after["start_ms"] >= end_ms - 0.01, (before, after)

    assert steps[-1]["duration_ms"] > 1


def test_check_runs_it_on_each_backend(daemon: DaemonProcess) -> None:
    with connect(daemon.socket) as client:
        client.load_model(generate.slow(5), "slowish")
        names = [backend["name"] for backend in client.status()["backends"]]

    told = switchgear_json("model", "check", "slowish", "--socket", daemon.socket)
    assert [outcome["backend"] for outcome in told["backends"]] == names
    cpu = told["backends"][names.index("cpu")]
    assert cpu["runs"] is True
    # 5 ms on the machine that the hint was made for: no device is a hundred times faster.
    assert 0.05 < cpu["run_ms"] <= cpu["total_ms"]
    text = switchgear("model", "check", "slowish", "--socket", daemon.socket).stdout
    assert "BACKEND  RUNS" in text
    assert "cpu      yes" in text


def test_a_model_in_use_is_unloaded_by_force_only(daemon: DaemonProcess) -> None:
    with connect(daemon.socket) as client:
        client.load_model(generate.identity(), "used")
        with client.open_session("used"):
            refused = switchgear("model", "unload", "used", "--socket", daemon.socket)
            assert refused.returncode == 1
            assert "ModelInUse" in refused.stderr
            forced = switchgear("model", "unload", "used", "--force", "--socket", daemon.socket)
            assert forced.returncode == 0, forced.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (("load", "generated:nothing"), 2, "no generated model 'nothing'; there are: accumul"),
        (("load", "/nowhere.tflite"), 1, "cannot open the model /nowhere.tflite: No such file"),
        (("load", "generated:identity", "--name", "a b"), 2, "BadRequest: a name has 1 to 128"),
        (("check", "stranger"), 1, "UnknownModel: no model 'stranger' is loaded"),
        (("unload", "stranger"), 1, "UnknownModel: no model 'stranger' is loaded"),
        (("unload",), 2, "the following arguments are required: MODEL"),
        ((), 2, "the following arguments are required: VERB"),
    ],
)
def test_mistakes(
    daemon: DaemonProcess, arguments: tuple[str, ...], status: int, sentence: str
) -> None:
    options = ("--socket", daemon.socket) if arguments else ()
    done = switchgear("model", *arguments, *options)
    assert sentence in done.stderr
    assert done.returncode == status
    assert done.stdout == ""


def test_a_text_file_is_no_model(daemon: DaemonProcess, tmp_path: Path) -> None:
    text = tmp_path / "notes.tflite"
    text.write_text("this is no model\n" * 100)
    told = switchgear_json("model", "load", text, "--socket", daemon.socket, status=1)
    assert (told["error"], told["code"]) == ("BadModel", 107)
    assert told["message"]


@pytest.mark.parametrize(
    "arguments", [("model", "list"), ("status",), ("infer", "x"), ("bench", "x")]
)
def test_without_a_daemon(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    path = tmp_path / "none.sock"
    done = switchgear(*arguments, "--socket", path)
    assert done.returncode == 1
    assert str(path) in done.stderr
    assert "start one with `switchgear serve`" in done.stderr
    assert done.stdout == ""


def test_every_generated_model_has_bytes() -> None:
    for name, make in generators().items():
        assert make()[4:8] == b"TFL3", name


def test_names_from_files() -> None:
    assert default_name("/a/face short.tflite") == "face_short"
    assert default_name("generated:slow_100_ms") == "slow_100_ms"
    assert default_name("/a/.tflite") == "tflite"
    assert default_name("/a/---") == "model"
    assert is_file("./face")
    assert is_file("face.tflite")
    assert not is_file("face")


def test_timeline_places_steps_in_the_whole() -> None:
    text = timeline([LoadStep("copy", 0.0, 10.0), LoadStep("validate", 10.0, 30.0)])
    assert text.splitlines()[1:] == [
        "  copy       0.00    10.00  ######..................",
        "  validate  10.00    30.00  ......##################",
    ]
    assert timeline([]).split() == ["STEP", "AT", "MS", "TOOK", "MS"]
