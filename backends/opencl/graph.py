"""A `.tflite` file as a plain graph: what stands in it, bounded and checked, nothing computed.

The schema's generated reader trusts every offset and length. Here each vector's length is held
against a bound before it is walked, constants are views of the file's bytes, and whatever a
damaged offset raises becomes `BadModel`. Pure: numpy and the schema, no engine.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from switchgear.backends.opencl.sparse import Sparsity, read_sparsity
from switchgear.ipc.errors import BadModel, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

Shape = tuple[int, ...]
OptionValue = int | float | bool | str | tuple[int, ...] | tuple[float, ...]

# Far above any model that runs on a phone, far below what fills a machine's memory.
MAX_TENSORS: Final = 1 << 16
MAX_OPERATORS: Final = 1 << 16
MAX_OPERANDS: Final = 1 << 12
MAX_EDGES: Final = 1 << 20
MAX_CODES: Final = 1 << 12
MAX_BUFFERS: Final = 1 << 17
MAX_RANK: Final = 8
MAX_TENSOR_BYTES: Final = 1 << 31
MAX_OPTION_VALUES: Final = 64
MAX_CUSTOM_BYTES: Final = 1 << 16
MAX_NAME_BYTES: Final = 1 << 10

# What reading a damaged file raises: struct past its end, a vector of a negative length, an
# offset that is no number, text that is not UTF-8.
_DAMAGE: Final = (
    struct.error,
    IndexError,
    ValueError,
    TypeError,
    OverflowError,
    AttributeError,
    KeyError,
)
_MISSING: Final = -1
_FILE_IDENTIFIER: Final = b"TFL3"

_DTYPES: Final[Mapping[int, str]] = {
    schema.TensorType.FLOAT32: "float32",
    schema.TensorType.FLOAT16: "float16",
    schema.TensorType.FLOAT64: "float64",
    schema.TensorType.INT8: "int8",
    schema.TensorType.UINT8: "uint8",
    schema.TensorType.INT16: "int16",
    schema.TensorType.UINT16: "uint16",
    schema.TensorType.INT32: "int32",
    schema.TensorType.UINT32: "uint32",
    schema.TensorType.INT64: "int64",
    schema.TensorType.UINT64: "uint64",
    schema.TensorType.BOOL: "bool",
    schema.TensorType.INT4: "int4",
}
_OTHER_DTYPES: Final[Mapping[int, str]] = {
    number: name.lower()
    for name, number in vars(schema.TensorType).items()
    if isinstance(number, int)
}
_OPERATORS: Final[Mapping[int, str]] = {
    number: name
    for name, number in vars(schema.BuiltinOperator).items()
    if isinstance(number, int)
}
_OPTION_TABLES: Final[Mapping[int, str]] = {
    number: name
    for name, number in vars(schema.BuiltinOptions).items()
    if isinstance(number, int) and number
}
_OPTION_TABLES_2: Final[Mapping[int, str]] = {
    number: name
    for name, number in vars(schema.BuiltinOptions2).items()
    if isinstance(number, int) and number
}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The real value is scale * (stored - zero_point); several scales run along `axis`."""

    scales: tuple[float, ...]
    zero_points: tuple[int, ...]
    axis: int = 0


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """A tensor of the file.

    `dtype` is numpy's name, or the schema's in lower case where numpy has none (`string`,
    `resource`). `data` holds the elements of a constant: a read-only view of the file, flat and
    of `dtype`; of bytes for `int4` and for a sparse one, whose layout `sparsity` gives.
    """

    name: str
    dtype: str
    shape: Shape
    quantisation: Quantisation | None = None
    data: NDArray[Any] | None = None
    sparsity: Sparsity | None = None
    variable: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator, in the order in which they run.

    `name` is the schema's (`CONV_2D`), `CUSTOM:Name` for a custom one. `inputs` and `outputs`
    are tensor indices; -1 stands for an optional input that is not given. `options` holds the
    schema's fields (`strideW`), `custom` the bytes of a custom operator's.
    """

    name: str
    version: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    custom: bytes = b""


@dataclass(frozen=True, slots=True)
class Graph:
    """The first subgraph of a file. `inputs` and `outputs` are tensor indices.

    Each operator reads only inputs, constants and what an operator before it wrote, and each
    tensor is written once.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    tensors: tuple[GraphTensor, ...]
    operators: tuple[Operator, ...]


def read_graph(data: bytes | memoryview) -> Graph:
    """Reads the bytes of a file; the graph's constants are views of them.

    :raises BadModel: they are damaged, or no `.tflite` file.
    :raises UnsupportedModel: they are beyond a bound above.
    """
    raw = bytes(data) if isinstance(data, memoryview) and not data.c_contiguous else data
    try:
        return _read(raw)
    except _DAMAGE as error:
        raise BadModel(f"the file's tables are damaged: {error}") from None


