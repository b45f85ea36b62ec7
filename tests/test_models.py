"""Loaded models through a real daemon: quotas, names, and jobs that cross each other."""

from __future__ import annotations

import contextlib
import os
import signal
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest
from daemon_health import Holdings
from daemon_process import DaemonProcess
from raw_client import CallFailed, Control, message
from worker_under_test import memory_file

from switchgear.backends import generate

if TYPE_CHECKING:
    from collections.abc import Iterator

# Each new model is a new process: on a busy machine that takes its time.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]

CONFIG = """
[cpu]
threads = 1
[limits]
models_per_user = 3
memory_models_mib_per_user = 20
[fingerprint]
enabled = false
"""
MIB = 1 << 20
SETTLE_LIMIT_S = 10.0


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(config=CONFIG) as daemon:
        yield daemon


@pytest.fixture
def control(daemon: DaemonProcess) -> Iterator[Control]:
    """A connection; what it loads is unloaded at the end."""
    with Control(daemon.socket) as control:
        yield control
        for model in control.call_with_fds("ListModels")[0]["models"]:
            control.call_with_fds("UnloadModel", model=model["model"], force=True)


def start_load(control: Control, model: bytes, name: str | None = None) -> int:
    """Begins to load a model; the job's number."""
    more = {"name": name} if name else {}
    with memory_file(model) as fd:
        reply, _ = control.call_with_fds("LoadModel", [fd], descriptor=0, **more)

    return int(reply["job"])


def outcome(control: Control, job: int) -> dict[str, Any]:
    """How a job ended."""
    control.send(message("WatchJob", {"job": job}, more=True))
    while True:
        reply, _ = control.receive()
        if not reply.get("continues"):
            fields: dict[str, Any] = reply["parameters"]
            return fields


def load(control: Control, model: bytes, name: str | None = None) -> dict[str, Any]:
    ended = outcome(control, start_load(control, model, name))
    assert ended["state"] == "done", ended
    result: dict[str, Any] = ended["result"]
    return result


@contextlib.contextmanager
def holds_no_more(daemon: DaemonProcess) -> Iterator[None]:
    """Fails when the daemon has more descriptors or children after the block than before."""
    before = Holdings.of(daemon)
    yield
    deadline = monotonic() + SETTLE_LIMIT_S
    while True:
        now = Holdings.of(daemon)
        if now.descriptors <= before.descriptors and now.children <= before.children:
            return

        assert monotonic() < deadline, f"held before: {before}, now: {now}"


