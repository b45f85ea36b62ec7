"""`switchgear doctor`: on this machine as it is, and with one thing at a time taken away."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import native_build
import pytest
from cli_command import switchgear, switchgear_json
from daemon_process import DaemonProcess

from switchgear.daemon.cli import doctor, doctor_fixes, doctor_places

# Each run of the command proves every backend.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(90)]


def checks(status: int, *arguments: str | Path, env: dict[str, str] | None = None) -> Any:
    told = switchgear_json("doctor", *arguments, status=status, env=env)
    assert told["ok"] is (status == 0)
    return {check["name"]: check for check in told["checks"]}


def without_drivers(folder: Path) -> dict[str, str]:
    """An environment whose probes end at once: what a test does not look at takes no time."""
    nothing = str(folder / "nothing")
    return {"VK_DRIVER_FILES": nothing, "VK_ICD_FILENAMES": nothing, "OCL_ICD_VENDORS": nothing}


def test_this_machine_with_a_daemon() -> None:
    with DaemonProcess() as daemon:
        common = ("--socket", daemon.socket, "--config", daemon.config)
        found = checks(0, *common)
        assert set(doctor.BACKENDS) < set(found)
        for name in ("python", "cpu", "configuration", "socket folder", "daemon"):
            assert found[name]["state"] == "ok", found[name]
            assert found[name]["fix"] == ""

        assert "sum and product exact" in found["cpu"]["text"]
        assert f"pid {daemon.pid}, ready" in found["daemon"]["text"]
        done = switchgear("doctor", *common)
        lines = done.stdout.splitlines()
        assert lines[0].startswith("fine: cpu")
        assert max(len(line) for line in lines if "fix:" not in line) <= 80


def test_what_is_missing_has_a_command(tmp_path: Path) -> None:
    socket = tmp_path / "run" / "s.sock"
    found = checks(0, "--socket", socket, env=without_drivers(tmp_path))
    for name in ("vulkan", "opencl", "daemon"):
        assert found[name]["state"] == "missing", found[name]
        assert found[name]["fix"]

    assert "VK_ERROR_INCOMPATIBLE_DRIVER" in found["vulkan"]["text"]
    assert "opencl:-1001" in found["opencl"]["text"]
    assert found["daemon"]["fix"] == f"switchgear serve --socket {socket}"
    # The folder is not there yet, but this user can make it.
    assert found["socket folder"]["state"] == "ok"


def test_no_engine_stops_a_daemon(tmp_path: Path) -> None:
    for package in ("ai_edge_litert", "tflite_runtime"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('hidden by a test')\n")

    env = {"PYTHONPATH": str(tmp_path), **without_drivers(tmp_path)}
    found = checks(1, env=env)
    assert "hidden by a test" in found["cpu"]["text"]
    assert "pip install 'ai-edge-litert" in found["cpu"]["fix"]
    done = switchgear("doctor", env=env)
    assert done.stdout.startswith("NOT FINE: a daemon cannot serve here: cpu")


@pytest.mark.parametrize(
    ("package", "backend", "extra"),
    [("pyopencl", "opencl", "opencl"), ("vulkan", "vulkan", "vulkan")],
)
def test_a_missing_package_is_an_extra(
    tmp_path: Path, package: str, backend: str, extra: str
) -> None:
    (tmp_path / f"{package}.py").write_text("raise ImportError('hidden by a test')\n")
    found = checks(0, env={"PYTHONPATH": str(tmp_path), **without_drivers(tmp_path)})
    assert found[backend]["state"] == "missing"
    assert f"pip install 'switchgear[{extra}]'" in found[backend]["fix"]


def test_no_vulkan_loader(tmp_path: Path) -> None:
    (tmp_path / "libvulkan.so.1").write_bytes(b"")
    found = checks(0, env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert "libvulkan.so.1: file too short" in found["vulkan"]["text"]
    assert found["vulkan"]["fix"] == doctor_fixes.fix("vulkan loader")


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ("segfault", "the driver killed the probe with SIGSEGV"),
        pytest.param("exit", "the probe ended with status 3", marks=pytest.mark.slow),
        ("scribble", "a driver ended the probe, or wrote into its answer"),
    ],
)
def test_a_driver_that_kills_costs_its_own_line(mode: str, sentence: str) -> None:
    env = {
        "VK_DRIVER_FILES": str(native_build.stub_vulkan_driver()),
        "VK_ICD_FILENAMES": str(native_build.stub_vulkan_driver()),
        "OCL_ICD_VENDORS": "/nowhere",
        "SWITCHGEAR_TEST_VULKAN_DRIVER": mode,
    }
    found = checks(0, env=env)
    assert sentence in found["vulkan"]["text"]
    assert found["vulkan"]["fix"] == "switchgear fingerprint run --test vulkan_matmul"
    assert found["cpu"]["state"] == "ok"


def test_a_driver_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = str(native_build.stub_vulkan_driver())
    for name, value in (
        ("VK_DRIVER_FILES", manifest),
        ("VK_ICD_FILENAMES", manifest),
        ("SWITCHGEAR_TEST_VULKAN_DRIVER", "hang"),
    ):
        monkeypatch.setenv(name, value)

    check = doctor.probe("vulkan", limit_s=2.0)
    assert (check.state, check.text) == ("missing", "the probe did not end within 2 s")


def test_a_wrong_configuration_names_the_key(tmp_path: Path) -> None:
    none = without_drivers(tmp_path)
    file = tmp_path / "my config.toml"
    file.write_text("[cpu]\nthread = 1\n")
    found = checks(1, "--config", file, env=none)
    assert "unknown key cpu.thread; did you mean threads?" in found["configuration"]["text"]
    assert found["configuration"]["fix"] == f"${{EDITOR:-vi}} '{file}'"

    file.write_text(f'[[models]]\npath = "{tmp_path}/gone.tflite"\n')
    found = checks(1, "--config", file, env=none)
    assert "the resident model" in found["configuration"]["text"]

    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    found = checks(1, env={**none, **home, "SWITCHGEAR_CPU__THREADS": "many"})
    assert found["configuration"]["fix"] == "unset SWITCHGEAR_CPU__THREADS"


def test_a_socket_folder_that_others_may_write_to(tmp_path: Path) -> None:
    shared = tmp_path / "run dir"
    shared.mkdir()
    shared.chmod(0o777)
    none = without_drivers(tmp_path)
    found = checks(1, "--socket", shared / "s.sock", env=none)
    assert found["socket folder"]["fix"] == f"chmod go-w '{shared}'"
    # A folder like /tmp is not to be changed.
    shared.chmod(0o1777)
    found = checks(1, "--socket", shared / "s.sock", env=none)
    assert found["socket folder"]["fix"] == (
        f"switchgear serve --socket '{shared}'/switchgear/switchgear.sock"
    )


def node(path: Path, mode: int) -> None:
    """A file in the place of a device node; its mode is what counts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    path.chmod(mode)


