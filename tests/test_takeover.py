"""What was prepared anew is taken over by the workers that serve, without a gap."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import native_build
import pytest
from daemon_process import DaemonProcess
from devices import require_opencl, require_vulkan
from preparing_faults import (
    backend_row,
    device_daemon,
    npu_daemon,
    until,
    workers,
)
from random_frame import frame
from replaced_file import replace_file
from small_network import small_network

from switchgear.client import Client, Model, Pair, Session
from switchgear.daemon.pair import OWN_WORKER_US

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]


class Frames:
    """Runs frames in a thread; `backends` are those that answered.

    A preparer stands still while requests run: so there is a gap between them, in seconds.
    """

    def __init__(self, session: Session, inputs: dict[str, Any], gap_s: float = 0.03) -> None:
        self.backends: set[str] = set()
        self.count = 0
        self.error: BaseException | None = None
        self._session = session
        self._inputs = inputs
        self._gap_s = gap_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._gap_s):
                result = self._session.run(self._inputs)
                self.backends.add(result.backend)
                assert result.tried == ()
                self.count += 1
        except BaseException as error:
            self.error = error

    def more(self) -> bool:
        """Waits for two further frames: one may have been in flight."""
        want = self.count + 2
        until(lambda: self.count >= want or self.error is not None)
        return self.error is None

    def __enter__(self) -> Frames:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def the_pair(client: Client, backend: str, asked: str = "auto") -> Pair:
    pairs = client.describe("net").pairs
    return next(p for p in pairs if (p.backend, p.asked) == (backend, asked))


def taken_over(daemon: DaemonProcess, artefact: str = "") -> int:
    """How often a worker said that it has loaded what was prepared anew."""
    lines = daemon.log_text().splitlines()
    return sum("has taken over model net" in line and line.endswith(artefact) for line in lines)


def loads_quickly(client: Client) -> bool:
    """Whether the NPU's pair shares a worker with others, which does not hold them up."""
    figures = the_pair(client, "npu").figures
    load_us = int(figures["warm_load_us"]) + int(figures["warm_first_run_us"])
    return load_us <= OWN_WORKER_US


def test_a_shared_worker_loads_it_beside_what_serves() -> None:
    # A preparer gets the CPU when nobody else wants it: a busy machine may make a load so slow
    # that the pair has a worker of its own from then on.
    while not taken_over_beside_what_serves():
        pass


def taken_over_beside_what_serves() -> bool:
    """False where that is not the way of the pair, as it was measured this time."""
    with npu_daemon() as (daemon, client):
        client.load_model(small_network(), "net")
        model = client.prepare_model("net")
        if not loads_quickly(client):
            return False

        with (
            client.open_session(model, backends=["npu"], strict=True) as session,
            Frames(session, frame(model)) as frames,
        ):
            (row,) = workers(client)
            client.prepare_model("net", again=True)
            if not loads_quickly(client):
                return False

            until(lambda: taken_over(daemon) or frames.error)
            assert frames.more()
            assert (frames.backends, frames.error) == ({"npu"}, None)
            (now,) = workers(client)
            assert (now["pid"], now["restarts"]) == (row["pid"], 0)

        return True


def test_what_takes_long_to_load_gets_a_new_worker_that_takes_over() -> None:
    with npu_daemon(create_us="250000") as (daemon, client):
        client.load_model(small_network(), "net")
        model = client.prepare_model("net")
        inputs = frame(model)
        with (
            client.open_session(model, backends=["npu"], strict=True) as session,
            client.open_session(model, backends=["npu"], strict=True) as other,
            Frames(session, inputs) as frames,
        ):
            (row,) = workers(client)
            assert row["lane"] == model.hash[:12]
            client.prepare_model("net", again=True)
            (now,) = until(lambda: only_other(client, row["pid"]))
            assert now["lane"] == f"{model.hash[:12]}.1"
            until(lambda: row["pid"] not in daemon.children())
            assert frames.more()
            assert (frames.backends, frames.error) == ({"npu"}, None)
            assert other.run(inputs).backend == "npu"

        client.unload_model("net", force=True)
        until(lambda: not workers(client))


def only_other(client: Client, pid: int) -> list[dict[str, Any]]:
    rows = workers(client)
    return rows if [row["pid"] for row in rows] != [pid] and len(rows) == 1 else []


