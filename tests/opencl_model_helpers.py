"""Whole models for the importer: generated ones, realistic inputs, and errors of a program.

    DEV=CL python tests/opencl_model_helpers.py MODEL.tflite

runs one on tinygrad's device and prints its errors as JSON; the tests call it so, because a
driver may hang or die and keeps its descriptors.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from opencl_graph_helpers import engine, image
from tinygrad import Context

from switchgear.backends.generate.graph import Model
from switchgear.backends.opencl.graph import read_graph
from switchgear.backends.opencl.importer import build, unsupported
from switchgear.backends.opencl.rules import on_device

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from switchgear.backends.opencl.graph import Graph


@dataclass(frozen=True)
class Error:
    """Largest difference of one output from the engine's, and the engine's largest value."""

    output: str
    error: float
    peak: float
    spread: float
    kernels: str


def inputs_for(graph: Graph) -> list[NDArray[Any]]:
    """Waves with noise on them, as a photo has both; whole numbers over all of their range."""
    found: list[NDArray[Any]] = []
    for index in graph.inputs:
        tensor = graph.tensors[index]
        waves = image(*tensor.shape)
        if tensor.dtype == "float32":
            found.append(waves)
        else:
            limits = np.iinfo(tensor.dtype)
            middle, half = (limits.max + limits.min) / 2, (limits.max - limits.min) / 2
            found.append((waves.clip(-1, 1) * half + middle).astype(tensor.dtype))

    return found


def errors(data: bytes) -> list[Error]:
    """Ours on tinygrad's default device against the engine's built-in kernels."""
    graph = read_graph(data)
    values = inputs_for(graph)
    # Simple kernels: what is held against the engine is the importer, and compilers take long.
    with Context(NOOPT=1):
        program = build(graph)
        outputs = [o.numpy() for o in program(*[on_device(v, None) for v in values])]

    kernels = "optimised"
    try:
        expected = engine(data, values, kernels)
    except (RuntimeError, ValueError):
        # Convolution2DTransposeBias: only XNNPACK has it.
        kernels = "xnnpack"
        expected = engine(data, values, kernels)

    return [
        Error(
            graph.tensors[index].name,
            float(np.abs(mine.astype(np.float64) - theirs.astype(np.float64)).max()),
            float(np.abs(theirs.astype(np.float64)).max()),
            float(theirs.std()),
            kernels,
        )
        for index, mine, theirs in zip(graph.outputs, outputs, expected, strict=True)
    ]


def dynamic_range(data: bytes) -> bytes:
    """A float model with the weights of its CONV_2D as int8, as converters write it."""
    import flatbuffers

    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(data, 0))
    main = model.subgraphs[0]
    for operator in main.operators:
        code = model.operatorCodes[operator.opcodeIndex]
        if code.builtinCode != schema.BuiltinOperator.CONV_2D:
            continue

        code.version = 5
        tensor = main.tensors[operator.inputs[1]]
        buffer = model.buffers[tensor.buffer]
        values = np.frombuffer(bytes(buffer.data), "<f4").reshape(tensor.shape)
        scales = np.abs(values).max(axis=(1, 2, 3)) / np.float32(127)
        steps = np.rint(values / scales.reshape(-1, 1, 1, 1)).astype(np.int8)
        buffer.data = np.frombuffer(steps.tobytes(), np.uint8)
        tensor.type = schema.TensorType.INT8
        tensor.quantization = schema.QuantizationParametersT(
            scale=scales, zeroPoint=np.zeros(len(scales), np.int64), quantizedDimension=0
        )

    builder = flatbuffers.Builder(len(data))
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def products() -> bytes:
    """[1, 2, 2, 3] -> 3x3 convolution -> 1x1 convolution -> fully connected -> [4, 5]."""
    model = Model("products")
    main = model.subgraph()
    x = main.input("x", "float32", (1, 2, 2, 3))
    sizes = {"first": (6, 3, 3, 3), "second": (8, 1, 1, 6)}
    for name, shape in sizes.items():
        weights = main.constant(f"{name}/w", image(*shape, seed=len(name)))
        bias = main.constant(f"{name}/b", image(shape[0], seed=3))
        y = main.tensor(name, "float32", (1, 2, 2, shape[0]))
        options = schema.Conv2DOptionsT(padding=schema.Padding.SAME, strideW=1, strideH=1)
        main.operator("CONV_2D", [x, weights, bias], [y], options)
        x = y

    weights = main.constant("third/w", image(5, 8, seed=8))
    y = main.output(main.tensor("third", "float32", (4, 5)))
    options = schema.FullyConnectedOptionsT(
        fusedActivationFunction=schema.ActivationFunctionType.RELU
    )
    main.operator("FULLY_CONNECTED", [x, weights, -1], [y], options)
    return model.to_bytes()


def main() -> None:
    data = Path(sys.argv[1]).read_bytes()
    refused = unsupported(read_graph(data))
    found = [] if refused else [asdict(error) for error in errors(data)]
    json.dump({"refused": refused, "errors": found}, sys.stdout)


if __name__ == "__main__":
    main()
