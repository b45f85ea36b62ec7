"""Runs one of the committed kernels on the first device and prints its relative error.

A process of its own, for a driver is loaded: `python matmul_kernel.py KERNEL SIZE`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from switchgear.backends.vulkan_compute.api import Instance, Vulkan
from switchgear.backends.vulkan_compute.compute import Device
from switchgear.fingerprints.measure.vulkan_matmul import relative_error

SHADERS = Path(__file__).parent.parent / "fingerprints" / "shaders"
BLOCK = {"matmul_tiles": 16, "matmul_blocks": 64}


def main() -> None:
    kernel, size = sys.argv[1], int(sys.argv[2])
    left, right = np.random.default_rng(7).random((2, size, size), np.float32)
    instance = Instance(Vulkan())
    device = Device(instance.api, instance.devices()[0])
    staging = device.host_buffer(left.nbytes)
    buffers = [device.device_buffer(left.nbytes) for _ in range(3)]
    for matrix, buffer in zip((left, right), buffers, strict=False):
        staging.view[:] = matrix.tobytes()
        device.run(device.copy_commands(staging, buffer))

    groups = size // BLOCK[kernel]
    spirv = (SHADERS / f"{kernel}.spv").read_bytes()
    device.run(device.kernel_commands(spirv, buffers, size, (groups, groups, 1)))
    device.run(device.copy_commands(buffers[2], staging, to_host=True))
    result = np.frombuffer(bytes(staging.view), np.float32).reshape(size, size)
    print(relative_error(result, left @ right))
    device.close()
    instance.close()


if __name__ == "__main__":
    main()