def with_shapes(graph: Graph, shapes: Mapping[int, Sequence[int]]) -> Graph:
    """The same graph for other input shapes, by tensor index.

    :raises UnsupportedModel: a shape is not the one of the file: the shapes between inputs and
        outputs stand in the file and are not computed anew.
    """
    for index, shape in shapes.items():
        tensor = graph.tensors[index]
        if tuple(shape) != tensor.shape:
            raise UnsupportedModel(
                f"input {tensor.name} has shape {list(tensor.shape)} in the file, and no other"
                f" is possible here; asked for was {list(shape)}"
            )

    return graph


def _read(data: bytes | memoryview) -> Graph:
    if len(data) < 8:
        raise BadModel("the file ends before its header does")

    if bytes(data[4:8]) != _FILE_IDENTIFIER:
        raise BadModel("the file does not begin as a .tflite file does")

    model = schema.Model.GetRootAs(data, 0)
    codes = _operator_codes(model)
    _bounded(model.BuffersLength(), MAX_BUFFERS, "buffers")
    if _bounded(model.SubgraphsLength(), MAX_OPERATORS, "subgraphs") < 1:
        raise BadModel("the file holds no graph")

    subgraph = model.Subgraphs(0)
    tensors = tuple(
        _tensor(model, subgraph.Tensors(i), data)
        for i in range(_bounded(subgraph.TensorsLength(), MAX_TENSORS, "tensors"))
    )
    operators = []
    edges = 0
    for i in range(_bounded(subgraph.OperatorsLength(), MAX_OPERATORS, "operators")):
        operators.append(_operator(subgraph.Operators(i), codes))
        edges += len(operators[-1].inputs) + len(operators[-1].outputs)
        _bounded(edges, MAX_EDGES, "links between operators")

    graph = Graph(
        inputs=_indices(subgraph.InputsLength, subgraph.InputsAsNumpy, "inputs"),
        outputs=_indices(subgraph.OutputsLength, subgraph.OutputsAsNumpy, "outputs"),
        tensors=tensors,
        operators=tuple(operators),
    )
    _check_links(graph)
    return graph


def _bounded(count: int, bound: int, what: str) -> int:
    if count > bound:
        raise UnsupportedModel(f"the model has {count} {what}; at most {bound} are read")

    return count


def _operator_codes(model: Any) -> list[tuple[str, int]]:
    codes = []
    for i in range(_bounded(model.OperatorCodesLength(), MAX_CODES, "operator codes")):
        code = model.OperatorCodes(i)
        # Old files have the 8-bit field only, new ones both.
        number = max(code.DeprecatedBuiltinCode(), code.BuiltinCode())
        name = _OPERATORS.get(number, f"BUILTIN:{number}")
        if name == "CUSTOM":
            name += f":{_text(code.CustomCode())}"

        codes.append((name, code.Version()))

    return codes


def _text(raw: bytes | None) -> str:
    return (raw or b"")[:MAX_NAME_BYTES].decode(errors="replace")


def _indices(
    length: Callable[[], int], values: Callable[[], Any], what: str
) -> tuple[int, ...]:
    if not _bounded(length(), MAX_OPERANDS, what):
        return ()

    return tuple(int(value) for value in values())


def _tensor(model: Any, tensor: Any, data: bytes | memoryview) -> GraphTensor:
    name = _text(tensor.Name())
    number = tensor.Type()
    dtype = _DTYPES.get(number) or _OTHER_DTYPES.get(number, f"type {number}")
    rank = _bounded(tensor.ShapeLength(), MAX_RANK, f"dimensions in tensor {name}")
    shape = tuple(int(size) for size in tensor.ShapeAsNumpy()) if rank else ()
    if any(size < 0 for size in shape):
        raise BadModel(f"tensor {name} has a negative dimension: {list(shape)}")

    width = np.dtype(dtype).itemsize if number in _DTYPES and dtype != "int4" else 1
    if math.prod(shape) * width > MAX_TENSOR_BYTES:
        raise UnsupportedModel(f"tensor {name} {list(shape)} is over {MAX_TENSOR_BYTES} bytes")

    result = GraphTensor(
        name=name,
        dtype=dtype,
        shape=shape,
        quantisation=_quantisation(tensor.Quantization(), shape, name),
        sparsity=read_sparsity(tensor.Sparsity(), shape),
        variable=bool(tensor.IsVariable()),
    )
    content = _content(model, tensor.Buffer(), data)
    if content is None:
        return result

    return replace(result, data=_elements(result, content))


def _content(model: Any, index: int, data: bytes | memoryview) -> NDArray[np.uint8] | None:
    """The bytes of a buffer, None where it has none."""
    if not 0 <= index < model.BuffersLength():
        raise BadModel(f"a tensor points to buffer {index}, which is not in the file")

    buffer = model.Buffers(index)
    if buffer.DataLength():
        content: NDArray[np.uint8] = buffer.DataAsNumpy()
        return content

    # Files over 2 GB keep their content behind the tables.
    offset, size = buffer.Offset(), buffer.Size()
    if offset <= 1 or not size:
        return None

    if offset + size > len(data):
        raise BadModel(f"buffer {index} ends behind the file")

    return np.frombuffer(data, np.uint8, size, offset)


