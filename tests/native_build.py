"""Builds the C parts of the tests: once a session, into a temporary folder, with cc."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from devices import missing

NATIVE = Path(__file__).parent / "native"
_FLAGS = ("-std=gnu11", "-O3", "-Wall", "-Wextra", "-Werror", "-Wno-deprecated-declarations")
_SHARED = ("-shared", "-fPIC", "-fvisibility=hidden")


@functools.cache
def folder() -> Path:
    """The session's folder; it goes away when the interpreter ends."""
    path = Path(tempfile.mkdtemp(prefix="switchgear-native-"))
    owner = os.getpid()

    def remove() -> None:
        # A forked child inherits this handler, but not the folder.
        if os.getpid() == owner:
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return path


@functools.cache
def library(name: str, *headers: str, define: str = "") -> Path:
    """`native/NAME.c` as a shared library, another one for each macro to `define`.

    Skips the test where there is no compiler or one of the `headers` is missing; code that does
    not compile is an error.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        missing("no C compiler (cc)")

    for header in headers:
        found = subprocess.run(
            [compiler, "-E", "-"], input=f"#include <{header}>\n".encode(), capture_output=True
        )
        if found.returncode:
            missing(f"the C header {header} is not installed")

    target = folder() / f"{name}{define}.so"
    source = NATIVE / f"{name}.c"
    built = subprocess.run(
        [compiler, *_FLAGS, *_SHARED, f"-DTEST{define}", "-o", str(target), str(source)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return target


def delegate() -> Path:
    """The TFLite external delegate of the tests; see `native/test_delegate.c`."""
    return library("test_delegate")


def lying_delegate() -> Path:
    """One whose numbers are wrong unless it is told otherwise."""
    return library("test_delegate", define="_LIES")


def vulkan_fault_layer() -> dict[str, str]:
    """What to add to an environment to have `SWITCHGEAR_TEST_FAULT` obeyed."""
    path = library("vulkan_fault_layer", "vulkan/vk_layer.h")
    manifest = {
        "file_format_version": "1.2.0",
        "layer": {
            "name": "VK_LAYER_SWITCHGEAR_fault",
            "type": "GLOBAL",
            "library_path": str(path),
            "api_version": "1.3.0",
            "implementation_version": "1",
            "description": "injects faults",
            "functions": {
                "vkGetInstanceProcAddr": "fault_layer_instance_proc",
                "vkGetDeviceProcAddr": "fault_layer_device_proc",
            },
        },
    }
    (folder() / "VkLayer_switchgear_fault.json").write_text(json.dumps(manifest))
    return {"VK_LAYER_PATH": str(folder()), "VK_INSTANCE_LAYERS": "VK_LAYER_SWITCHGEAR_fault"}


def stub_vulkan_driver() -> Path:
    """The manifest of a Vulkan driver that fails on demand; see `native/`."""
    path = library("stub_vulkan_driver", "vulkan/vk_icd.h")
    manifest = {
        "file_format_version": "1.0.0",
        "ICD": {"library_path": str(path), "api_version": "1.1.0"},
    }
    target = folder() / "stub_vulkan_driver.json"
    target.write_text(json.dumps(manifest))
    return target


def stub_opencl_driver() -> Path:
    """The library of an OpenCL driver that fails on demand; see `native/`."""
    return library("stub_opencl_driver", "CL/cl_icd.h")
