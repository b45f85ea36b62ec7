"""Models that hand back what they were given: all of it, or its beginning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from switchgear.backends.generate.graph import Model

if TYPE_CHECKING:
    from collections.abc import Sequence

# What RESHAPE of LiteRT takes on the CPU.
IDENTITY_DTYPES: Final = (
    "float32",
    "float16",
    "float64",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "bool",
    "complex64",
)


def identity(
    shape: Sequence[int] = (1,), dtype: str = "float32", *, signature: bool = True
) -> bytes:
    """`x` [shape] dtype -> `y` [shape] dtype, y = x; one RESHAPE, so one copy is all it costs.

    Without a signature the tensors' own names are all there is: `serving_default_x:0` and
    `PartitionedCall:0`, as converters write them; they are no Python keywords.
    """
    model = Model(f"identity {dtype} {list(shape)}")
    main = model.subgraph()
    x = main.input("serving_default_x:0", dtype, shape)
    to = main.constant("shape", np.asarray(shape, np.int32))
    y = main.output(main.tensor("PartitionedCall:0", dtype, shape))
    main.operator("RESHAPE", [x, to], [y], schema.ReshapeOptionsT(newShape=list(shape)))

    if signature:
        model.signature({"x": x}, {"y": y})

    return model.to_bytes()


def leading_values(size: int, count: int = 4, dtype: str = "float32") -> bytes:
    """`x` [size] dtype -> `head` [count] dtype, the first values of x; one STRIDED_SLICE.

    It reads `count` values whatever `size` is, so a run of 16 MiB (size = 4194304, float32)
    costs what the way to it costs. Raises ValueError when `count` is not within 1..size.
    """
    if not 1 <= count <= size:
        raise ValueError(f"count is {count}; it has to be between 1 and size, which is {size}")

    model = Model(f"first {count} of {size} {dtype}")
    main = model.subgraph()
    x = main.input("x", dtype, [size])
    begin = main.constant("begin", np.asarray([0], np.int32))
    end = main.constant("end", np.asarray([count], np.int32))
    strides = main.constant("strides", np.asarray([1], np.int32))
    head = main.output(main.tensor("head", dtype, [count]))
    main.operator(
        "STRIDED_SLICE", [x, begin, end, strides], [head], schema.StridedSliceOptionsT()
    )
    model.signature({"x": x}, {"head": head})
    return model.to_bytes()
