"""A model of a few hundred bytes that needs as much memory as the test wants."""

from __future__ import annotations

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from switchgear.backends.generate.graph import Model

CHANNELS = 8
ROW_BYTES = 4 * CHANNELS


def wide_network(size_mib: int) -> bytes:
    """`x` [1, 8] -> `y` [1, 8], float32 and the same: over a tensor of `size_mib` MiB, which
    holds x in each row and of which the largest of each column is taken."""
    model = Model("wide network")
    main = model.subgraph()
    rows = (size_mib << 20) // ROW_BYTES
    x = main.input("x", "float32", [1, CHANNELS])
    times = main.constant("times", np.asarray([rows, 1], np.int32))
    tiled = main.tensor("tiled", "float32", [rows, CHANNELS])
    main.operator("TILE", [x, times], [tiled], schema.TileOptionsT())
    axis = main.constant("axis", np.asarray([0], np.int32))
    y = main.output(main.tensor("y", "float32", [1, CHANNELS]))
    main.operator("REDUCE_MAX", [tiled, axis], [y], schema.ReducerOptionsT(keepDims=True))
    model.signature({"x": x}, {"y": y})
    return model.to_bytes()
