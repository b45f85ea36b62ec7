"""What one run of a model costs in multiply-adds, read from its graph."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, Final

from ai_edge_litert import schema_py_generated as schema

if TYPE_CHECKING:
    import mmap

_FILE_IDENTIFIER: Final = b"TFL3"


def multiply_adds(model_bytes: bytes | mmap.mmap) -> int:
    """Multiply-adds of one invocation, of any .tflite file.

    Counted are convolutions (CONV_2D, DEPTHWISE_CONV_2D, TRANSPOSE_CONV) and matrix products
    (FULLY_CONNECTED, BATCH_MATMUL) of the first subgraph; additions of a bias, activations,
    pooling and element-wise operators are not, as is usual. A dynamic dimension counts as the
    file's `shape` has it, mostly 1. Raises ValueError for bytes that are no such file.
    """
    return sum(multiply_adds_by_operator(model_bytes))


def multiply_adds_by_operator(model_bytes: bytes | mmap.mmap) -> tuple[int, ...]:
    """As `multiply_adds`, for each operator of the first subgraph in the file's order."""
    if len(model_bytes) < 8 or model_bytes[4:8] != _FILE_IDENTIFIER:
        raise ValueError("not a .tflite file: its identifier TFL3 is missing")

    try:
        return _counted(schema.Model.GetRootAs(model_bytes))
    # What the reader does when an offset leads outside, by where it led.
    except (struct.error, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"a damaged .tflite file: {error}") from error


def _counted(model: Any) -> tuple[int, ...]:
    graph = model.Subgraphs(0)
    counters = {
        getattr(schema.BuiltinOperator, name): count for name, count in _COUNT_BY_NAME.items()
    }
    costs = []

    for index in range(graph.OperatorsLength()):
        operator = graph.Operators(index)
        code = model.OperatorCodes(operator.OpcodeIndex())
        # Old files have the 8-bit field only, new ones both.
        count = counters.get(max(code.BuiltinCode(), code.DeprecatedBuiltinCode()))
        costs.append(0 if count is None else count(graph, operator))

    return tuple(costs)


def _shape(graph: Any, tensor_index: int) -> list[int]:
    tensor = graph.Tensors(tensor_index)
    return [tensor.Shape(axis) for axis in range(tensor.ShapeLength())]


def _convolution(graph: Any, operator: Any) -> int:
    # Filter [out, height, width, in / groups]; each output element takes one filter.
    return math.prod(_shape(graph, operator.Outputs(0))) * math.prod(
        _shape(graph, operator.Inputs(1))[1:]
    )


def _depthwise(graph: Any, operator: Any) -> int:
    # Filter [1, height, width, out].
    _, height, width, _ = _shape(graph, operator.Inputs(1))
    return math.prod(_shape(graph, operator.Outputs(0))) * height * width


def _transposed(graph: Any, operator: Any) -> int:
    # Inputs: output shape, filter [out, height, width, in], image. Each pixel of the image is
    # multiplied with the whole filter.
    image_pixels = math.prod(_shape(graph, operator.Inputs(2))[:3])
    return image_pixels * math.prod(_shape(graph, operator.Inputs(1)))


def _fully_connected(graph: Any, operator: Any) -> int:
    # Weights [out, in].
    outputs = math.prod(_shape(graph, operator.Outputs(0)))
    return outputs * _shape(graph, operator.Inputs(1))[1]


def _batch_matmul(graph: Any, operator: Any) -> int:
    options = schema.BatchMatMulOptions()
    table = operator.BuiltinOptions()
    transposed = False

    if table is not None:
        options.Init(table.Bytes, table.Pos)
        transposed = options.AdjX()

    depth = _shape(graph, operator.Inputs(0))[-2 if transposed else -1]
    return math.prod(_shape(graph, operator.Outputs(0))) * depth


_COUNT_BY_NAME: Final = {
    "CONV_2D": _convolution,
    "DEPTHWISE_CONV_2D": _depthwise,
    "TRANSPOSE_CONV": _transposed,
    "FULLY_CONNECTED": _fully_connected,
    "BATCH_MATMUL": _batch_matmul,
}
