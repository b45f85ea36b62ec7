"""Models whose output has a shape that only the values of the input tell."""

from __future__ import annotations

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from switchgear.backends.generate.graph import Model


def positive_positions(size: int = 8) -> bytes:
    """`x` [size] float32 -> `positions` [-1, 1] int64, the indices where x > 0.

    The output has 0 to `size` rows. LiteRT's Python wrapper raises ValueError ("Invalid tensor
    size.") when it is asked for an output of no elements; its shape can be read.
    """
    model = Model("positions of positive values")
    main = model.subgraph()
    x = main.input("x", "float32", [size])
    zero = main.constant("zero", np.zeros(1, np.float32))
    positive = main.tensor("positive", "bool", [size])
    positions = main.output(main.tensor("positions", "int64", [-1, 1]))
    main.operator("GREATER", [x, zero], [positive], schema.GreaterOptionsT())
    main.operator("WHERE", [positive], [positions], schema.WhereOptionsT())
    model.signature({"x": x}, {"positions": positions})
    return model.to_bytes()


def ramp() -> bytes:
    """`limit` [] int32 -> `values` [-1] int32 = 0, 1, ..., limit - 1.

    Four bytes in, as many bytes out as the caller asks for: no upper bound is known beforehand.
    """
    model = Model("0, 1, ..., limit - 1")
    main = model.subgraph()
    limit = main.input("limit", "int32", [])
    start = main.constant("start", np.asarray(0, np.int32))
    step = main.constant("step", np.asarray(1, np.int32))
    values = main.output(main.tensor("values", "int32", [-1]))
    main.operator("RANGE", [start, limit, step], [values], schema.RangeOptionsT())
    model.signature({"limit": limit}, {"values": values})
    return model.to_bytes()
