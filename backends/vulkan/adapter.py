"""Which Vulkan device the engine has taken, and that it is one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from switchgear.backends.vulkan_compute.api import Instance, Vulkan
from switchgear.ipc.errors import DriverError, NoBackend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from switchgear.backends.contract import ModelInfo
    from switchgear.backends.subject import Subject

# LiteRtTensorBufferType (litert/c/litert_tensor_buffer_types.h): 20 to 29 are of WebGPU, which
# is how this engine sees Vulkan; 1 is memory of the host.
_WEBGPU_TYPES: Final = range(20, 30)
_TAKEN: Final = "Initializing WebGPU-based API from graph"
_SELECTED: Final = re.compile(
    r"Selected adapter: (?P<name>.+), arch=(?P<arch>[^,]*), vendor=(?P<vendor>[^,]*), "
    r"backend=(?P<api>\w+), adapterType=(?P<type>.+)"
)


def check_on_gpu(types: set[int], said: str, info: ModelInfo) -> None:
    """Holds a compiled model against what shows that it is on the GPU.

    The engine calls models accelerated that it runs on the CPU. The memory types of its tensors
    tell, but not of quantised ones: it turns those into floats on the CPU first. For them what
    it said while it compiled has to do, that its GPU kernels took the graph.

    :raises DriverError: nothing shows it.
    """
    if types and all(number in _WEBGPU_TYPES for number in types):
        return

    quantised = all(spec.dtype in ("int8", "uint8") for spec in (*info.inputs, *info.outputs))
    if quantised and _TAKEN in said:
        return

    raise DriverError(
        "litert",
        3,
        "kLiteRtStatusErrorRuntimeFailure",
        f"the model is not on the GPU: its buffers are of the types {sorted(types)}",
    )


def selected(said: str) -> str:
    """The name of the device that the engine says to have taken, empty where it says none.

    :raises DriverError: it took one through another API than Vulkan.
    """
    found = _SELECTED.search(said)
    if found is None:
        return ""

    if found["api"] != "Vulkan":
        raise DriverError(
            "litert",
            6,
            "kLiteRtStatusErrorNotFound",
            f"the engine uses {found['name']} through {found['api']}, not Vulkan",
        )

    return found["name"]


def identity_of(name: str) -> Mapping[str, str]:
    """Device and driver of the Vulkan device of this name.

    Devices of one name through several drivers are all named: the engine does not tell which.

    :raises DriverError: the loader, its Python package or such a device is missing.
    """
    subjects = [subject for subject in _subjects() if subject.name == name]
    if not subjects:
        raise DriverError("errno", 19, "ENODEV", f"no Vulkan device is called {name!r}")

    first = subjects[0]
    drivers = dict.fromkeys(
        " ".join(part for part in (s.driver_name, s.driver_version, s.driver_info) if part)
        for s in subjects
    )
    return {
        "device": name,
        "driver": " or ".join(drivers),
        "device_type": first.device_type,
        "device_uuid": first.device_uuid if len(subjects) == 1 else "",
        "pci_address": first.pci_address if len(subjects) == 1 else "",
    }


def _subjects() -> list[Subject]:
    try:
        instance: Any = Instance(Vulkan())
    except NoBackend as error:
        raise DriverError("errno", 2, "ENOENT", error.text) from None

    try:
        return [device.subject for device in instance.devices()]
    finally:
        instance.close()
