"""Fully connected layers one after another: matrix products and nothing else."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from switchgear.backends.generate.graph import Model

if TYPE_CHECKING:
    from collections.abc import Sequence

_SEED = 4096


def dense(sizes: Sequence[int], *, rows: int = 1, outlier: float = 0.0) -> bytes:
    """`x` [rows, sizes[0]] -> `y` [rows, sizes[-1]], float32; a layer between each two sizes.

    Weights are normal, scaled so that sums keep the size of what they sum; all layers but the
    last have a RELU. With an `outlier`, neurons 0 and 1 of each 32 are twins, and the layer
    after them weighs one with it and the other with its negative: nothing to the sums, but
    these two weights take the resolution of their group, so that few bits give noise.
    """
    model = Model("fully connected layers")
    main = model.subgraph()
    rng = np.random.default_rng(_SEED)
    x = tensor = main.input("x", "float32", [rows, sizes[0]])
    for number, (k, n) in enumerate(pairwise(sizes)):
        values = rng.standard_normal((n, k), dtype=np.float32) / np.float32(np.sqrt(k / 2))
        if outlier:
            values[1::32] = values[::32]
            if number:
                values[:, ::32] = outlier
                values[:, 1::32] = -outlier

        last = number == len(sizes) - 2
        weights = main.constant(f"weights_{number}", values)
        bias = main.constant(f"bias_{number}", np.full(n, 0.1, np.float32))
        before, tensor = tensor, main.tensor(f"layer_{number}", "float32", [rows, n])
        kind = schema.ActivationFunctionType
        options = schema.FullyConnectedOptionsT(
            fusedActivationFunction=kind.NONE if last else kind.RELU
        )
        main.operator("FULLY_CONNECTED", [before, weights, bias], [tensor], options)

    main.output(tensor)
    model.signature({"x": x}, {"y": tensor})
    return model.to_bytes()
