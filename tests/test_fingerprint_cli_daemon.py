"""`switchgear fingerprint` beside a running daemon, and beside one that went away."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from cli_command import PREFIX, environment, switchgear
from fingerprint_daemon import (
    measuring_daemon,
    measuring_processes,
    store_profile,
    stored,
)
from profile_helpers import profile
from raw_client import Control
from sysfs_tree import add_zone

from switchgear.fingerprints.measurement import NPU_UTILISATION, TESTS
from switchgear.fingerprints.profile import Profile
from switchgear.fingerprints.store import ProfileStore

# Up to nine commands beside a daemon, each of which starts a Python.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]


def test_the_daemon_measures_and_its_profile_is_shown(tmp_path: Path) -> None:
    elsewhere = {"SWITCHGEAR_STATE_DIR": str(tmp_path / "nothing here")}
    with measuring_daemon() as daemon:
        place = ("--socket", daemon.socket)
        empty = switchgear("fingerprint", "dump", *place, env=elsewhere)
        assert (empty.returncode, empty.stdout) == (1, "")
        assert "the daemon has no profile" in empty.stderr

        run = switchgear("fingerprint", "run", "--test", NPU_UTILISATION, "--json", *place)
        assert run.returncode == 0, run.stderr
        measured = Profile.model_validate_json(run.stdout)
        assert measured == stored(daemon)
        assert f"{NPU_UTILISATION}: never measured" in run.stderr
        assert f"100% {NPU_UTILISATION}: done" in run.stderr

        shown = switchgear("fingerprint", "show", *place, env=elsewhere)
        assert shown.returncode == 0
        assert "no external" in shown.stdout
        assert "cpu is out of date: never measured" in shown.stderr
        dumped = switchgear("fingerprint", "dump", "--format", "xml", *place, env=elsewhere)
        assert "<device_fingerprint" in dumped.stdout
        other = tmp_path / "other.json"
        other.write_text(profile().model_dump_json())
        assert switchgear("fingerprint", "diff", other, *place, env=elsewhere).returncode == 0

        again = switchgear("fingerprint", "run", "--test", NPU_UTILISATION, "--json", *place)
        assert (again.returncode, again.stdout) == (0, run.stdout)
        assert "nothing has changed" in again.stderr

    # Gone: what it has stored is there still.
    left = {"SWITCHGEAR_STATE_DIR": str(tmp_path / "left")}
    assert ProfileStore(tmp_path / "left").save(measured) is None
    after = switchgear("fingerprint", "dump", *place, env=left)
    assert Profile.model_validate_json(after.stdout) == measured


def test_without_the_daemon_although_one_answers(tmp_path: Path) -> None:
    daemon = measuring_daemon()
    store_profile(daemon)
    with daemon:
        place = ("--socket", daemon.socket)
        none = switchgear("fingerprint", "dump", *place, "--store", tmp_path)
        assert (none.returncode, none.stdout) == (1, "")
        env = {"SWITCHGEAR_STATE_DIR": str(tmp_path)}
        run = ("fingerprint", "run", "--no-daemon", "--test", NPU_UTILISATION, "--json", *place)
        done = switchgear(*run, env=env)
        assert done.returncode == 0, done.stderr
        assert Profile.model_validate_json(done.stdout) == ProfileStore(tmp_path).load().profile
        theirs = switchgear("fingerprint", "dump", *place, env=env)
        assert theirs.stdout != done.stdout


def test_an_interrupted_run_ends_in_the_daemon_too(tmp_path: Path) -> None:
    add_zone(tmp_path, 0, "cpu-thermal", 90_000)
    with measuring_daemon(sysfs=tmp_path) as daemon, Control(daemon.socket) as control:
        command = [*PREFIX, "fingerprint", "run", "--socket", str(daemon.socket)]
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment()
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if "waiting: the cpu is at 90.0 C" in line:
                    break

            process.send_signal(signal.SIGINT)
            assert "interrupted" in process.stderr.read()
            assert process.wait() == 1

        while control.call("GetStatus")["jobs"]:
            pass

        assert not measuring_processes(daemon)
        assert list(control.call("GetFingerprint")["stale"]) == list(TESTS)


def test_json_of_show_is_the_profile() -> None:
    daemon = measuring_daemon()
    before = store_profile(daemon)
    with daemon:
        shown = switchgear("fingerprint", "show", "--json", "--socket", daemon.socket)
        assert json.loads(shown.stdout)["measured_at"] == before.measured_at
        assert Profile.model_validate_json(shown.stdout) == before
