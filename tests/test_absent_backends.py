"""A backend that was absent at the start comes back: its driver appears under a real daemon."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import native_build
import pytest
from devices import require_opencl
from preparing_faults import (
    backend_row,
    device_daemon,
    npu_daemon,
    pair_state,
    until,
)
from random_frame import frame
from replaced_file import replace_file
from small_network import small_network

from switchgear.client import Client
from switchgear.client.models import BackendStatus
from switchgear.daemon.cli import doctor_places

pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]


def devices(client: Client) -> set[str]:
    return {row["name"] for row in client.status()["devices"]}


def is_absent(client: Client) -> BackendStatus:
    until(lambda: backend_row(client)["state"] == "absent")
    row = backend_row(client)
    assert "no such file" in row["reason"]
    return row


def test_a_driver_that_appears_is_found_prepared_for_and_used(tmp_path: Path) -> None:
    library = tmp_path / "delegate.so"
    with npu_daemon(delegate=library) as (daemon, client):
        client.load_model(small_network(), "net")
        assert "tried again when a driver's files change" in is_absent(client)["again"]
        until(lambda: pair_state(client) == "absent")
        model = client.describe("net")
        with client.open_session(model, backends=["npu", "cpu"]) as session:
            inputs = frame(model)
            assert session.run(inputs).backend == "cpu"
            until(lambda: devices(client) == {"cpu"})
            proofs = daemon.log_text().count("backend npu is absent")
            replace_file(library, native_build.delegate().read_bytes())
            # Nobody says anything: the daemon's own look finds it.
            until(lambda: pair_state(client) == "ready")
            now = backend_row(client)
            assert (now["state"], "again" in now) == ("ready", False)
            until(lambda: session.run(inputs).backend == "npu")
            assert devices(client) == {"cpu", "npu"}
            # Nothing had changed before: no process was started for it.
            assert daemon.log_text().count("backend npu is absent") == proofs == 1


def test_a_reload_asks_at_once(tmp_path: Path) -> None:
    library = tmp_path / "delegate.so"
    with npu_daemon(delegate=library) as (daemon, client):
        is_absent(client)
        # What the answer depends on is not always to be seen.
        said = doctor_places.daemon(str(daemon.socket)).text
        assert "; npu is absent for it: errno:2 ENOENT" in said
        assert "tried again when a driver's files change" in said
        os.kill(daemon.pid, signal.SIGHUP)
        until(lambda: daemon.log_text().count("backend npu is absent") == 2)
        assert backend_row(client)["state"] == "absent"


def test_a_job_asks_at_once(tmp_path: Path) -> None:
    library = tmp_path / "delegate.so"
    with npu_daemon(delegate=library) as (daemon, client):
        client.load_model(small_network(), "net")
        is_absent(client)
        replace_file(library, native_build.delegate().read_bytes())
        assert client.prepare_model("net", ["npu"]).pairs[0].state == "ready"
        assert "backend npu was absent and is there now" in daemon.log_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_opencl_driver_that_is_installed_later_serves(tmp_path: Path) -> None:
    require_opencl()
    vendors = tmp_path / "vendors"
    vendors.mkdir()
    # The folder of OpenCL's loader, which is empty at first.
    with device_daemon(tmp_path, OCL_ICD_VENDORS=str(vendors)) as (_, client):
        client.load_model(small_network(), "net")
        until(lambda: backend_row(client, "opencl")["state"] == "absent")
        assert "opencl:-1001" in backend_row(client, "opencl")["reason"]
        (known,) = list(Path("/etc/OpenCL/vendors").glob("pocl*.icd"))[:1]
        (vendors / known.name).write_bytes(known.read_bytes())
        until(lambda: backend_row(client, "opencl")["state"] == "ready")
        model = client.prepare_model("net", ["opencl"], "fp32")
        with client.open_session(model, backends=["opencl"], strict=True) as session:
            assert session.run(frame(model)).backend == "opencl"
