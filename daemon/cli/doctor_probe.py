"""One probe of `switchgear doctor`, in a process that a driver may kill.

`python -m switchgear.daemon.cli.doctor_probe NAME` prints one line of JSON: `{"ok", "what",
"text"}`. `what` names the first thing that is missing, for which `doctor` knows the command.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from switchgear.backends.registry import open_backend
from switchgear.ipc.errors import DriverError, NoBackend, SwitchgearError

VULKAN_LOADER: Final = "libvulkan.so.1"
OPENCL_LOADER: Final = "libOpenCL.so.1"


def cpu() -> dict[str, Any]:
    """The engine, and the backend's known-answer run on it."""
    from switchgear.backends.cpu import CpuBackend

    try:
        backend = CpuBackend({"threads": 1})
    except DriverError as error:
        return _missing("engine", error.text)

    try:
        return _fine(backend.probe())
    except DriverError as error:
        return _missing("answer", str(error))


def vulkan() -> dict[str, Any]:
    """The loader, the Python package, and the devices that the drivers present."""
    problem = _cannot_open(VULKAN_LOADER)
    if problem:
        return _missing("vulkan loader", problem)

    from switchgear.backends.vulkan_compute.api import Instance, Vulkan

    try:
        instance = Instance(Vulkan())
    except NoBackend as error:
        return _missing("vulkan package", error.text)
    except DriverError as error:
        return _missing("vulkan driver", str(error))

    try:
        devices = [
            f"{device.subject.name} ({device.subject.device_type})"
            for device in instance.devices()
        ]
    except DriverError as error:
        return _missing("vulkan driver", str(error))
    finally:
        instance.close()

    if not devices:
        return _missing("vulkan driver", "no device")

    return _served("vulkan", "vulkan engine", ", ".join(devices))


def opencl() -> dict[str, Any]:
    """The Python package, which brings a loader of its own, and the platforms' devices."""
    try:
        cl: Any = importlib.import_module("pyopencl")
    except ImportError as error:
        return _missing("opencl package", str(error))

    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        return _missing("opencl driver", f"opencl:{error.code} {str(error).splitlines()[0]}")

    found = []
    for platform in platforms:
        try:
            devices = platform.get_devices()
        except cl.Error as error:
            found.append(f"{platform.name}: opencl:{error.code}")
            continue

        found += [f"{device.name.strip()} ({platform.name.strip()})" for device in devices]

    if not found:
        return _missing("opencl driver", "no platform presents a device")

    loader = _cannot_open(OPENCL_LOADER)
    note = f"; other programs lack the loader: {loader}" if loader else ""
    return _served("opencl", "opencl engine", ", ".join(found) + note)


def npu() -> dict[str, Any]:
    """A vendor's library that takes a convolution, by the configuration's options."""
    return _served("npu", "npu library", "")


PROBES: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "cpu": cpu,
    "vulkan": vulkan,
    "opencl": opencl,
    "npu": npu,
}


def _served(name: str, what: str, devices: str) -> dict[str, Any]:
    """Opens the backend itself and has it run something with a known answer."""
    options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    try:
        backend = open_backend(name, options)
        proof = backend.probe()
    except (DriverError, SwitchgearError) as error:
        return _missing(what, f"{devices}: {error}" if devices else str(error))

    backend.close()
    return _fine(f"{devices}; {proof}" if devices else proof)


def _cannot_open(library: str) -> str:
    """Why the dynamic linker does not open a library; empty where it does."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)

    return ""


def _fine(text: str) -> dict[str, Any]:
    return {"ok": True, "what": "", "text": text}


def _missing(what: str, text: str) -> dict[str, Any]:
    return {"ok": False, "what": what, "text": text}


def main() -> int:
    # Drivers write to stdout as they like: the answer gets a descriptor of its own.
    answer = os.dup(1)
    os.dup2(2, 1)
    result = PROBES[sys.argv[1]]()
    with os.fdopen(answer, "w") as stream:
        stream.write(json.dumps(result) + "\n")

    return 0


if __name__ == "__main__":
    sys.exit(main())
