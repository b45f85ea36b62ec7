"""Artefacts written by hand, and replays of them: OpenCL without any compiler of models."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from devices import require_opencl

from switchgear.backends.contract import Coverage, ModelInfo
from switchgear.backends.opencl.artefact import Artefact, Buffer, BufferKind, Launch
from switchgear.ipc.slot import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from switchgear.backends.opencl.device import Device
    from switchgear.backends.opencl.replay import Replay

Array = np.ndarray[Any, Any]
COUNT = 256
SIZE_BYTES = 4 * COUNT

SOURCE = """
__kernel void add(__global float *sum, __global const float *a, __global const float *b) {
  size_t i = get_global_id(0);
  sum[i] = a[i] + b[i];
}
__kernel void twice(__global float *y, __global const float *x) {
  size_t i = get_global_id(0);
  y[i] = 2.0f * x[i];
}
"""


@functools.cache
def opened() -> Device:
    """The device, opened once: no driver lets go of its descriptors."""
    require_opencl()
    from switchgear.backends.opencl.device import Device

    return Device()


def spec(name: str, dtype: str = "float32", shape: tuple[int, ...] = (COUNT,)) -> TensorSpec:
    size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return TensorSpec(name, dtype, shape, shape, size_bytes)


def sum_twice(steps: int = 1) -> Artefact:
    """`x` [256] -> `y` [256] = 2 (x + (0, 1, ..., 255)) * 2 ** (steps - 1)."""
    sizes = ((COUNT, 1, 1), (32, 1, 1))
    buffers = [
        Buffer(BufferKind.INPUT, SIZE_BYTES, 0, 0, 0),
        Buffer(BufferKind.CONSTANT, SIZE_BYTES, 512, 0, 0),
    ]
    launches = [Launch(0, *sizes, (2, 0, 1))]
    for step in range(steps):
        # Two places in turn: each is read by the launch after the one that wrote it.
        buffers.append(
            Buffer(BufferKind.SCRATCH, SIZE_BYTES, (step % 2) * 1024, step, step + 1)
        )
        launches.append(Launch(1, *sizes, (step + 3, step + 2)))

    buffers.append(Buffer(BufferKind.OUTPUT, SIZE_BYTES, 0, steps, steps))
    constants = bytearray(512) + np.arange(COUNT, dtype=np.float32).tobytes()
    return Artefact(
        key={"engine": "none", "model_sha256": "ab" * 32},
        notes={"written": "by hand"},
        info=ModelInfo((spec("x"),), (spec("y"),), "signature", False, {"ADD": 1, "MUL": 1}),
        precision="fp32",
        coverage=Coverage(2, 2, 1.0),
        source=SOURCE,
        binary=b"",
        kernels=("add", "twice"),
        buffers=tuple(buffers),
        launches=tuple(launches),
        inputs=(0,),
        outputs=(len(buffers) - 1,),
        scratch_bytes=2048,
        constants=memoryview(constants),
    )


def expected(x: Array, steps: int = 1) -> Array:
    """What `sum_twice` gives."""
    result: Array = (x + np.arange(COUNT, dtype=np.float32)) * np.float32(2**steps)
    return result


@contextlib.contextmanager
def replayed(artefact: Artefact) -> Iterator[Replay]:
    """A replay, closed at the end."""
    device = opened()
    from switchgear.backends.opencl.replay import Replay

    with contextlib.closing(Replay(device, artefact)) as replay:
        yield replay


def room(size_bytes: int, *, aligned: bool = True) -> memoryview:
    """Memory at an address that is, or is not, a multiple of 64."""
    array = np.zeros(size_bytes + 128, np.uint8)
    begin = -array.ctypes.data % 64 + (0 if aligned else 4)
    return array[begin : begin + size_bytes].data


def run(replay: Replay, artefact: Artefact, values: Sequence[Array]) -> list[Array]:
    """One run in memory of its own."""
    info = artefact.info
    source = [memoryview(bytearray(value.tobytes())) for value in values]
    target = [room(each.capacity_bytes) for each in info.outputs]
    replay.run(replay.attach(source, artefact.inputs), replay.attach(target, artefact.outputs))
    return [
        np.frombuffer(memory, each.dtype).reshape(each.shape)
        for memory, each in zip(target, info.outputs, strict=True)
    ]
