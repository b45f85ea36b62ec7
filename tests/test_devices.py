"""The device helpers: what is here is found by a real call, what is not gives the reason."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import devices
import pytest

if TYPE_CHECKING:
    from pathlib import Path


def test_a_vulkan_device_is_named() -> None:
    assert all(devices.require_vulkan())


def test_an_opencl_device_is_named() -> None:
    assert all(devices.require_opencl())


def test_the_compiler_makes_a_program_that_runs(tmp_path: Path) -> None:
    compiler = devices.require_compiler()
    source = tmp_path / "answer.c"
    source.write_text("int main(void) { return 42; }\n")
    subprocess.run([compiler, str(source), "-o", str(tmp_path / "answer")], check=True)

    assert subprocess.run([str(tmp_path / "answer")]).returncode == 42


def test_glslang_makes_spirv(tmp_path: Path) -> None:
    source = tmp_path / "empty.comp"
    source.write_text("#version 450\nvoid main() {}\n")
    target = tmp_path / "empty.spv"
    subprocess.run(
        [devices.require_glslang(), "-V", str(source), "-o", str(target)],
        check=True,
        capture_output=True,
    )

    assert target.read_bytes()[:4] == (0x07230203).to_bytes(4, "little")


def test_the_container_program_answers() -> None:
    said = subprocess.run(
        [devices.require_systemd_container(), "--version"], check=True, capture_output=True
    )

    assert said.stdout.startswith(b"systemd ")


@pytest.mark.parametrize("required", ["0", "1"])
def test_what_is_missing_skips_or_fails_with_the_package(
    required: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWITCHGEAR_REQUIRE_DEVICES", required)
    outcome = pytest.fail.Exception if required == "1" else pytest.skip.Exception

    with pytest.raises(outcome, match="no switchgear-nothing; install a-package"):
        devices.require_program("switchgear-nothing", "a-package")

    devices.require_compiler()
    with pytest.raises(outcome, match="no C header nothing; install a-package"):
        devices.require_header("nothing", "a-package")


def test_the_drivers_headers_are_found() -> None:
    devices.require_header("vulkan/vk_layer.h", "libvulkan-dev")
    devices.require_header("CL/cl_icd.h", "opencl-c-headers")


def test_a_driver_that_is_not_there_gives_the_driver_s_own_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices.require_vulkan()
    monkeypatch.setenv("VK_ICD_FILENAMES", "/nonexistent.json")
    monkeypatch.setenv("VK_DRIVER_FILES", "/nonexistent.json")
    probe = devices.probe_devices.__wrapped__  # past the cache

    names, reason = probe(devices.VULKAN_PROBE)

    assert names == []
    assert "vkCreateInstance returned -9" in reason


def test_a_probe_that_crashes_is_a_reason() -> None:
    names, reason = devices.probe_devices("import os; os.abort()")

    assert (names, reason) == ([], "exit status -6")