def model_of(size: int) -> bytes:
    """A model of this many bytes, and a few: a table."""
    return generate.lookup(rows=size // 1024, width=256)


def test_a_job_that_is_cancelled_with_its_start_leaves_nothing(
    daemon: DaemonProcess, control: Control
) -> None:
    load(control, generate.two_inputs())
    with holds_no_more(daemon):
        for _ in range(5):
            with memory_file(generate.slow(3000)) as fd, Control(daemon.socket) as other:
                first = start_load(other, generate.two_inputs())
                outcome(other, first)
                # Numbers of jobs follow each other; the daemon finds both calls at once.
                os.kill(daemon.pid, signal.SIGSTOP)
                try:
                    other.send(message("LoadModel", {"descriptor": 0}), [fd])
                    other.send(message("CancelJob", {"job": first + 1}))
                finally:
                    os.kill(daemon.pid, signal.SIGCONT)

                assert other.receive()[0]["parameters"] == {"job": first + 1}
                assert other.receive()[0]["parameters"] == {}
                ended = outcome(other, first + 1)

                assert ended["state"] == "cancelled"
                assert ended["error"] == "io.switchgear.Cancelled"

    assert len(control.call_with_fds("ListModels")[0]["models"]) == 1


def test_a_user_has_so_many_models(control: Control) -> None:
    for size in (2, 3, 4):
        load(control, generate.two_inputs(size))

    with pytest.raises(CallFailed) as caught:
        start_load(control, generate.two_inputs(5))

    assert caught.value.name == "QuotaExceeded"


def test_loads_under_way_count(daemon: DaemonProcess, control: Control) -> None:
    ended = []
    with contextlib.ExitStack() as stack:
        # The second is refused at once or when it begins: the first holds its bytes.
        others = [stack.enter_context(Control(daemon.socket)) for _ in range(2)]
        for number, other in enumerate(others):
            model = model_of(12 * MIB) + bytes(number)
            fd = stack.enter_context(memory_file(model))
            other.send(message("LoadModel", {"descriptor": 0}), [fd])

        for other in others:
            reply, _ = other.receive()
            if "error" in reply:
                ended.append(reply["error"].rpartition(".")[2])
            else:
                fields = outcome(other, reply["parameters"]["job"])
                ended.append(fields.get("error", "done").rpartition(".")[2])

    assert sorted(ended) == ["QuotaExceeded", "done"]
    load(control, model_of(6 * MIB))


def test_a_load_that_fails_holds_nothing(daemon: DaemonProcess, control: Control) -> None:
    with holds_no_more(daemon):
        for _ in range(5):
            ended = outcome(control, start_load(control, b"no model\n" * 1000, "name"))
            assert ended["error"] == "io.switchgear.BadModel"

        assert control.call_with_fds("ListModels")[0]["models"] == []

    load(control, model_of(12 * MIB))


def test_a_model_that_is_unloaded_in_a_check(daemon: DaemonProcess, control: Control) -> None:
    with Control(daemon.socket) as other:
        for shapes in ({"x": [7, 4]}, None):
            model = load(control, generate.dynamic_batch(), "batch")["model"]
            if shapes:
                parameters = {"model": model, "input_shapes": shapes}
                reply, _ = other.call_with_fds("PrepareShapes", **parameters)
            else:
                reply, _ = other.call_with_fds("CheckModel", model=model)

            control.call_with_fds("UnloadModel", model=model)
            ended = outcome(other, reply["job"])

            # It had begun and went through, or came too late: nothing else.
            error = ended.get("error")
            assert ended["state"] == "done" or error == "io.switchgear.UnknownModel", ended
            assert control.call_with_fds("ListModels")[0]["models"] == []
            load(control, generate.dynamic_batch(), "batch")
            control.call_with_fds("UnloadModel", model="batch")


def test_a_name_means_the_model_loaded_last_under_it(control: Control) -> None:
    first = load(control, generate.two_inputs(2), "model")["model"]
    second = load(control, generate.two_inputs(3), "model")["model"]
    assert control.call_with_fds("DescribeModel", model="model")[0]["model"]["model"] == second
    assert control.call_with_fds("DescribeModel", model=first[:8])[0]["model"]["model"] == first
    load(control, generate.two_inputs(2), "other")
    assert control.call_with_fds("DescribeModel", model="other")[0]["model"]["model"] == first


@pytest.mark.parametrize("name", ["", ".x", "-x", "a b", "a/b", "x" * 129, "ä", "a\n"])
def test_names_that_are_none(name: str, control: Control) -> None:
    with memory_file(generate.two_inputs()) as fd, pytest.raises(CallFailed) as caught:
        control.call_with_fds("LoadModel", [fd], descriptor=0, name=name)

    assert caught.value.name == "BadRequest"


def test_verdicts_and_large_models_survive_a_restart() -> None:
    config = CONFIG.replace("memory_models_mib_per_user = 20", "store_mib = 64")
    large = model_of(17 * MIB)
    with DaemonProcess(config=config) as daemon:
        with Control(daemon.socket) as control:
            first = load(control, large, "large")
            assert first["storage"] == "file"

        daemon.stop()
        assert os.listdir(daemon.state_dir / "models") == [f"{first['model']}.tflite"]
        # No process that tries a model is through by then.
        daemon.config.write_text(f"{config}[validation]\ntime_limit_s = 0.001\n")
        daemon.start()
        with Control(daemon.socket) as control:
            again = load(control, large, "large")

            with pytest.raises(CallFailed, match="TimedOut"):
                control.load(generate.two_inputs())

        assert again["model"] == first["model"]
        steps = [step["name"] for step in again["timeline"]]
        assert steps[:4] == ["copy", "hash", "store", "validate"]
        assert len(os.listdir(daemon.state_dir / "models")) == 1
