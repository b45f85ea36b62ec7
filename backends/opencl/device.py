"""The OpenCL device that models run on, opened through pyopencl."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from switchgear.backends.opencl.plan import ALIGNMENT_BYTES
from switchgear.ipc.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Read when pyopencl is imported: no cache of its own beside the artefacts.
os.environ["PYOPENCL_NO_CACHE"] = "1"


def load_pyopencl() -> Any:
    """Imports pyopencl.

    :raises DriverError: it is not installed.
    """
    try:
        import pyopencl
    except ImportError as error:
        raise DriverError("errno", 2, "ENOENT", str(error)) from None

    return pyopencl


@contextlib.contextmanager
def driver_errors() -> Iterator[None]:
    """Turns pyopencl's exceptions into ours.

    :raises DriverError: pyopencl raised one of its own.
    """
    cl = load_pyopencl()
    try:
        yield
    except cl.Error as error:
        raise _translated(cl, error) from None


def _translated(cl: Any, error: Any) -> DriverError:
    code = int(error.code)
    try:
        name = f"CL_{cl.status_code.to_string(code)}"
    except (AttributeError, ValueError):
        name = f"CL_ERROR_{-code}"

    return DriverError("opencl", code, name, str(error).strip()[:2000])


# What pyopencl's own loader says where no platform is installed.
_NO_PLATFORM: Final = -1001


class Device:
    """A context and an in-order queue on one device, kept until the process ends.

    It is tinygrad's choice: the first platform's first GPU, else its default device.

    :raises DriverError: there is none.
    """

    def __init__(self) -> None:
        self.cl = load_pyopencl()
        with driver_errors():
            self.device = self._choose()
            self.context = self.cl.Context([self.device])
            self.queue = self.cl.CommandQueue(self.context, self.device)

    def _choose(self) -> Any:
        cl = self.cl
        platforms = cl.get_platforms()
        if not platforms:
            name = "CL_PLATFORM_NOT_FOUND_KHR"
            raise DriverError("opencl", _NO_PLATFORM, name, "no platform")

        for kind in (cl.device_type.GPU, cl.device_type.DEFAULT):
            with contextlib.suppress(cl.LogicError, cl.RuntimeError):
                devices = platforms[0].get_devices(kind)
                if devices:
                    return devices[0]

        text = f"platform {platforms[0].name!r} has no device"
        raise DriverError("opencl", -1, "CL_DEVICE_NOT_FOUND", text)

    @property
    def host_memory(self) -> bool:
        """Whether kernels work in the host's own memory, in place: a processor's driver."""
        kind = int(self.device.type)
        return bool(kind & int(self.cl.device_type.CPU)) and bool(
            self.device.host_unified_memory
        )

    def has_regions(self, size_bytes: int) -> bool:
        """Whether one buffer of this size can be had, and used in parts at our alignment."""
        aligned = int(self.device.mem_base_addr_align) <= 8 * ALIGNMENT_BYTES
        return aligned and size_bytes <= int(self.device.max_mem_alloc_size)

    def identity(self) -> Mapping[str, str]:
        """Names of device, driver and platform, with their versions."""
        with driver_errors():
            platform = self.device.platform
            return {
                "device": str(self.device.name).strip(),
                "driver": f"{self.device.vendor} {self.device.driver_version}".strip(),
                "platform": f"{platform.name} {platform.version}".strip(),
            }
