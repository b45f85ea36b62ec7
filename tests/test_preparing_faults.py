"""What goes wrong behind a model that serves: its prepared files, its jobs, its preparer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import native_build
import pytest
from daemon_process import DaemonProcess
from devices import require_opencl
from preparing_faults import (
    device_daemon,
    npu_daemon,
    pair_state,
    until,
    workers,
)
from random_frame import frame
from raw_client import CallFailed, Control
from replaced_file import replace_file
from small_network import small_network

from switchgear.ipc.errors import ModelQuarantined, NoBackend

pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]


class Pace:
    """What each run on the device takes, in all processes from their next run on."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "latency"
        self.file = str(self._path)
        self.usual()

    def usual(self) -> None:
        self._set(0)

    def for_ever(self) -> None:
        self._set(2_000_000_000)

    def _set(self, microseconds: int) -> None:
        replace_file(self._path, b"%d\n" % microseconds)


@pytest.fixture
def pace(tmp_path: Path) -> Pace:
    return Pace(tmp_path)


def preparer(daemon: DaemonProcess) -> int:
    """The pid of the preparer that runs; 0 where none does."""
    found = [pid for pid, line in daemon.children().items() if "backends.preparer" in line]
    return found[0] if found else 0


def until_gone(daemon: DaemonProcess, pid: int) -> None:
    until(lambda: pid not in daemon.children())


def test_a_backend_that_needs_no_prepared_files_serves_on_without_them() -> None:
    with npu_daemon() as (daemon, client):
        client.load_model(small_network(), "net")
        model = client.prepare_model("net")
        inputs = frame(model)
        with client.open_session(model, backends=["npu"], strict=True) as session:
            assert session.run(inputs).backend == "npu"
            (row,) = workers(client)
            assert [*(daemon.cache_dir / "models").rglob("golden-*")]
            for file in [f for f in (daemon.cache_dir / "models").rglob("*") if f.is_file()]:
                file.unlink()

            os.kill(row["pid"], signal.SIGKILL)
            until(lambda: any(now["pid"] != row["pid"] for now in workers(client)))
            assert until(lambda: pair_state(client) == "ready")
            assert session.run(inputs).backend == "npu"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_prepared_files_that_vanish_are_made_anew_once_and_serve_again(tmp_path: Path) -> None:
    require_opencl()
    with device_daemon(tmp_path) as (daemon, client):
        client.load_model(small_network(), "net")
        model = client.prepare_model("net", ["opencl"], "fp32")
        inputs = frame(model)
        with client.open_session(model, backends=["opencl", "cpu"]) as session:
            until(lambda: session.run(inputs).backend == "opencl")
            made = daemon.log_text().count("model net is ready on opencl")
            artefacts = [*(daemon.cache_dir / "models").rglob("*.clart")]
            assert artefacts
            for file in artefacts:
                file.unlink()

            os.kill(workers(client, "opencl")[0]["pid"], signal.SIGKILL)
            # The CPU answers until then.
            until(lambda: session.run(inputs) and made_anew(daemon, made))
            until(lambda: session.run(inputs).backend == "opencl")
            assert [*(daemon.cache_dir / "models").rglob("*.clart")]


def made_anew(daemon: DaemonProcess, before: int) -> bool:
    return daemon.log_text().count("model net is ready on opencl") > before


def test_a_cancelled_job_takes_its_own_preparation_with_it(pace: Pace) -> None:
    with (
        npu_daemon(latency_file=pace.file) as (daemon, client),
        Control(daemon.socket) as control,
    ):
        client.load_model(small_network(), "net")
        client.prepare_model("net")
        # Its preparer does not end before it is found.
        pace.for_ever()
        for _ in range(3):
            job = control.call("PrepareModel", model="net", again=True)["job"]
            pid = until(lambda: preparer(daemon))
            os.kill(pid, signal.SIGSTOP)
            control.call("CancelJob", job=job)
            until_gone(daemon, pid)
            # It was ready, and is.
            assert pair_state(client) == "ready"

        # No mark is left of the killed ones: it is prepared as ever.
        pace.usual()
        assert client.prepare_model("net", again=True).pairs[0].state == "ready"


def test_an_unloaded_model_is_not_prepared_on(pace: Pace) -> None:
    with (
        npu_daemon(latency_file=pace.file) as (daemon, client),
        Control(daemon.socket) as control,
    ):
        client.load_model(small_network(), "net")
        client.prepare_model("net")
        pace.for_ever()
        job = control.call("PrepareModel", model="net", again=True)["job"]
        pid = until(lambda: preparer(daemon))
        os.kill(pid, signal.SIGSTOP)
        control.call("UnloadModel", model="net")
        until_gone(daemon, pid)
        with pytest.raises(CallFailed, match="UnknownModel"):
            control.wait_for(job)


def test_the_daemon_stops_though_a_preparer_stands_still(pace: Pace) -> None:
    with (
        npu_daemon(latency_file=pace.file) as (daemon, client),
        Control(daemon.socket) as control,
    ):
        client.load_model(small_network(), "net")
        client.prepare_model("net")
        pace.for_ever()
        control.call("PrepareModel", model="net", again=True)
        os.kill(until(lambda: preparer(daemon)), signal.SIGSTOP)


def test_a_strict_session_comes_back_with_its_driver(tmp_path: Path) -> None:
    library = tmp_path / "delegate.so"
    good = native_build.delegate().read_bytes()
    replace_file(library, good)
    with npu_daemon(delegate=library) as (_, client):
        client.load_model(small_network(), "net")
        model = client.prepare_model("net")
        inputs = frame(model)
        with client.open_session(model, backends=["npu"], strict=True) as session:
            assert session.run(inputs).backend == "npu"
            replace_file(library, b"no library")
            os.kill(workers(client)[0]["pid"], signal.SIGKILL)
            until(lambda: not workers(client))
            with pytest.raises(NoBackend) as refused:
                # The one that waits for the restart, or one behind it.
                session.run(inputs)

            assert 0 < int(str(refused.value.details["retry_after_ms"])) <= 30_000
            replace_file(library, good)
            client.prepare_model("net", again=True)
            assert session.run(inputs).backend == "npu"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_that_hangs_its_workers_as_it_is_loaded_is_not_loaded_for_ever(
    pace: Pace,
) -> None:
    # A worker's honest start has to be within it, too.
    with npu_daemon("[workers]\nstart_s = 12.0\n", latency_file=pace.file) as (_, client):
        client.load_model(small_network(), "net")
        model = client.prepare_model("net")
        inputs = frame(model)
        with client.open_session(model, backends=["npu", "cpu"]) as session:
            until(lambda: session.run(inputs).backend == "npu")
            pace.for_ever()
            os.kill(workers(client)[0]["pid"], signal.SIGKILL)
            until(lambda: session.run(inputs) and client.describe("net").status != "ready")
            # The last worker is left alone: nothing is asked of it.
            (row,) = until(lambda: workers(client))
            assert "did not load" in row["last_end"]
            assert session.run(inputs).backend == "cpu"
            with (
                client.open_session(model, backends=["npu"], strict=True) as strict,
                pytest.raises(ModelQuarantined),
            ):
                strict.run(inputs)
