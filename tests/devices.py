"""What a test needs of the machine: each helper returns it, or skips the test with the reason.

With SWITCHGEAR_REQUIRE_DEVICES=1 (set by `.ci/run`) a missing one fails the test instead, so
that a run that is meant to see every device cannot pass without them. Drivers are tried in a
process of their own, once per run: some abort, and none of them lets go of its descriptors.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

PROBE_LIMIT_S = 15.0

VULKAN_PROBE = """
import json
from vulkan import ffi, lib

info = ffi.new("VkInstanceCreateInfo *", {"sType": lib.VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO})
instance = ffi.new("VkInstance *")
status = lib.vkCreateInstance(info, ffi.NULL, instance)
if status:
    raise SystemExit(f"vkCreateInstance returned {status}: no Vulkan driver")

count = ffi.new("uint32_t *")
lib.vkEnumeratePhysicalDevices(instance[0], count, ffi.NULL)
devices = ffi.new("VkPhysicalDevice[]", count[0])
lib.vkEnumeratePhysicalDevices(instance[0], count, devices)
names = []
for device in devices:
    properties = ffi.new("VkPhysicalDeviceProperties *")
    lib.vkGetPhysicalDeviceProperties(device, properties)
    names.append(ffi.string(properties.deviceName).decode())

print(json.dumps(names))
"""

OPENCL_PROBE = """
import json
import pyopencl

platforms = pyopencl.get_platforms()
print(json.dumps([device.name for platform in platforms for device in platform.get_devices()]))
"""

COMPILER_PROBE = '#include <stdio.h>\nint main(void) { return puts("ok") < 0; }\n'


def missing(what: str) -> NoReturn:
    """Skips the running test, or fails it where SWITCHGEAR_REQUIRE_DEVICES is 1."""
    if os.environ.get("SWITCHGEAR_REQUIRE_DEVICES") == "1":
        pytest.fail(f"required on this machine, but missing: {what}", pytrace=False)

    pytest.skip(what)


def require_vulkan() -> list[str]:
    """The names of the Vulkan devices, at least one (lavapipe counts)."""
    return _devices("Vulkan", VULKAN_PROBE, "mesa-vulkan-drivers libvulkan1")


def require_opencl() -> list[str]:
    """The names of the OpenCL devices, at least one (PoCL counts)."""
    return _devices("OpenCL", OPENCL_PROBE, "pocl-opencl-icd ocl-icd-libopencl1")


def require_compiler() -> str:
    """The path of a C compiler that compiles and links; delegates are built with it."""
    path, reason = _compiler()
    if reason:
        missing(f"no C compiler ({reason}); install gcc libc6-dev")

    return path


def require_header(header: str, package: str) -> None:
    """`#include <header>` works; `package` is the Debian package that brings it."""
    compiler = require_compiler()
    if not _has_header(compiler, header):
        missing(f"no C header {header}; install {package}")


def require_glslang() -> str:
    """The path of glslangValidator."""
    return require_program("glslangValidator", "glslang-tools")


def require_program(name: str, package: str) -> str:
    """The path of a program on PATH; `package` is the Debian package that brings it."""
    path = shutil.which(name)
    if path is None:
        missing(f"no {name}; install {package}")

    return path


def require_systemd_container() -> str:
    """The path of systemd-nspawn, which needs root to boot anything."""
    path = require_program("systemd-nspawn", "systemd-container")
    if os.geteuid() != 0:
        pytest.skip("booting a container needs root")

    return path


def _devices(api: str, probe: str, packages: str) -> list[str]:
    names, reason = probe_devices(probe)
    if not names:
        missing(f"no {api} device ({reason or 'the driver lists none'}); install {packages}")

    return names


@functools.cache
def probe_devices(source: str) -> tuple[list[str], str]:
    """Device names printed by `source` in a new process, or the reason there are none."""
    try:
        result = subprocess.run(
            [sys.executable, "-c", source],
            capture_output=True,
            text=True,
            timeout=PROBE_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return [], f"the probe hung for {PROBE_LIMIT_S:.0f} s"

    if result.returncode != 0:
        said = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        return [], said[-1]

    return json.loads(result.stdout.splitlines()[-1]), ""


@functools.cache
def _compiler() -> tuple[str, str]:
    path = os.environ.get("CC") or shutil.which("cc")
    if not path:
        return "", "no cc on PATH"

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text(COMPILER_PROBE)
        result = subprocess.run(
            [path, str(source), "-o", str(source.with_suffix(""))],
            capture_output=True,
            text=True,
        )

    return path, result.stderr.strip().partition("\n")[0] if result.returncode else ""


@functools.cache
def _has_header(compiler: str, header: str) -> bool:
    source = f"#include <{header}>\n"
    result = subprocess.run([compiler, "-E", "-"], input=source, capture_output=True, text=True)
    return result.returncode == 0
