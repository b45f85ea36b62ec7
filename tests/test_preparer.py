"""The preparer: what it says of backends that are right, lie, fail, crash and hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from devices import require_opencl, require_vulkan
from preparer_process import (
    FAKE,
    PREPARER,
    Prepared,
    command,
    environment,
    prepare,
    prepare_here,
)
from worker_under_test import memory_file

from switchgear.backends import generate
from switchgear.backends.crash_marker import CrashMarkers
from switchgear.backends.driver_caches import environment as driver_caches
from switchgear.backends.driver_caches import make_folders

pytestmark = [pytest.mark.engine]

STEPS = ["open", "reference", "compile", "first run", "check", "warm"]


@cache
def model() -> bytes:
    return generate.two_inputs(64)


def sound(result: dict[str, Any]) -> bool:
    """Whether a result claims that the pair may serve."""
    return bool(result["ok"])


def test_a_sound_backend(tmp_path: Path) -> None:
    folder = tmp_path / "not made yet" / "model"
    done = prepare(model(), f"--cache={folder}", fault_fp16="half")
    result = done.said
    assert done.returncode == 0
    assert done.names == STEPS
    assert sorted(step["us"] for step in done.steps) == [step["us"] for step in done.steps]
    assert done.steps[2]["precision"] == "fp16"
    assert sound(result)
    assert (result["backend"], result["engine"]) == ("fake", "fake-engine")
    assert result["identity"] == {"device": "fake", "driver": "fake 1"}
    assert (result["asked"], result["precision"]) == ("auto", "fp16")
    assert 0 < result["error"] <= result["tolerance"] == pytest.approx(0.01)
    assert 60 < result["snr_db"] < 90
    assert result["rule"] == "fp16: 0.01 of the peak"
    assert [each["name"] for each in result["outputs"]] == ["sum", "product"]
    assert result["inputs"] == 8
    assert result["coverage"] == {"nodes": 9, "nodes_total": 10, "arithmetic": 0.95}
    assert result["warm_runs"] >= 5
    assert result["load_us"] > 0
    assert result["first_run_us"] > 0
    assert 0 <= result["fastest_us"] <= result["run_us"] <= result["first_run_us"] * 100
    assert result["cpu_us"] > 0
    assert result["cache_bytes"] >= 5000
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_cpu_backend_holds_against_its_other_kernels() -> None:
    done = prepare(generate.mobilenet_v1(quantised=True), backend="cpu", factory="", threads=1)
    assert sound(done.said)
    assert done.said["precision"] == "int8"
    assert done.said["reference"] == "built-in"


def test_a_model_with_other_shapes() -> None:
    done = prepare(generate.dynamic_batch(4), '--shapes={"x": [7, 4]}')
    assert sound(done.said)


@pytest.mark.parametrize("lie", ["twice", "constant", "nan"])
def test_a_backend_that_lies_is_found_out(tmp_path: Path, lie: str) -> None:
    done = prepare_here(tmp_path, model(), "fp32", fault=lie)
    result = done.said
    assert not sound(result)
    assert (result["verdict"], result["name"]) == ("wrong", "BackendFailed")
    assert result["rule"] == "fp32: 0.001 of the peak"
    assert result["error"] is None if lie == "nan" else result["error"] > 0.1
    assert "output 'sum'" in result["text"] or "output 'product'" in result["text"]
    # What is wrong is not timed.
    assert "warm" not in done.names
    assert "run_us" not in result


def test_auto_takes_the_first_precision_that_is_right(tmp_path: Path) -> None:
    done = prepare_here(tmp_path, model(), fault_fp16="twice")
    result = done.said
    assert sound(result)
    assert result["precision"] == "fp32"
    assert [(each["precision"], each["ok"]) for each in result["tried"]] == [
        ("fp16", False),
        ("fp32", True),
    ]
    assert result["tried"][0]["verdict"] == "wrong"
    assert result["tried"][0]["error"] > 0.1
    assert done.names == [*STEPS[:-1], *STEPS[2:]]


@pytest.mark.parametrize(
    ("fault", "verdict"), [("unsupported", "unsupported"), ("refuses", "failed")]
)
def test_auto_goes_on_after_a_precision_that_does_not_load(
    tmp_path: Path, fault: str, verdict: str
) -> None:
    result = prepare_here(tmp_path, model(), fault_fp16=fault).said
    assert sound(result)
    assert result["tried"][0]["verdict"] == verdict


def test_auto_never_takes_int4(tmp_path: Path) -> None:
    precisions = ["int4", "fp16", "fp32"]
    result = prepare_here(tmp_path, model(), precisions=precisions, fault_fp16="half").said
    assert [each["precision"] for each in result["tried"]] == ["fp16"]


def test_no_precision_that_is_right_is_the_last_ones_verdict(tmp_path: Path) -> None:
    result = prepare_here(tmp_path, model(), fault="twice").said
    assert result["verdict"] == "wrong"
    assert [each["ok"] for each in result["tried"]] == [False, False]


def test_int4_that_is_too_coarse_is_refused_with_its_figure(tmp_path: Path) -> None:
    result = prepare_here(tmp_path, model(), "int4", fault="coarse").said
    assert not sound(result)
    assert result["verdict"] == "refused"
    assert 5 < result["snr_db"] < 20
    assert "dB, not 20" in result["text"]


@pytest.mark.parametrize(
    ("fault", "verdict", "domain", "name", "text"),
    [
        ("unsupported", "unsupported", "switchgear", "UnsupportedModel", "operator ADD"),
        ("refuses", "failed", "litert", "kLiteRtStatusErrorCompilation", "no such shader"),
        ("lost", "failed", "vulkan", "VK_ERROR_DEVICE_LOST", "vkQueueSubmit"),
        ("no memory", "failed", "errno", "ENOMEM", "memory"),
        ("raises", "failed", "switchgear", "InternalError", "KeyError: 'a mistake"),
        ("no device", "failed", "opencl", "CL_PLATFORM_NOT_FOUND_KHR", "clGetPlatformIDs"),
    ],
)
def test_each_failure_keeps_its_own_words(
    tmp_path: Path, fault: str, verdict: str, domain: str, name: str, text: str
) -> None:
    result = prepare_here(tmp_path, model(), "fp32", fault=fault).said
    assert (result["ok"], result["verdict"]) == (False, verdict)
    assert (result["domain"], result["name"]) == (domain, name)
    assert text in result["text"]


def test_an_unknown_backend_is_said() -> None:
    result = prepare(model(), backend="nothing", factory="").said
    assert (result["verdict"], result["name"]) == ("failed", "UnknownBackend")


def test_a_stateful_model_stays_on_the_cpu(tmp_path: Path) -> None:
    done = prepare_here(tmp_path, generate.accumulator())
    assert done.names == ["open", "reference"]
    assert done.said["verdict"] == "unsupported"
    assert done.said["text"] == "stateful models stay on the cpu"


def test_a_model_without_spread_is_refused_before_it_is_compiled(tmp_path: Path) -> None:
    """With one row every index in the check's inputs is 0."""
    done = prepare_here(tmp_path, generate.lookup(rows=1, width=4))
    assert done.names == ["open", "reference"]
    assert (done.said["verdict"], done.said["inputs"]) == ("refused", 8)


