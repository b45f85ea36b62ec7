"""Transposed convolutions: TRANSPOSE_CONV, and MediaPipe's with a bias.

Where windows do not overlap (size = step), each input pixel becomes a block of its own: a
matrix product and a change of order. Else zeros are put between the pixels, and a convolution
with the turned weights runs over them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from ai_edge_litert.schema_py_generated import Padding
from tinygrad import Tensor, dtypes

from switchgear.backends.opencl.fixed_point import scaling, stored
from switchgear.backends.opencl.operators.activations import fused, refuse_fused, stored_bounds
from switchgear.backends.opencl.operators.windows import same_padding
from switchgear.backends.opencl.rules import FLOAT, QUANTISED, Rule
from switchgear.backends.opencl.weights import (
    float_bias,
    float_weights,
    whole_bias,
    whole_weights,
)
from switchgear.ipc.errors import BadModel, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from switchgear.backends.opencl.rules import Apply, Inputs, Node

# TfLitePadding of the engine's C headers, which the custom operator's options use.
_SAME_IN_C = 1
_OPTIONS_IN_C = struct.Struct("<3i")


@dataclass(frozen=True, slots=True)
class _Spread:
    """Steps as (height, width), and the size of the result."""

    stride: tuple[int, int]
    result: tuple[int, int]
    same: bool


def transposed_rules() -> dict[str, Rule]:
    """The rules of this module."""
    return {
        "TRANSPOSE_CONV": Rule(
            _transpose_conv,
            version=5,
            dtypes=FLOAT | QUANTISED,
            data=(2,),
            constants=(0, 1, 3),
            refuse=refuse_fused,
        ),
        "CUSTOM:Convolution2DTransposeBias": Rule(_transpose_bias, version=1, constants=(1, 2)),
    }


def _transpose_conv(node: Node) -> Apply:
    sizes = node.numbers(0)
    if len(sizes) != 4:
        raise BadModel(f"{node.title}: a result of {len(sizes)} dimensions")

    spread = _Spread(
        (node.option("strideH"), node.option("strideW")),
        (sizes[1], sizes[2]),
        node.option("padding") == Padding.SAME,
    )
    target = node.result()
    if target.dtype in QUANTISED and node.dtype(2) in QUANTISED:
        return _whole(node, spread)

    spread_out = _spreader(node, 2, float_weights(node, 1), spread)
    bias = float_bias(node, 3)
    offset = None if bias is None else node.place(bias)

    def apply(x: Inputs) -> Tensor:
        result = spread_out(x(2))
        return fused(node, result if offset is None else result + offset)

    return apply


def _whole(node: Node, spread: _Spread) -> Apply:
    values, scales = whole_weights(node, 1, 0)
    spread_out = _spreader(node, 2, values, spread)
    bias = whole_bias(node, 3)
    offset = None if bias is None else node.place(bias)
    source = node.quantisation(node.tensor(2))
    target = node.quantisation(node.result())
    rescale = scaling(
        [source.scales[0] * scale / target.scales[0] for scale in scales], node.place
    )
    bounds = stored_bounds(node)

    def apply(x: Inputs) -> Tensor:
        acc = spread_out(x(2).cast(dtypes.int32) - source.zero_points[0])
        acc = acc if offset is None else acc + offset
        return stored(rescale(acc), target.zero_points[0], bounds, node.result().dtype)

    return apply


def _transpose_bias(node: Node) -> Apply:
    if len(node.operator.custom) != _OPTIONS_IN_C.size:
        raise UnsupportedModel(f"{node.title}: options of {len(node.operator.custom)} bytes")

    padding, stride_w, stride_h = _OPTIONS_IN_C.unpack(node.operator.custom)
    if min(stride_w, stride_h) < 1:
        raise BadModel(f"{node.title}: steps of {stride_w} and {stride_h}")

    source, kernel = node.shape(0, rank=4), node.shape(1, rank=4)
    same = padding == _SAME_IN_C
    rows, columns = (
        size * stride if same else (size - 1) * stride + width
        for size, stride, width in zip(
            source[1:3], (stride_h, stride_w), kernel[1:3], strict=True
        )
    )
    spread = _Spread((stride_h, stride_w), (rows, columns), same)
    spread_out = _spreader(node, 0, float_weights(node, 1), spread)
    bias = float_bias(node, 2)
    offset = None if bias is None else node.place(bias)

    def apply(x: Inputs) -> Tensor:
        result = spread_out(x(0))
        return result if offset is None else result + offset

    return apply


def _spreader(
    node: Node, position: int, weights: NDArray[Any], spread: _Spread
) -> Callable[[Tensor], Tensor]:
    """[n, height, width, in] -> [n, rows, columns, out]; weights [out, height, width, in]."""
    source = node.shape(position, rank=4)
    if weights.ndim != 4 or weights.shape[3] != source[3]:
        raise BadModel(f"{node.title}: {source[3]} channels, weights {list(weights.shape)}")

    if min(*spread.stride, *spread.result) < 1:
        raise BadModel(f"{node.title}: steps {spread.stride} to a result {spread.result}")

    sides = []
    for size, width, stride, result in zip(
        source[1:3], weights.shape[1:3], spread.stride, spread.result, strict=True
    ):
        before, _ = same_padding(result, width, stride) if spread.same else (0, 0)
        # A window of the result over the spread pixels begins that far before the first one.
        sides.append((width - 1 - before, result - (size - 1) * stride - 1 + before))

    if weights.shape[1:3] == spread.stride and spread.result == (
        source[1] * spread.stride[0],
        source[2] * spread.stride[1],
    ):
        return _blocks(node, weights)

    (top, bottom), (left, right) = sides
    turned = np.ascontiguousarray(weights[:, ::-1, ::-1].transpose(0, 3, 1, 2))
    placed = node.place(turned)
    whole = weights.dtype.kind in "iu"

    def apply(x: Tensor) -> Tensor:
        n, h, w, c = source
        stride_h, stride_w = spread.stride
        wide = x.permute(0, 3, 1, 2).reshape(n, c, h, 1, w, 1)
        wide = wide.pad((None, None, None, (0, stride_h - 1), None, (0, stride_w - 1)))
        wide = wide.reshape(n, c, h * stride_h, w * stride_w)
        wide = wide[:, :, : (h - 1) * stride_h + 1, : (w - 1) * stride_w + 1]
        kernel = placed.cast(dtypes.int32) if whole else placed
        return wide.conv2d(kernel, padding=(left, right, top, bottom)).permute(0, 2, 3, 1)

    return apply


def _blocks(node: Node, weights: NDArray[Any]) -> Callable[[Tensor], Tensor]:
    out, rows, columns, channels = weights.shape
    matrix = node.place(weights.transpose(1, 2, 0, 3).reshape(-1, channels))
    whole = weights.dtype.kind in "iu"

    def apply(x: Tensor) -> Tensor:
        n, h, w, _ = x.shape
        kernel = matrix.cast(dtypes.int32) if whole else matrix
        result = x.reshape(-1, channels).dot(kernel.transpose(0, 1))
        result = result.reshape(n, h, w, rows, columns, out).permute(0, 1, 3, 2, 4, 5)
        return result.reshape(n, h * rows, w * columns, out)

    return apply