def test_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_places.render_nodes(tmp_path).state == "absent"
    assert doctor_places.npu(tmp_path).state == "absent"
    render, accel = tmp_path / "dri" / "renderD128", tmp_path / "accel" / "accel0"
    node(render, 0o660)
    node(accel, 0o600)
    assert doctor_places.render_nodes(tmp_path).text == str(render)
    assert doctor_places.npu(tmp_path).state == "ok"

    # As for a user who is not root and in no group.
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        patch.setattr(os, "geteuid", lambda: 4_000_000)
        closed = doctor_places.npu(tmp_path)
        gpu = doctor_places.opening(str(render), _with_group(os.stat(render), 1))

    assert closed.state == "missing"
    assert closed.fix == f"sudo setfacl -m u:4000000:rw {accel}"
    assert gpu == "sudo usermod -aG daemon 4000000, then log in again"


def _with_group(status: os.stat_result, gid: int) -> os.stat_result:
    fields = list(status)
    fields[5] = gid
    return os.stat_result(fields)


def test_commands_of_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    def only(program: str) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: name if name == program else None)

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    only("apt-get")
    assert doctor_fixes.fix("vulkan driver") == "sudo apt-get install mesa-vulkan-drivers"
    only("dnf")
    assert doctor_fixes.fix("vulkan loader") == "sudo dnf install vulkan-loader"
    only("pacman")
    assert doctor_fixes.fix("opencl driver") == "sudo pacman -S pocl"
    only("none of them")
    assert "this system's package manager" in doctor_fixes.fix("opencl driver")
