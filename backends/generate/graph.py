"""A graph of tensors and operators that is written out as a .tflite file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

_SCHEMA_VERSION: Final = 3
_FILE_IDENTIFIER: Final = b"TFL3"

# The schema asks for it (`force_align` of Buffer.data), the generated Python code ignores it,
# and kernels read constants in place.
_BUFFER_ALIGNMENT: Final = 16

# Codes above it stand in `builtin_code` only; the old 8-bit field then holds this one.
_PLACEHOLDER_FOR_GREATER_CODES: Final = 127

TENSOR_TYPES: Final[Mapping[str, int]] = {
    "float32": schema.TensorType.FLOAT32,
    "float16": schema.TensorType.FLOAT16,
    "float64": schema.TensorType.FLOAT64,
    "int8": schema.TensorType.INT8,
    "uint8": schema.TensorType.UINT8,
    "int16": schema.TensorType.INT16,
    "uint16": schema.TensorType.UINT16,
    "int32": schema.TensorType.INT32,
    "uint32": schema.TensorType.UINT32,
    "int64": schema.TensorType.INT64,
    "uint64": schema.TensorType.UINT64,
    "bool": schema.TensorType.BOOL,
    "complex64": schema.TensorType.COMPLEX64,
    "resource": schema.TensorType.RESOURCE,
}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The real value is scale * (stored - zero_point); several scales run along `axis`."""

    scales: tuple[float, ...]
    zero_point: int = 0
    axis: int = 0

    def pack(self) -> Any:
        """The schema's object for it."""
        return schema.QuantizationParametersT(
            scale=np.asarray(self.scales, np.float32),
            zeroPoint=np.full(len(self.scales), self.zero_point, np.int64),
            quantizedDimension=self.axis,
        )


class _AlignedBuffer(schema.BufferT):  # type: ignore[misc]  # the schema has no types
    """A buffer whose bytes begin at a multiple of 16 in the file."""

    def Pack(self, builder: Any) -> Any:  # noqa: N802  # the generated code calls it so
        data = None

        if self.data is not None:
            builder.StartVector(1, len(self.data), _BUFFER_ALIGNMENT)
            start = builder.Head() - len(self.data)
            builder.head = start
            builder.Bytes[start : start + len(self.data)] = self.data
            data = builder.EndVector()

        schema.BufferStart(builder)

        if data is not None:
            schema.BufferAddData(builder, data)

        return schema.BufferEnd(builder)


class Subgraph:
    """One subgraph under construction; tensors are named by their index, an int."""

    def __init__(self, model: Model, name: str) -> None:
        self._model = model
        self._object = schema.SubGraphT(
            tensors=[], inputs=[], outputs=[], operators=[], name=name
        )

    @property
    def packed(self) -> Any:
        """The schema's object for it."""
        return self._object

    def tensor(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        *,
        quantisation: Quantisation | None = None,
    ) -> int:
        """Adds a tensor that an operator computes.

        A dimension of -1 may change at run time: it stands so in `shape_signature`, and as 1 in
        `shape`. Raises KeyError for a dtype outside `TENSOR_TYPES`.
        """
        dynamic = any(size < 0 for size in shape)
        self._object.tensors.append(
            schema.TensorT(
                shape=[1 if size < 0 else size for size in shape],
                shapeSignature=list(shape) if dynamic else None,
                type=TENSOR_TYPES[dtype],
                buffer=0,
                name=name,
                hasRank=True,
                quantization=quantisation.pack() if quantisation is not None else None,
            )
        )
        return len(self._object.tensors) - 1

    def input(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        *,
        quantisation: Quantisation | None = None,
    ) -> int:
        """Adds a tensor that the caller fills; inputs keep the order of these calls."""
        index = self.tensor(name, dtype, shape, quantisation=quantisation)
        self._object.inputs.append(index)
        return index

    def output(self, index: int) -> int:
        """Makes a tensor one that the caller reads; outputs keep the order of these calls."""
        self._object.outputs.append(index)
        return index

    def constant(
        self, name: str, value: NDArray[Any], *, quantisation: Quantisation | None = None
    ) -> int:
        """Adds a tensor whose elements stand in the file."""
        index = self.tensor(name, value.dtype.name, value.shape, quantisation=quantisation)
        self._object.tensors[index].buffer = self._model.add_buffer(value)
        return index

    def operator(
        self,
        name: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        options: Any = None,
        *,
        version: int = 1,
    ) -> None:
        """Appends an operator, `name` as in the schema's BuiltinOperator (`CONV_2D`).

        `options` is the schema's object for it (`Conv2DOptionsT`), None where it has none.
        Operators run in the order of these calls.
        """
        self._object.operators.append(
            schema.OperatorT(
                opcodeIndex=self._model.operator_code(name, version),
                inputs=list(inputs),
                outputs=list(outputs),
                builtinOptionsType=_options_type(options),
                builtinOptions=options,
            )
        )


