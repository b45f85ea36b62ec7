"""How long one kernel takes alone."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from switchgear.backends.opencl.device import driver_errors

if TYPE_CHECKING:
    from switchgear.backends.opencl.device import Device
    from switchgear.backends.opencl.tinygrad_jit import KernelSource

# The first run compiles.
_ROUNDS: Final = 7


def kernel_time_ns(
    device: Device, kernel: KernelSource, result_bytes: int, arguments: Sequence[NDArray[Any]]
) -> int:
    """The least time of a few runs by the device's events; blocks.

    The kernel writes `result_bytes` to its first parameter; `arguments` are the others.

    :raises DriverError: the driver refuses it.
    """
    cl = device.cl
    with driver_errors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = cl.Program(device.context, kernel.source).build(["-w"])
        flags = cl.mem_flags
        memory = [cl.Buffer(device.context, flags.READ_WRITE, result_bytes)]
        memory += [
            cl.Buffer(
                device.context,
                flags.READ_ONLY | flags.COPY_HOST_PTR,
                hostbuf=np.ascontiguousarray(array),
            )
            for array in arguments
        ]
        queue = cl.CommandQueue(
            device.context,
            device.device,
            properties=cl.command_queue_properties.PROFILING_ENABLE,
        )
        run = cl.Kernel(program, kernel.name)
        for place, buffer in enumerate(memory):
            run.set_arg(place, buffer)

        items = tuple(g * w for g, w in zip(kernel.groups, kernel.local_size, strict=True))
        times = []
        for _ in range(_ROUNDS):
            event = cl.enqueue_nd_range_kernel(queue, run, items, kernel.local_size)
            queue.finish()
            times.append(int(event.profile.end - event.profile.start))

    return min(times)
