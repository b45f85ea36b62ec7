"""The daemon measures its device: at the first start, after an update, when it is asked to."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from devices import require_opencl, require_vulkan
from fingerprint_daemon import (
    MEASURED_AT,
    MEASURING,
    background_job,
    first_run,
    measuring_daemon,
    measuring_processes,
    profile_file,
    result_of,
    store_profile,
    stored,
    until_phase,
    watch,
)
from measure_helpers import lavapipe, vulkan_drivers
from raw_client import CallFailed, Control

from switchgear.backends import generate
from switchgear.fingerprints.measurement import (
    NPU_UTILISATION,
    OPENCL_BANDWIDTH,
    TESTS,
    VULKAN_MATMUL,
    Value,
)
from switchgear.fingerprints.profile import Profile
from switchgear.fingerprints.store import ProfileStore

pytestmark = pytest.mark.engine
FRAMES = 60
NOBODY = 65534
# Nothing else runs under SCHED_IDLE: on a busy machine it takes its time.
PATIENT = pytest.mark.timeout(60)


def profile_of(reply: dict[str, Any]) -> Profile:
    return Profile.model_validate_json(json.dumps(reply["fingerprint"]))


def test_the_first_start_measures_in_the_background_and_serves() -> None:
    with (
        measuring_daemon(background=True, fingerprint="patience_s = 0", quick=False) as daemon,
        Control(daemon.socket) as control,
        Control(daemon.socket) as other,
    ):
        assert list(control.call("GetFingerprint")["stale"]) == list(TESTS)
        said = watch(other, background_job(control))
        control.load(generate.identity((4,)), name="same")
        with control.open_session("same") as session:
            until_phase(said, MEASURING)
            served = 0
            while not measuring_processes(daemon):
                pass

            for frame in range(FRAMES):
                values = [float(frame), 1.0, -2.0, 0.5]
                session.write(0, values)
                session.infer(frame + 1)
                reply = session.receive()
                assert (reply.request_id, reply.status_code) == (frame + 1, 0)
                assert session.read(reply.output_slot, 4) == values
                served += 1

            status = control.call("GetStatus")["fingerprint"]
            assert (served, status["measuring"]) == (FRAMES, True)
            assert "measured_at" not in status

        # The stop is in the middle of a test; no process may stay. There is none between two.
        while not measuring_processes(daemon):
            assert control.call("GetStatus")["fingerprint"]["measuring"]

        state_dir = daemon.state_dir
        daemon.stop()
        assert ProfileStore(state_dir).load().profile is None
        daemon.start()


@PATIENT
def test_a_restart_measures_nothing_again() -> None:
    daemon = measuring_daemon(background=True)
    before = store_profile(daemon)
    with daemon, Control(daemon.socket) as control:
        control.call("GetFingerprint")
        # It may have ended before it could be asked for; it was the first job.
        assert result_of(watch(control, 1)) == {"measured": {}, "saved": False, "problems": []}
        assert not measuring_processes(daemon)
        known = control.call("GetFingerprint")
        assert profile_of(known) == before
        assert (known["stale"], known["measuring"], known["problems"]) == ({}, False, [])
        assert control.call("GetStatus")["fingerprint"] == {
            "measured_at": MEASURED_AT,
            "schema": 2,
            "stale": [],
            "measuring": False,
        }


@PATIENT
def test_an_updated_driver_alone_is_measured_again(tmp_path: Path) -> None:
    require_vulkan()
    manifest = tmp_path / "driver.json"
    content = json.loads(lavapipe().read_text())
    manifest.write_text(json.dumps(content))
    daemon = measuring_daemon(background=True, environment=vulkan_drivers(manifest))
    before = store_profile(daemon)
    content["ICD"]["api_version"] = "1.1.0"
    manifest.write_text(json.dumps(content))
    with daemon, Control(daemon.socket) as control:
        # It may have ended before it could be asked for; it was the first job.
        assert list(control.call("GetFingerprint")["stale"]) in ([VULKAN_MATMUL], [])
        result = result_of(watch(control, 1))
        assert list(result["measured"]) == [VULKAN_MATMUL]
        assert "driver.json" in result["measured"][VULKAN_MATMUL][0]
        known = control.call("GetFingerprint")
        assert known["stale"] == {}
        now = profile_of(known)
        assert now == stored(daemon)
        (entry,) = now.of_test(VULKAN_MATMUL)
        latency = entry.value("matmul_ms")
        assert isinstance(latency, Value)
        assert latency.median > 0
        assert entry.subject is not None
        assert "llvmpipe" in entry.subject.name
        for test in (OPENCL_BANDWIDTH, NPU_UTILISATION):
            kept = [e.model_dump(exclude={"device_id"}) for e in before.of_test(test)]
            assert [e.model_dump(exclude={"device_id"}) for e in now.of_test(test)] == kept


@PATIENT
def test_a_run_tells_its_progress_and_its_profile_comes_in_three_formats() -> None:
    names = require_opencl()
    with measuring_daemon() as daemon, Control(daemon.socket) as control:
        with Control(daemon.socket) as other:
            said = list(first_run(other, tests=[OPENCL_BANDWIDTH]))

        assert said[-1]["state"] == "done"
        assert list(said[-1]["result"]["measured"]) == [OPENCL_BANDWIDTH]
        done = [state["done"] for state in said]
        assert done == sorted(done)
        assert len(set(done)) > 3
        assert (done[-1], {state["total"] for state in said}) == (1000, {1000})
        phases = {state["phase"] for state in said}
        assert {f"{OPENCL_BANDWIDTH}: {name}" for name in names} <= phases

        known = control.call("GetFingerprint")
        profile = profile_of(known)
        assert profile == stored(daemon)
        assert list(known["stale"]) == [test for test in TESTS if test != OPENCL_BANDWIDTH]
        text = control.call("GetFingerprint", format="json")["document"]
        assert Profile.model_validate_json(text) == profile
        root = ET.fromstring(control.call("GetFingerprint", format="xml")["document"])
        assert float(root.findtext("opencl_bandwidth_mb_s") or 0) > 0
        table = control.call("GetFingerprint", format="table")["document"]
        assert "OpenCL bandwidth" in table
        assert max(len(line) for line in table.splitlines()) <= 80

        with pytest.raises(CallFailed, match=r"BadRequest.*json, xml, table"):
            control.call("GetFingerprint", format="yaml")

        with pytest.raises(CallFailed, match=r"BadRequest.*no test 'melt'"):
            control.call("RunFingerprint", tests=["melt"])


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def newer(data: bytes) -> bytes:
    return data.replace(b'"schema": 2', b'"schema": 3')


BAD_FILES = {
    "cut": (cut, "not JSON"),
    "empty": (lambda data: b"", "empty"),
    "nul": (lambda data: bytes(len(data)), "NUL"),
    "newer schema": (newer, "schema 3 is newer"),
    "changed": (lambda data: data.replace(b"6000.0", b"6001.0"), "checksum"),
}


# The store's own tests have each of them; two show that the daemon does as it says.
OFTEN = ("cut", "newer schema")


@PATIENT
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k in OFTEN else [pytest.mark.slow]) for k in BAD_FILES],
)
def test_a_bad_profile_is_told_set_aside_and_measured_again(kind: str) -> None:
    spoil, word = BAD_FILES[kind]
    daemon = measuring_daemon()
    store_profile(daemon)
    path = profile_file(daemon)
    bad = spoil(path.read_bytes())
    path.write_bytes(bad)
    with daemon, Control(daemon.socket) as control:
        known = control.call("GetFingerprint")
        (problem,) = known["problems"]
        assert word in problem
        assert problem in daemon.log_text()
        assert control.call("GetStatus")["fingerprint"]["problem"] == problem
        assert "fingerprint" not in known
        assert list(known["stale"]) == list(TESTS)
        (aside,) = path.parent.glob("fingerprint.json.bad-*")
        assert str(aside) in problem
        assert aside.read_bytes() == bad

        job = control.call("RunFingerprint", tests=[NPU_UTILISATION])["job"]
        with Control(daemon.socket) as other:
            assert result_of(watch(other, job))["saved"] is True

        measured = stored(daemon)
        daemon.stop()
        daemon.start()
        with Control(daemon.socket) as again:
            known = again.call("GetFingerprint")
            assert known["problems"] == []
            assert profile_of(known) == measured


def test_after_a_bad_profile_the_background_begins_from_nothing() -> None:
    daemon = measuring_daemon(background=True, quick=False)
    store_profile(daemon)
    profile_file(daemon).write_bytes(bytes(100))
    with daemon, Control(daemon.socket) as control, Control(daemon.socket) as other:
        until_phase(watch(other, background_job(control)), MEASURING)
        assert list(control.call("GetFingerprint")["stale"]) == list(TESTS)


def test_another_user_may_look_but_not_measure() -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")

    with measuring_daemon() as daemon:
        for folder in (daemon.folder, daemon.socket.parent):
            folder.chmod(0o755)

        daemon.socket.chmod(0o666)
        # The kernel takes the other side's user at the moment of the connect.
        os.seteuid(NOBODY)
        try:
            control = Control(daemon.socket)
        finally:
            os.seteuid(0)

        with control:
            assert list(control.call("GetFingerprint")["stale"]) == list(TESTS)
            with pytest.raises(CallFailed, match="PermissionDenied"):
                control.call("RunFingerprint")

        assert daemon.call("GetStatus")["parameters"]["jobs"] == []
