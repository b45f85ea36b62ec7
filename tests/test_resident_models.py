"""Models that the configuration keeps loaded, and what is told of those that fail."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from cli_command import switchgear
from daemon_process import DaemonProcess
from raw_client import Control, error_name

from switchgear.backends import generate

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine


# Seven models are tried, each in a process.
@pytest.mark.timeout(60)
def test_more_models_than_are_copied_at_once_and_some_that_cannot_be(tmp_path: Path) -> None:
    entries = []
    for size in range(1, 7):
        path = tmp_path / f"identity-{size}.tflite"
        path.write_bytes(generate.identity((size,)))
        entries.append(f'[[models]]\npath = "{path}"\n')

    text = tmp_path / "text.tflite"
    text.write_text("no model\n" * 10)
    gone = tmp_path / "gone.tflite"
    entries += [f'[[models]]\npath = "{path}"\n' for path in (text, gone)]
    with DaemonProcess(config="".join(entries)) as daemon, Control(daemon.socket) as control:
        status = control.call("GetStatus")
        assert sorted(entry["name"] for entry in status["models"]) == [
            f"identity-{size}" for size in range(1, 7)
        ]
        assert all(entry["resident"] for entry in status["models"])
        problems = sorted(status["problems"])
        assert len(problems) == 2
        assert problems[0] == f"resident model {gone}: No such file or directory"
        assert problems[1].startswith(f"resident model {text}: ")
        done = switchgear("status", "--socket", daemon.socket)
        assert done.returncode == 0
        assert done.stdout.startswith("serves, but: resident model ")


def test_a_resident_model_outlives_its_worker(tmp_path: Path) -> None:
    path = tmp_path / "kept.tflite"
    path.write_bytes(generate.identity((4,)))
    with (
        DaemonProcess(config=f'[[models]]\npath = "{path}"\n') as daemon,
        Control(daemon.socket) as control,
    ):
        path.unlink()
        os.kill(control.call("GetStatus")["workers"][0]["pid"], signal.SIGKILL)
        with control.open_session("kept") as session:
            session.write(0, [1.0, 2.0, 3.0, 4.0])
            session.infer(1)
            reply = session.receive()
            assert error_name(reply) == ""
            assert session.read(reply.output_slot, 4) == [1.0, 2.0, 3.0, 4.0]