def test_a_driver_that_prints_does_not_disturb_the_lines() -> None:
    done = prepare(model(), fault="talks")
    assert sound(done.said)
    assert '{"ok": true}' in done.stderr


def test_again_loads_as_a_serving_worker_does(tmp_path: Path) -> None:
    result = prepare(model(), "--again", "--precision=fp32").said
    assert (result["verdict"], result["name"]) == ("refused", "NotPrepared")
    assert sound(prepare_here(tmp_path, model(), "fp32", again=True, prepared=True).said)
    # What lies in the cache may be wrong by now.
    wrong = prepare_here(tmp_path, model(), "fp32", again=True, prepared=True, fault="twice")
    assert wrong.said["verdict"] == "wrong"


# A busy machine starves who runs only when it is idle: a second of CPU can take a minute.
@pytest.mark.timeout(120)
def test_a_hang_shows_where() -> None:
    """The caller's time limit ends it: the last line says what ran."""
    with memory_file(model()) as fd:
        process = subprocess.Popen(
            command(
                fd,
                "fake",
                f"--factory={FAKE}",
                '--options={"fault": "hang"}',
                module=PREPARER,
            ),
            pass_fds=[fd],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        with process.stdout:
            lines = [json.loads(process.stdout.readline()) for _ in range(3)]
            assert [line["step"] for line in lines] == STEPS[:3]
            assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
            assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
            limits = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
            core = next(line for line in limits if line.startswith("Max core file size"))
            assert core.split()[4:6] == ["0", "0"]
            process.kill()
            assert process.wait() == -signal.SIGKILL
            assert process.stdout.read() == ""


def prepare_marked(folder: Path, fault: str = "abort", **options: Any) -> Prepared:
    return prepare(
        model(),
        "--precision=fp16",
        f"--markers={folder}",
        "--digest=abcd",
        fault=fault,
        **options,
    )


def test_a_driver_that_kills_twice_is_not_asked_a_third_time(tmp_path: Path) -> None:
    for ends in (1, 2):
        done = prepare_marked(tmp_path)
        assert done.returncode == -signal.SIGABRT
        assert done.result is None
        assert done.names[-1] == "compile"
        (mark,) = CrashMarkers(tmp_path).marks()
        assert mark.ends == ends
        assert mark.key["model"] == "abcd"
        assert mark.key["identity.driver"] == "fake 1"

    third = prepare_marked(tmp_path)
    assert third.returncode == 0
    assert third.said["verdict"] == "refused"
    assert "ended the process 2 times" in third.said["text"]
    # Another driver and another engine are asked.
    assert sound(prepare_marked(tmp_path, "none", driver="fake 2").said)
    assert sound(prepare_marked(tmp_path, "none", version="2").said)
    (mark,) = CrashMarkers(tmp_path).marks()
    assert mark.ends == 2


def test_a_crash_in_a_run_counts_too_and_an_error_does_not(tmp_path: Path) -> None:
    assert prepare_marked(tmp_path, "refuses").said["verdict"] == "failed"
    assert CrashMarkers(tmp_path).marks() == []
    done = prepare_marked(tmp_path, "segfault")
    assert done.returncode == -signal.SIGSEGV
    assert done.names[-1] == "first run"
    assert [mark.ends for mark in CrashMarkers(tmp_path).marks()] == [1]


def test_a_mark_that_cannot_be_written_stops_the_use(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = prepare_marked(tmp_path / "file" / "markers").said
    assert (result["verdict"], result["domain"], result["name"]) == (
        "failed",
        "errno",
        "ENOTDIR",
    )


# Software drivers compile for many seconds.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "require"), [("vulkan", require_vulkan), ("opencl", require_opencl)]
)
def test_a_real_driver_cold_and_warm(tmp_path: Path, backend: str, require: Any) -> None:
    require()
    make_folders(tmp_path)
    where = (f"--cache={tmp_path / 'models' / 'one'}", f"--markers={tmp_path / 'markers'}")
    drivers = driver_caches(tmp_path)
    cold = prepare(model(), *where, backend=backend, factory="", more=drivers).said
    assert sound(cold), cold
    warm = prepare(model(), *where, "--again", backend=backend, factory="", more=drivers).said
    assert sound(warm), warm
    assert warm["identity"] == cold["identity"]
    assert warm["precision"] == cold["precision"]
    assert warm["error"] == cold["error"]
    assert CrashMarkers(tmp_path / "markers").marks() == []


# Starts the command in its arguments as its child and ends with its own standard input.
PARENT = """
import os, subprocess, sys

arguments = [each.replace("PARENT", str(os.getpid())) for each in sys.argv[2:]]
subprocess.Popen(arguments, pass_fds=[int(sys.argv[1])])
sys.stdin.read()
"""


def test_it_dies_with_its_parent() -> None:
    with memory_file(model()) as fd:
        arguments = command(fd, "fake", f"--factory={FAKE}", '--options={"fault": "hang"}')
        arguments = [a.replace(f"--parent={os.getpid()}", "--parent=PARENT") for a in arguments]
        with subprocess.Popen(
            [sys.executable, "-c", PARENT, str(fd), *arguments],
            pass_fds=[fd],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as parent:
            assert parent.stdin is not None
            assert parent.stdout is not None
            steps = [json.loads(parent.stdout.readline())["step"] for _ in range(3)]
            assert steps == STEPS[:3]
            parent.stdin.close()
            # It hangs for ever: the pipe ends only when it is dead.
            assert parent.stdout.read() == ""
