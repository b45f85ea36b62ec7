"""How long one kernel takes alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from switchgear.backends.opencl.device import driver_errors

if TYPE_CHECKING:
    from switchgear.backends.opencl.device import Device

# Timed runs, after one that compiles.
ROUNDS: Final = 6
# A kernel that is this much slower than the best is not run again.
_HOPELESS: Final = 2.0


@dataclass(frozen=True, slots=True)
class KernelRun:
    """A kernel's source, its function, work items in all and per group."""

    source: str
    name: str
    global_size: tuple[int, int, int]
    local_size: tuple[int, int, int]


class KernelClock:
    """Times kernels on one device; buffers are kept for the next kernel of the same sizes."""

    def __init__(self, device: Device) -> None:
        self._device = device
        cl = device.cl
        with driver_errors():
            self._queue = cl.CommandQueue(
                device.context,
                device.device,
                properties=cl.command_queue_properties.PROFILING_ENABLE,
            )

        self._sizes: tuple[int, ...] = ()
        self._memory: list[Any] = []

    def time_ns(
        self,
        run: KernelRun,
        sizes_bytes: Sequence[int],
        best_ns: float = math.inf,
        rounds: int = ROUNDS,
    ) -> int:
        """The least time of `rounds` runs on buffers of zeros, by the device's events; blocks.

        One that is hopeless against `best_ns` is run once only.

        :raises DriverError: the driver refuses it.
        """
        cl = self._device.cl
        with driver_errors(), warnings.catch_warnings():
            # What the compiler says of a kernel that it takes.
            warnings.simplefilter("ignore")
            program = cl.Program(self._device.context, run.source).build(["-w"])
            kernel = cl.Kernel(program, run.name)
            for place, buffer in enumerate(self._buffers(tuple(sizes_bytes))):
                kernel.set_arg(place, buffer)

            least = math.inf
            for number in range(1 + rounds):
                event = cl.enqueue_nd_range_kernel(
                    self._queue, kernel, run.global_size, run.local_size
                )
                self._queue.finish()
                if number:
                    least = min(least, event.profile.end - event.profile.start)

                if number and least > _HOPELESS * best_ns:
                    break

        return int(least)

    def _buffers(self, sizes: tuple[int, ...]) -> list[Any]:
        if sizes == self._sizes:
            return self._memory

        cl = self._device.cl
        self._memory = []
        for size_bytes in sizes:
            buffer = cl.Buffer(self._device.context, cl.mem_flags.READ_WRITE, size_bytes)
            zeros: NDArray[np.uint8] = np.zeros(size_bytes, np.uint8)
            cl.enqueue_copy(self._queue, buffer, zeros)
            self._memory.append(buffer)

        self._sizes = sizes
        return self._memory
