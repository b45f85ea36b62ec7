"""The CPU backend's known-answer run: a shipped model whose result is exact."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import Protocol

import numpy as np

from switchgear.backends.contract import Instance, LoadRequest
from switchgear.ipc.errors import DriverError


class _Loader(Protocol):
    engine: str
    engine_version: str

    def load(self, request: LoadRequest) -> Instance: ...


def check_known_answer(backend: _Loader) -> str:
    """Runs `probe.tflite` (inputs a and b of 4 floats: sum and product) and checks both.

    Small whole numbers have exact sums and products in every float format.

    :raises DriverError: it does not run, or the numbers are wrong.
    """
    a = np.array([1, -2, 3, 50], dtype=np.float32)
    b = np.array([10, 20, -30, 2], dtype=np.float32)
    expected = {"sum": a + b, "product": a * b}
    with as_file(files("switchgear.backends") / "probe.tflite") as path:
        instance = backend.load(LoadRequest(str(path)))

    try:
        values = {"a": a, "b": b}
        inputs = [memoryview(bytearray(values[s.name].tobytes())) for s in instance.info.inputs]
        outputs = [memoryview(bytearray(s.capacity_bytes)) for s in instance.info.outputs]
        instance.run(instance.attach_input(inputs), instance.attach_output(outputs))
        for spec, memory in zip(instance.info.outputs, outputs, strict=True):
            got = np.frombuffer(memory, dtype=np.float32)
            if not np.array_equal(got, expected[spec.name]):
                raise DriverError("tflite", 1, "ERROR", f"wrong {spec.name}: {got.tolist()}")
    finally:
        instance.close()

    return f"{backend.engine} {backend.engine_version}: sum and product exact"
