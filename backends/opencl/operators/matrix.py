"""Matrix products: with constant weights (FULLY_CONNECTED), and of two computed tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from tinygrad import Tensor, dtypes

from switchgear.backends.opencl.fixed_point import scaling, stored
from switchgear.backends.opencl.operators.activations import (
    STORED_LIMITS,
    fused,
    refuse_fused,
    stored_bounds,
)
from switchgear.backends.opencl.rules import FLOAT, QUANTISED, Rule, volume
from switchgear.backends.opencl.weights import (
    float_bias,
    float_weights,
    whole_bias,
    whole_weights,
)
from switchgear.ipc.errors import BadModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from switchgear.backends.opencl.graph import Shape
    from switchgear.backends.opencl.rules import Apply, Inputs, Node


def _fully_connected(node: Node) -> Apply:
    k = node.shape(1, rank=2)[1]
    if volume(node.shape(0)) % max(k, 1):
        raise BadModel(f"{node.title}: {list(node.shape(0))} in rows of {k}")

    if node.quantised:
        return _whole(node)

    return _float(node) if node.is_known(1) else _computed(node)


def _refuse_fully_connected(node: Node) -> str:
    if node.option("weightsFormat"):
        return "shuffled weights"

    if not node.is_known(1) and (node.quantised or node.dtype(1) != "float32"):
        return f"weights of {node.dtype(1)} that are computed at run time"

    return refuse_fused(node)


def _result_shape(node: Node) -> Shape:
    n, k = node.shape(1)
    source = node.shape(0)
    if node.option("keepNumDims"):
        return (*source[:-1], n)

    return (volume(source) // k, n)


def _float(node: Node) -> Apply:
    matrix = float_weights(node, 1)
    k = matrix.shape[1]
    bias = float_bias(node, 2)
    offset = None if bias is None else node.place(bias)
    shape = _result_shape(node)
    hook = node.linear
    # A hook that takes the product places weights of its own.
    placed = [] if hook is not None else [node.place(matrix)]

    def apply(x: Inputs) -> Tensor:
        rows = x(0).reshape(-1, k)
        result = hook(node.index, rows, matrix) if hook is not None else None
        if result is None:
            if not placed:
                placed.append(node.place(matrix))

            result = rows.dot(placed[0].transpose(0, 1))

        result = result.reshape(shape)
        return fused(node, result if offset is None else result + offset)

    return apply


def _computed(node: Node) -> Apply:
    """Weights that the model computes itself, as attention does."""
    k = node.shape(1)[1]
    shape = _result_shape(node)

    def apply(x: Inputs) -> Tensor:
        result = x(0).reshape(-1, k).dot(x(1).transpose(0, 1)).reshape(shape)
        return fused(node, result + x(2) if node.has(2) else result)

    return apply


def _whole(node: Node) -> Apply:
    values, scales = whole_weights(node, 1, 0)
    weights = node.place(values)
    bias = whole_bias(node, 2)
    offset = None if bias is None else node.place(bias)
    source = node.quantisation(node.tensor(0))
    target = node.quantisation(node.result())
    rescale = scaling(
        [source.scales[0] * scale / target.scales[0] for scale in scales], node.place
    )
    bounds = stored_bounds(node)
    shape = _result_shape(node)

    def apply(x: Inputs) -> Tensor:
        rows = x(0).cast(dtypes.int32).reshape(-1, values.shape[1]) - source.zero_points[0]
        acc = rows.dot(weights.cast(dtypes.int32).transpose(0, 1))
        acc = rescale(acc if offset is None else acc + offset)
        result = stored(acc, target.zero_points[0], bounds, node.result().dtype)
        return result.reshape(shape)

    return apply


def _batch_matmul(node: Node) -> Apply:
    if node.quantised:
        return _whole_batch_matmul(node)

    if node.dtype(1) in QUANTISED:
        right = node.place(float_weights(node, 1))
        return lambda x: _multiplied(node, x(0), right)

    return lambda x: _multiplied(node, x(0), x(1))


def _whole_batch_matmul(node: Node) -> Apply:
    left, right = node.quantisation(node.tensor(0)), node.quantisation(node.tensor(1))
    target = node.quantisation(node.result())
    rescale = scaling([left.scales[0] * right.scales[0] / target.scales[0]], node.place)

    def apply(x: Inputs) -> Tensor:
        a = x(0).cast(dtypes.int32) - left.zero_points[0]
        b = x(1).cast(dtypes.int32) - right.zero_points[0]
        acc = rescale(_multiplied(node, a, b))
        dtype = node.result().dtype
        return stored(acc, target.zero_points[0], STORED_LIMITS[dtype], dtype)

    return apply


def _multiplied(node: Node, a: Tensor, b: Tensor) -> Tensor:
    if node.option("adjX"):
        a = a.transpose(-2, -1)

    if node.option("adjY"):
        b = b.transpose(-2, -1)

    return a.matmul(b)


def _refuse_batch_matmul(node: Node) -> str:
    a, b = list(node.shape(0)), list(node.shape(1))
    if min(len(a), len(b)) < 2:
        return f"shapes {a} and {b}"

    inner = a[-2 if node.option("adjX") else -1], b[-1 if node.option("adjY") else -2]
    try:
        np.broadcast_shapes(tuple(a[:-2]), tuple(b[:-2]))
    except ValueError:
        return f"shapes {a} and {b}"

    if inner[0] != inner[1]:
        return f"shapes {a} and {b}"

    if node.dtype(0) in FLOAT and node.dtype(1) in QUANTISED and not node.is_known(1):
        return "stored numbers that are computed at run time"

    return ""


RULES: Final[Mapping[str, Rule]] = {
    "BATCH_MATMUL": Rule(
        _batch_matmul, version=4, dtypes=FLOAT | QUANTISED, refuse=_refuse_batch_matmul
    ),
    "FULLY_CONNECTED": Rule(
        _fully_connected,
        version=14,
        dtypes=FLOAT | QUANTISED,
        refuse=_refuse_fully_connected,
    ),
}
