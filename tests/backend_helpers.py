"""A CPU backend's instances in the test's own process, fed with arrays."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from switchgear.backends.contract import LoadRequest
from switchgear.backends.cpu import CpuBackend
from switchgear.backends.generate.graph import Model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from switchgear.backends.contract import Instance

Array = np.ndarray[Any, Any]


@contextlib.contextmanager
def loaded(
    model: bytes | Path, folder: Path, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Iterator[Instance]:
    """An instance of a model, closed at the end; bytes are written into `folder` first."""
    if isinstance(model, bytes):
        path = folder / "model.tflite"
        path.write_bytes(model)
    else:
        path = model

    backend = CpuBackend({"threads": 1})
    instance = backend.load(LoadRequest(str(path), "auto", shapes or {}))
    try:
        yield instance
    finally:
        instance.close()
        backend.close()


def run(
    instance: Instance, *, room_bytes: int = 0, **inputs: Array | np.generic
) -> dict[str, Array]:
    """One run in memory of its own: outputs by name, in the shapes that came out.

    `room_bytes` is the room of each output whose size is not known before.
    """
    info = instance.info
    source = [memoryview(bytearray(inputs[spec.name].tobytes())) for spec in info.inputs]
    return run_in(instance, source, room_bytes)


def run_in(
    instance: Instance, source: list[memoryview], room_bytes: int = 0
) -> dict[str, Array]:
    """As `run`, with the inputs' memory."""
    target = [
        memoryview(bytearray(room_bytes if spec.dynamic else spec.capacity_bytes))
        for spec in instance.info.outputs
    ]
    entries = instance.run(instance.attach_input(source), instance.attach_output(target))
    return {
        spec.name: np.frombuffer(memory[: entry.length], entry.dtype).reshape(entry.shape)
        for spec, memory, entry in zip(instance.info.outputs, target, entries, strict=True)
    }


def recurrent() -> bytes:
    """`x` [1, 2] -> `y` [1, 2] = x + what it was before; RNN updates a tensor in place."""
    model = Model("recurrent")
    main = model.subgraph()
    x = main.input("x", "float32", [1, 2])
    weights = main.constant("weights", np.eye(2, dtype=np.float32))
    recurrence = main.constant("recurrence", np.eye(2, dtype=np.float32))
    bias = main.constant("bias", np.zeros(2, np.float32))
    hidden = main.tensor("hidden", "float32", [1, 2])
    main.packed.tensors[hidden].isVariable = True
    y = main.output(main.tensor("y", "float32", [1, 2]))
    main.operator("RNN", [x, weights, recurrence, bias, hidden], [y], schema.RNNOptionsT())
    model.signature({"x": x}, {"y": y})
    return model.to_bytes()


def double(name: str = "ADD", version: int = 1) -> bytes:
    """`x` [2] -> `y` [2] = x + x, by an operator of any name and version."""
    model = Model("double")
    main = model.subgraph()
    x = main.input("x", "float32", [2])
    y = main.output(main.tensor("y", "float32", [2]))
    main.operator(name, [x, x], [y], schema.AddOptionsT(), version=version)
    return model.to_bytes()


def custom(*names: str) -> bytes:
    """A chain of custom operators from `x` [2]; no engine has them."""
    model = Model("custom operators")
    main = model.subgraph()
    tensor = main.input("x", "float32", [2])
    for version in range(1, len(names) + 1):
        before, tensor = tensor, main.tensor(f"t{version}", "float32", [2])
        # Each version is an entry of its own in the file's table.
        main.operator("CUSTOM", [before], [tensor], version=version)

    main.output(tensor)
    packed = schema.ModelT.InitFromPackedBuf(model.to_bytes(), 0)
    for code, name in zip(packed.operatorCodes, names, strict=True):
        code.customCode = name
        code.version = 1

    return repacked(packed)


def repacked(model: Any) -> bytes:
    """The bytes of a model object of the schema."""
    import flatbuffers

    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())
