"""Small float models: two inputs and two outputs, and a batch of any size."""

from __future__ import annotations

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from switchgear.backends.generate.graph import Model


def two_inputs(size: int = 4) -> bytes:
    """`a` [size], `b` [size] -> `sum` [size] = a + b, `product` [size] = a * b; all float32."""
    model = Model("sum and product")
    main = model.subgraph()
    a = main.input("a", "float32", [size])
    b = main.input("b", "float32", [size])
    total = main.output(main.tensor("sum", "float32", [size]))
    product = main.output(main.tensor("product", "float32", [size]))
    main.operator("ADD", [a, b], [total], schema.AddOptionsT())
    main.operator("MUL", [a, b], [product], schema.MulOptionsT())
    model.signature({"a": a, "b": b}, {"sum": total, "product": product})
    return model.to_bytes()


def dynamic_batch(width: int = 4) -> bytes:
    """`x` [-1, width] -> `y` [-1, width] = x * (1, 2, ..., width) + 1; all float32.

    The first dimension may be chosen by whoever runs the model and is 1 until then; the second
    is fixed.
    """
    model = Model("scale and shift of any batch")
    main = model.subgraph()
    x = main.input("x", "float32", [-1, width])
    factors = main.constant("factors", np.arange(1, width + 1, dtype=np.float32))
    one = main.constant("one", np.ones(1, np.float32))
    scaled = main.tensor("scaled", "float32", [-1, width])
    y = main.output(main.tensor("y", "float32", [-1, width]))
    main.operator("MUL", [x, factors], [scaled], schema.MulOptionsT())
    main.operator("ADD", [scaled, one], [y], schema.AddOptionsT())
    model.signature({"x": x}, {"y": y})
    return model.to_bytes()