def _elements(tensor: GraphTensor, content: NDArray[np.uint8]) -> NDArray[Any]:
    if tensor.sparsity is not None or tensor.dtype not in _DTYPES.values():
        return content

    if tensor.dtype == "int4":
        expected = (tensor.size + 1) // 2
        if content.size != expected:
            raise BadModel(f"tensor {tensor.name} holds {content.size} of {expected} bytes")

        return content

    kind = np.dtype(tensor.dtype).newbyteorder("<")
    if content.size != tensor.size * kind.itemsize:
        raise BadModel(
            f"tensor {tensor.name} holds {content.size} bytes, its shape {list(tensor.shape)}"
            f" needs {tensor.size * kind.itemsize}"
        )

    return np.frombuffer(content, kind)


def _quantisation(table: Any, shape: Shape, name: str) -> Quantisation | None:
    if table is None or not table.ScaleLength():
        return None

    axis = table.QuantizedDimension()
    count = table.ScaleLength()
    if count != 1 and not (0 <= axis < len(shape) and count == shape[axis]):
        raise BadModel(f"tensor {name} has {count} scales for axis {axis} of {list(shape)}")

    scales = tuple(float(scale) for scale in table.ScaleAsNumpy())
    if not all(math.isfinite(scale) and scale >= 0 for scale in scales):
        raise BadModel(f"tensor {name} has a scale that is no positive number")

    given = table.ZeroPointLength()
    if given not in (0, 1, count):
        raise BadModel(f"tensor {name} has {given} zero points for {count} scales")

    points = tuple(int(point) for point in table.ZeroPointAsNumpy()) if given else (0,)
    if not all(-(1 << 31) <= point < 1 << 31 for point in points):
        raise BadModel(f"tensor {name} has a zero point that is no 32-bit number")

    return Quantisation(scales, points * count if len(points) == 1 else points, axis)


def _operator(operator: Any, codes: Sequence[tuple[str, int]]) -> Operator:
    index = operator.OpcodeIndex()
    if not 0 <= index < len(codes):
        raise BadModel(f"an operator has code {index} of {len(codes)}")

    name, version = codes[index]
    count = _bounded(operator.CustomOptionsLength(), MAX_CUSTOM_BYTES, "bytes of options")
    return Operator(
        name=name,
        version=version,
        inputs=_indices(operator.InputsLength, operator.InputsAsNumpy, f"inputs of {name}"),
        outputs=_indices(operator.OutputsLength, operator.OutputsAsNumpy, f"outputs of {name}"),
        options=_options(operator),
        custom=bytes(operator.CustomOptionsAsNumpy()) if count else b"",
    )


def _options(operator: Any) -> dict[str, OptionValue]:
    table = operator.BuiltinOptions()
    name = _OPTION_TABLES.get(operator.BuiltinOptionsType())
    if table is None or name is None:
        table = operator.BuiltinOptions2()
        name = _OPTION_TABLES_2.get(operator.BuiltinOptions2Type())

    if table is None or name is None:
        return {}

    reader = getattr(schema, name)()
    reader.Init(table.Bytes, table.Pos)
    fields = vars(getattr(schema, f"{name}T").InitFromObj(reader))
    return {
        key: value
        for key, raw in fields.items()
        if (value := _option_value(raw, name)) is not None
    }


def _option_value(raw: Any, name: str) -> OptionValue | None:
    if isinstance(raw, bytes):
        return _text(raw)

    if isinstance(raw, np.ndarray | list):
        _bounded(len(raw), MAX_OPTION_VALUES, f"values in an option of {name}")
        return tuple(value.item() for value in raw if isinstance(value, np.generic))

    return raw if isinstance(raw, bool | int | float | str) else None


def _check_links(graph: Graph) -> None:
    count = len(graph.tensors)
    known = {i for i, tensor in enumerate(graph.tensors) if tensor.data is not None}
    if len(set(graph.inputs)) != len(graph.inputs):
        raise BadModel("an input stands twice in the file's list")

    for index in (*graph.inputs, *graph.outputs):
        if not 0 <= index < count:
            raise BadModel(f"the model's inputs or outputs name tensor {index} of {count}")

    if known & set(graph.inputs):
        raise BadModel("an input of the model is a constant")

    known |= set(graph.inputs)
    for number, operator in enumerate(graph.operators):
        for index in operator.inputs:
            if index == _MISSING:
                continue

            if not 0 <= index < count:
                raise BadModel(f"operator {number} ({operator.name}) reads tensor {index}")

            tensor = graph.tensors[index]
            # Variables and their handles are written by nobody before their first use.
            if index not in known and not tensor.variable:
                raise BadModel(
                    f"operator {number} ({operator.name}) reads tensor {tensor.name} before"
                    " anything wrote it"
                )

        for index in operator.outputs:
            if not 0 <= index < count or index in known:
                raise BadModel(f"operator {number} ({operator.name}) writes tensor {index}")

            known.add(index)

    for index in graph.outputs:
        if index not in known:
            raise BadModel(f"nothing writes the output {graph.tensors[index].name}")
