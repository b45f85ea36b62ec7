"""A model with state: a variable that outlives the invocation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from switchgear.backends.generate.graph import Model

if TYPE_CHECKING:
    from switchgear.backends.generate.graph import Subgraph

_VARIABLE: Final = "total"
_INITIAL_SUBGRAPH: Final = 1


def accumulator(size: int = 4) -> bytes:
    """`x` [size] -> `total` [size], the sum of every x since the instance was made; float32.

    CALL_ONCE runs a second subgraph that sets the variable to zero at the first invocation;
    VAR_HANDLE, READ_VARIABLE, ADD and ASSIGN_VARIABLE do the rest.
    """
    model = Model("running sum")
    main = model.subgraph()
    x = main.input("x", "float32", [size])
    before = main.tensor("before", "float32", [size])
    total = main.output(main.tensor("total", "float32", [size]))
    main.operator(
        "CALL_ONCE", [], [], schema.CallOnceOptionsT(initSubgraphIndex=_INITIAL_SUBGRAPH)
    )
    handle = _handle(main)
    main.operator("READ_VARIABLE", [handle], [before], schema.ReadVariableOptionsT())
    main.operator("ADD", [before, x], [total], schema.AddOptionsT())
    main.operator("ASSIGN_VARIABLE", [handle, total], [], schema.AssignVariableOptionsT())

    initial = model.subgraph("initial")
    handle = _handle(initial)
    zero = initial.constant("zero", np.zeros(size, np.float32))
    initial.operator("ASSIGN_VARIABLE", [handle, zero], [], schema.AssignVariableOptionsT())

    model.signature({"x": x}, {"total": total})
    return model.to_bytes()


def _handle(subgraph: Subgraph) -> int:
    handle = subgraph.tensor("handle", "resource", [1])
    subgraph.operator(
        "VAR_HANDLE", [], [handle], schema.VarHandleOptionsT(container="", sharedName=_VARIABLE)
    )
    return handle