def test_a_search_that_fails_leaves_what_serves(tmp_path: Path) -> None:
    library = tmp_path / "delegate.so"
    good = native_build.delegate().read_bytes()
    library.write_bytes(good)
    with npu_daemon(delegate=library) as (daemon, client):
        client.load_model(small_network(), "net")
        model = client.prepare_model("net")
        kept = files(daemon)
        with client.open_session(model, backends=["npu"], strict=True) as session:
            replace_file(library, b"no library")
            for _ in range(2):
                (pair,) = client.prepare_model("net", ["npu"], tune_s=1).pairs
                assert pair.state == "ready"
                assert pair.reason.startswith("the one before serves: errno:")
                assert session.run(frame(model)).backend == "npu"
                assert files(daemon) == kept
                # The second time it is known that new processes do not get it.
                os.kill(daemon.pid, signal.SIGHUP)
                until(lambda: backend_row(client)["state"] == "absent")

            # Asked whether it still holds, it does not.
            (pair,) = client.prepare_model("net", ["npu"], again=True).pairs
            assert pair.state in ("failed", "absent")


def files(daemon: DaemonProcess) -> dict[str, bytes]:
    folder = daemon.cache_dir / "models"
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def slow_down(daemon: DaemonProcess, model: Model) -> None:
    """Makes the prepared artefact a right but slow one: its first kernel runs often."""
    from dataclasses import replace

    from switchgear.backends.opencl import artefact as artefacts

    (path,) = (daemon.cache_dir / "models" / model.hash).glob("opencl-fp32-*")
    artefact = artefacts.read(str(path))
    extra = 50
    buffers = tuple(
        replace(buffer, first=buffer.first and buffer.first + extra, last=buffer.last + extra)
        for buffer in artefact.buffers
    )
    launches = (*(artefact.launches[0],) * extra, *artefact.launches)
    artefacts.write(replace(artefact, buffers=buffers, launches=launches), str(path))


def mapped(client: Client) -> list[bool]:
    """Of each artefact that an OpenCL worker has mapped: whether its file was replaced."""
    try:
        maps = [
            Path(f"/proc/{row['pid']}/maps").read_text() for row in workers(client, "opencl")
        ]
    except PermissionError:
        pytest.skip("a worker shows its memory to root only")

    lines = [line for text in maps for line in text.splitlines() if ".clart" in line]
    return [line.endswith("(deleted)") for line in lines]


def is_taken_over(daemon: DaemonProcess, frames: Frames, before: int) -> bool:
    return taken_over(daemon) > before or frames.error is not None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_gpus_worker_takes_over_what_was_checked_again(tmp_path: Path) -> None:
    require_vulkan()
    with device_daemon(tmp_path, "vulkan") as (daemon, client):
        client.load_model(small_network(), "net")
        model = client.prepare_model("net")
        with (
            client.open_session(model, backends=["vulkan"], strict=True) as session,
            Frames(session, frame(model), gap_s=0.15) as frames,
        ):
            # With its shaders compiled it loads faster: what had a worker of its own may share.
            for _ in range(2):
                before = taken_over(daemon)
                client.prepare_model("net", again=True)
                until(partial(is_taken_over, daemon, frames, before))
                assert frames.more()

            assert (frames.backends, frames.error) == ({"vulkan"}, None)
            until(lambda: len(workers(client, "vulkan")) == 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_faster_kernels_are_taken_over_by_the_worker_that_serves(tmp_path: Path) -> None:
    require_opencl()
    with device_daemon(tmp_path) as (daemon, client):
        client.load_model(small_network(), "net")
        model = client.prepare_model("net", ["opencl"], "fp32")
        fast = the_pair(client, "opencl", "fp32").figures["artefact"]
        slow_down(daemon, model)
        client.prepare_model("net", ["opencl"], "fp32", again=True)
        slow = the_pair(client, "opencl", "fp32").figures["artefact"]
        assert slow != fast
        with (
            client.open_session(model, backends=["opencl"], strict=True) as session,
            Frames(session, frame(model)) as frames,
        ):
            client.prepare_model("net", ["opencl"], "fp32", tune_s=5)
            tuned = the_pair(client, "opencl", "fp32").figures["artefact"]
            assert tuned != slow
            # The name is what the worker says of what it has loaded.
            until(lambda: taken_over(daemon, tuned) or frames.error)
            assert frames.more()
            assert (frames.backends, frames.error) == ({"opencl"}, None)
            # The old one is let go: frames run on the new one.
            until(lambda: mapped(client) == [False])
            # Searched for as long already, nothing is new.
            count = taken_over(daemon)
            client.prepare_model("net", ["opencl"], "fp32", tune_s=5)
            assert the_pair(client, "opencl", "fp32").figures["artefact"] == tuned
            assert taken_over(daemon) == count
