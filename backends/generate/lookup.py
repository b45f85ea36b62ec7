"""A model whose integer input is an index into a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from switchgear.backends.generate.graph import Model

if TYPE_CHECKING:
    from numpy.typing import NDArray


def lookup(rows: int = 16, width: int = 4, count: int = 1) -> bytes:
    """`index` [count] int32 -> `row` [count, width] float32, rows of `lookup_table`; GATHER.

    The index is valid from 0 to rows - 1. LiteRT checks it and fails the invocation.
    """
    model = Model(f"rows of a table of {rows} x {width}")
    main = model.subgraph()
    index = main.input("index", "int32", [count])
    table = main.constant("table", lookup_table(rows, width))
    row = main.output(main.tensor("row", "float32", [count, width]))
    main.operator("GATHER", [table, index], [row], schema.GatherOptionsT(axis=0))
    model.signature({"index": index}, {"row": row})
    return model.to_bytes()


def lookup_table(rows: int = 16, width: int = 4) -> NDArray[np.float32]:
    """The table in `lookup`: [rows, width], the value at (r, c) is r + c / width."""
    row = np.arange(rows, dtype=np.float32)[:, None]
    column = np.arange(width, dtype=np.float32)[None, :]
    table: NDArray[np.float32] = row + column / np.float32(width)
    return table
