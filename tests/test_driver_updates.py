"""A driver that is replaced under a real daemon: only what was checked with it is served."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import native_build
import numpy as np
import pytest
from preparing_faults import npu_daemon, pair_state, until, workers
from random_frame import frame
from replaced_file import replace_file
from small_network import small_network

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daemon_process import DaemonProcess

    from switchgear.client import Client, Session

pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]

# Slow frames of a busy machine are no reason to leave the NPU here.
STEADY = "[protocol]\ndry_run = true\n"
ANOTHER = "backend npu has another driver now"


def replace(library: Path, build: Path, *, number: int = 0) -> None:
    """One build in the place of another; a number makes it another one of the same."""
    replace_file(library, build.read_bytes() + bytes(number))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "delegate.so"
    replace(path, native_build.delegate())
    return path


class Frames:
    """Runs one frame again and again; every answer has to be right."""

    def __init__(self, session: Session, inputs: dict[str, np.ndarray]) -> None:
        self._session, self._inputs = session, inputs
        result = session.run(inputs, copy=True)
        self._wanted = {name: np.asarray(result[name]) for name in result}

    def backend(self) -> str:
        result = self._session.run(self._inputs)
        for name, wanted in self._wanted.items():
            np.testing.assert_allclose(result[name], wanted, rtol=1e-3, atol=1e-4)

        return result.backend


@contextmanager
def serving(library: Path) -> Iterator[tuple[DaemonProcess, Client, Frames]]:
    """A daemon whose NPU serves a model, and frames of a session there."""
    with npu_daemon(STEADY, delegate=library) as (daemon, client):
        client.load_model(small_network(), "net")
        model = client.prepare_model("net")
        inputs = frame(model)
        with client.open_session(model, backends=["npu", "cpu"]) as session:
            until(lambda: session.run(inputs).backend == "npu")
            yield daemon, client, Frames(session, inputs)


def kill_worker(client: Client) -> int:
    """Kills the NPU's worker, as a crash does; its pid."""
    (row,) = workers(client)
    pid = int(row["pid"])
    os.kill(pid, signal.SIGKILL)
    return pid


def is_checked_anew(daemon: DaemonProcess, client: Client, frames: Frames, old: int) -> None:
    """Waits until the NPU serves again, in a worker that has only the new driver."""
    until(lambda: frames.backend() == "npu" and ANOTHER in daemon.log_text())
    until(lambda: pair_state(client) == "ready")
    until(lambda: frames.backend() == "npu")
    assert [row["pid"] for row in workers(client)] != [old]
    # Once by each driver.
    assert daemon.log_text().count("model net is ready on npu") == 2
    log = daemon.log_text()
    assert log.index(ANOTHER) < log.rindex("model net is ready on npu")


def test_a_worker_that_comes_back_with_another_driver_waits_for_its_check(
    library: Path,
) -> None:
    with serving(library) as (daemon, client, frames):
        replace(library, native_build.delegate(), number=1)
        old = kill_worker(client)
        is_checked_anew(daemon, client, frames, old)
        assert "prepared with driver" in daemon.log_text()


def test_a_driver_that_is_replaced_behind_a_worker_is_taken_over(library: Path) -> None:
    with serving(library) as (daemon, client, frames):
        (row,) = workers(client)
        replace(library, native_build.delegate(), number=1)
        # Its own look would come later.
        os.kill(daemon.pid, signal.SIGHUP)
        is_checked_anew(daemon, client, frames, int(row["pid"]))


def test_a_new_driver_that_lies_never_serves(library: Path) -> None:
    with serving(library) as (daemon, client, frames):
        replace(library, native_build.lying_delegate())
        kill_worker(client)
        until(lambda: frames.backend() == "cpu" and pair_state(client) == "absent")
        (pair,) = client.describe("net").pairs
        assert "wrong" in pair.reason or "instead of" in pair.reason, pair.reason
        for _ in range(20):
            assert frames.backend() == "cpu"

        # The next one is good again.
        replace(library, native_build.delegate(), number=2)
        os.kill(daemon.pid, signal.SIGHUP)
        until(lambda: frames.backend() == "npu")
