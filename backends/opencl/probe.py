"""A kernel with a known answer, by the same code that runs models."""

from __future__ import annotations

from typing import Final

import numpy as np

from switchgear.backends.contract import Coverage, ModelInfo
from switchgear.backends.opencl.artefact import Artefact, Buffer, BufferKind, Launch
from switchgear.backends.opencl.device import Device
from switchgear.backends.opencl.replay import Replay
from switchgear.ipc.errors import DriverError
from switchgear.ipc.slot import TensorSpec

_COUNT: Final = 1024
_GROUP: Final = 32
# Not one of the driver's codes: it said that all went well.
WRONG_ANSWER: Final = -9999
# Exact in float: whole numbers below 2**24.
_SOURCE: Final = """
__kernel void add(__global float *sum, __global const float *a, __global const float *b) {
  size_t i = get_global_id(0);
  sum[i] = a[i] + b[i];
}
__kernel void scale(__global float *y, __global const float *x) {
  size_t i = get_global_id(0);
  y[i] = 3.0f * x[i] + 1.0f;
}
"""


def probe_artefact() -> Artefact:
    """`x` [1024] -> `y` [1024] = 3 (x + (0, 1, ..., 1023)) + 1, in two launches."""
    size_bytes = 4 * _COUNT
    sizes = ((_COUNT, 1, 1), (_GROUP, 1, 1))
    x, y = (TensorSpec(n, "float32", (_COUNT,), (_COUNT,), size_bytes) for n in ("x", "y"))
    return Artefact(
        key={},
        notes={},
        info=ModelInfo((x,), (y,), "signature", False, {"ADD": 1, "MUL": 1}),
        precision="fp32",
        coverage=Coverage(2, 2, 1.0),
        source=_SOURCE,
        binary=b"",
        kernels=("add", "scale"),
        buffers=(
            Buffer(BufferKind.INPUT, size_bytes),
            Buffer(BufferKind.CONSTANT, size_bytes),
            Buffer(BufferKind.SCRATCH, size_bytes, 0, 0, 1),
            Buffer(BufferKind.OUTPUT, size_bytes, 0, 1, 1),
        ),
        launches=(Launch(0, *sizes, (2, 0, 1)), Launch(1, *sizes, (3, 2))),
        inputs=(0,),
        outputs=(3,),
        scratch_bytes=size_bytes,
        constants=memoryview(bytearray(np.arange(_COUNT, dtype=np.float32).tobytes())),
    )


def check_known_answer(device: Device) -> str:
    """Runs it; returns one line on what ran.

    :raises DriverError: the driver refuses it, or the answer is wrong.
    """
    artefact = probe_artefact()
    replay = Replay(device, artefact)
    try:
        given = np.square(np.arange(_COUNT, dtype=np.float32) - _COUNT // 2)
        answer = np.zeros(_COUNT, np.float32)
        source = replay.attach([given.data.cast("B")], artefact.inputs)
        target = replay.attach([answer.data.cast("B")], artefact.outputs)
        replay.run(source, target)
    finally:
        replay.close()

    expected = 3 * (given + np.arange(_COUNT, dtype=np.float32)) + 1
    wrong = int(np.count_nonzero(answer != expected))
    if wrong:
        text = f"{wrong} of {_COUNT} sums are wrong"
        raise DriverError("opencl", WRONG_ANSWER, "WRONG_ANSWER", text)

    return f"two kernels on {device.identity()['device']}"
