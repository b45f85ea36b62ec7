"""What a running daemon takes over of a changed configuration."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from daemon_process import DaemonProcess
from raw_client import Control, error_name

from switchgear.backends import generate
from switchgear.daemon import reload
from switchgear.daemon.config import Configuration

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine


def configuration(**sections: Any) -> Configuration:
    return Configuration.model_validate(sections)


def test_nothing_changed() -> None:
    old = configuration(cpu={"threads": 2})
    merged = reload.merge(old, configuration(cpu={"threads": 2}))
    assert merged.configuration == old
    assert (merged.applied, merged.waiting, merged.problems) == ((), (), [])
    assert merged.text == "reloaded: nothing applied"


def test_what_needs_a_restart_keeps_its_old_value() -> None:
    old = configuration(cpu={"threads": 2}, daemon={"log_level": "info"})
    new = configuration(
        cpu={"threads": 3, "niceness": 1},
        daemon={"log_level": "debug", "isolation": "shared"},
        models=[{"path": "/m.tflite"}],
    )
    merged = reload.merge(old, new)
    assert merged.applied == ("daemon.log_level", "models")
    assert set(merged.waiting) == {"cpu.threads", "cpu.niceness", "daemon.isolation"}
    held = merged.configuration
    assert (held.cpu, held.daemon.isolation) == (old.cpu, old.daemon.isolation)
    assert (held.daemon.log_level, held.models) == ("debug", new.models)
    (problem,) = merged.problems
    assert "cpu.threads" in problem


def test_every_applied_key_is_one_of_the_configuration() -> None:
    for section, keys in reload.APPLIED.items():
        default = getattr(Configuration(), section)
        assert keys is None or keys <= set(type(default).model_fields)


def await_models(daemon: DaemonProcess, control: Control, names: set[str]) -> None:
    """Waits for what a reload changes; the daemon tells a client nothing of it."""
    while {m["name"] for m in control.call("ListModels")["models"] if m["resident"]} != names:
        assert daemon.running


def test_a_replaced_file_is_loaded_and_the_old_model_serves_its_sessions(
    tmp_path: Path,
) -> None:
    path = tmp_path / "net.tflite"
    path.write_bytes(generate.identity((4,)))
    config = f'[[models]]\npath = "{path}"\n'
    with DaemonProcess(config=config) as daemon, Control(daemon.socket) as control:
        (first,) = (model["model"] for model in control.call("ListModels")["models"])
        with control.open_session("net") as session:
            fresh = tmp_path / "fresh"
            fresh.write_bytes(generate.identity((5,)))
            fresh.replace(path)
            os.kill(daemon.pid, signal.SIGHUP)
            while control.call("DescribeModel", model="net")["model"]["model"] == first:
                assert daemon.running

            while not control.call("GetStatus")["problems"]:
                assert daemon.running

            (problem,) = control.call("GetStatus")["problems"]
            assert first[:12] in problem
            session.write(0, [1.0, 2.0, 3.0, 4.0])
            session.infer(1)
            reply = session.receive()
            assert error_name(reply) == ""
            assert session.read(reply.output_slot, 4) == [1.0, 2.0, 3.0, 4.0]

        with control.open_session("net") as session:
            assert session.reply["inputs"][0]["shape"] == [5]

        # Its sessions have ended: the next reload takes it away.
        while control.call("GetStatus")["sessions"]:
            assert daemon.running

        os.kill(daemon.pid, signal.SIGHUP)
        while len(control.call("ListModels")["models"]) > 1:
            assert daemon.running

        assert control.call("GetStatus")["problems"] == []


def test_a_model_that_failed_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "late.tflite"
    with (
        DaemonProcess(config=f'[[models]]\npath = "{path}"\n') as daemon,
        Control(daemon.socket) as control,
    ):
        assert len(control.call("GetStatus")["problems"]) == 1
        path.write_bytes(generate.identity((4,)))
        os.kill(daemon.pid, signal.SIGHUP)
        await_models(daemon, control, {"late"})
        daemon.config.write_text("")
        os.kill(daemon.pid, signal.SIGHUP)
        await_models(daemon, control, set())