class Model:
    """A file under construction. The first subgraph is the one that an invocation runs."""

    def __init__(self, description: str) -> None:
        self._description = description
        self._subgraphs: list[Subgraph] = []
        self._signatures: list[Any] = []
        self._codes: dict[tuple[str, int], int] = {}
        # Buffer 0 is empty by convention: it is what tensors without content point to.
        self._buffers: list[_AlignedBuffer] = [_AlignedBuffer()]

    def subgraph(self, name: str = "main") -> Subgraph:
        """Adds an empty subgraph."""
        subgraph = Subgraph(self, name)
        self._subgraphs.append(subgraph)
        return subgraph

    def add_buffer(self, value: NDArray[Any]) -> int:
        """Adds the elements of an array, row by row, and returns the buffer's index."""
        little_endian = value.astype(value.dtype.newbyteorder("<"), copy=False)
        self._buffers.append(_AlignedBuffer(data=little_endian.tobytes()))
        return len(self._buffers) - 1

    def operator_code(self, name: str, version: int) -> int:
        """Index of an operator in the file's table; it is added at its first use.

        Raises AttributeError for a name that the schema does not have.
        """
        getattr(schema.BuiltinOperator, name)
        return self._codes.setdefault((name, version), len(self._codes))

    def signature(
        self,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
        *,
        key: str = "serving_default",
        subgraph_index: int = 0,
    ) -> None:
        """Gives the inputs and outputs of a subgraph the names that callers use."""
        self._signatures.append(
            schema.SignatureDefT(
                inputs=_tensor_maps(inputs),
                outputs=_tensor_maps(outputs),
                signatureKey=key,
                subgraphIndex=subgraph_index,
            )
        )

    def to_bytes(self) -> bytes:
        """The finished file; the same calls give the same bytes."""
        codes = []

        for name, version in self._codes:
            code = getattr(schema.BuiltinOperator, name)
            codes.append(
                schema.OperatorCodeT(
                    deprecatedBuiltinCode=min(code, _PLACEHOLDER_FOR_GREATER_CODES),
                    builtinCode=code,
                    version=version,
                )
            )

        model = schema.ModelT(
            version=_SCHEMA_VERSION,
            operatorCodes=codes,
            subgraphs=[subgraph.packed for subgraph in self._subgraphs],
            description=self._description,
            buffers=self._buffers,
            signatureDefs=self._signatures or None,
        )
        content = sum(len(buffer.data) for buffer in self._buffers if buffer.data is not None)
        # A builder that is too small doubles and copies everything each time.
        builder = flatbuffers.Builder(content + 65536)
        builder.Finish(model.Pack(builder), _FILE_IDENTIFIER)
        return bytes(builder.Output())


def _options_type(options: Any) -> int:
    """The schema numbers its option tables by name: `Conv2DOptionsT` is `Conv2DOptions`."""
    if options is None:
        return 0

    number: int = getattr(schema.BuiltinOptions, type(options).__name__.removesuffix("T"))
    return number


def _tensor_maps(tensors: Mapping[str, int]) -> list[Any]:
    return [schema.TensorMapT(name=name, tensorIndex=index) for name, index in tensors.items()]
