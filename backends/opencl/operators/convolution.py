"""Convolutions: plain, grouped, depthwise, dilated and transposed; float, hybrid, quantised.

Float ones multiply in float32, weights stored as half floats or whole numbers are widened when
the model is built. Quantised ones add up in int32 and scale as the reference kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from tinygrad import Tensor, dtypes

from switchgear.backends.opencl.fixed_point import scaling, stored
from switchgear.backends.opencl.operators.activations import fused, refuse_fused, stored_bounds
from switchgear.backends.opencl.operators.transposed import transposed_rules
from switchgear.backends.opencl.operators.windows import Window, window
from switchgear.backends.opencl.rules import FLOAT, QUANTISED, Rule
from switchgear.backends.opencl.weights import (
    float_bias,
    float_weights,
    whole_bias,
    whole_weights,
)
from switchgear.ipc.errors import BadModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from switchgear.backends.opencl.rules import Apply, Inputs, Node


def _conv_2d(node: Node) -> Apply:
    return _convolution(node, _plain_layout, channel_axis=0)


def _depthwise_conv_2d(node: Node) -> Apply:
    return _convolution(node, _depthwise_layout, channel_axis=3)


def _plain_layout(node: Node, weights: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """[out, height, width, in] as tinygrad takes it, and the number of groups."""
    channels = node.shape(0)[3]
    if channels % weights.shape[3] or weights.shape[0] % (channels // weights.shape[3]):
        raise BadModel(f"{node.title}: {channels} channels, weights {list(weights.shape)}")

    return weights.transpose(0, 3, 1, 2), channels // weights.shape[3]


def _depthwise_layout(node: Node, weights: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """[1, height, width, channels * multiplier] as tinygrad takes it, and the groups."""
    channels = node.shape(0)[3]
    if weights.shape[0] != 1 or weights.shape[3] % channels:
        raise BadModel(f"{node.title}: {channels} channels, weights {list(weights.shape)}")

    return weights.transpose(3, 0, 1, 2), channels


Layout = Callable[["Node", "NDArray[Any]"], "tuple[NDArray[Any], int]"]


def _convolution(node: Node, layout: Layout, *, channel_axis: int) -> Apply:
    source, kernel = node.shape(0, rank=4), node.shape(1, rank=4)
    windows = window(
        node,
        source[1:3],
        (kernel[1], kernel[2]),
        dilation=(node.option("dilationHFactor", 1), node.option("dilationWFactor", 1)),
    )
    if node.quantised:
        return _whole(node, layout, windows, channel_axis)

    if channel_axis == 0 and is_product(node):
        return _product(node)

    return _float(node, layout, windows)


def _float(node: Node, layout: Layout, windows: Window) -> Apply:
    values, groups = layout(node, float_weights(node, 1))
    weights = node.place(values)
    bias = float_bias(node, 2)
    offset = None if bias is None else node.place(bias)

    def apply(x: Inputs) -> Tensor:
        result = _slide(x(0), weights, groups, windows)
        return fused(node, result if offset is None else result + offset)

    return apply


def _whole(node: Node, layout: Layout, windows: Window, channel_axis: int) -> Apply:
    values, scales = whole_weights(node, 1, channel_axis)
    arranged, groups = layout(node, values)
    weights = node.place(arranged)
    bias = whole_bias(node, 2)
    offset = None if bias is None else node.place(bias)
    source = node.quantisation(node.tensor(0))
    target = node.quantisation(node.result())
    ratios = [source.scales[0] * scale / target.scales[0] for scale in scales]
    rescale = scaling(ratios, node.place)
    bounds = stored_bounds(node)

    def apply(x: Inputs) -> Tensor:
        shifted = x(0).cast(dtypes.int32) - source.zero_points[0]
        acc = _slide(shifted, weights.cast(dtypes.int32), groups, windows)
        acc = acc if offset is None else acc + offset
        return stored(rescale(acc), target.zero_points[0], bounds, node.result().dtype)

    return apply


def _slide(x: Tensor, weights: Tensor, groups: int, windows: Window) -> Tensor:
    """[n, height, width, in] -> [n, height, width, out]."""
    result = x.permute(0, 3, 1, 2).conv2d(
        weights,
        groups=groups,
        stride=windows.stride,
        dilation=windows.dilation,
        padding=windows.padding,
    )
    return result.permute(0, 2, 3, 1)


def is_product(node: Node) -> bool:
    """Whether a CONV_2D is a matrix product: of 1x1, step 1, in float, with known weights."""
    kernel = node.shape(1)
    return (
        len(kernel) == 4
        and kernel[1:3] == (1, 1)
        and kernel[3] == node.shape(0, rank=4)[3]
        and node.option("strideH") == node.option("strideW") == 1
        and not node.quantised
        and node.is_known(1)
    )


def _product(node: Node) -> Apply:
    values = float_weights(node, 1)
    n, k = values.shape[0], values.shape[3]
    matrix = np.ascontiguousarray(values.reshape(n, k))
    bias = float_bias(node, 2)
    offset = None if bias is None else node.place(bias)
    hook = node.linear
    # A hook that takes the product places weights of its own.
    placed = [] if hook is not None else [node.place(matrix.reshape(n, k, 1, 1))]

    def apply(x: Inputs) -> Tensor:
        given = x(0)
        result = None
        if hook is not None:
            result = hook(node.index, given.reshape(-1, k), matrix)

        if result is None:
            if not placed:
                placed.append(node.place(matrix.reshape(n, k, 1, 1)))

            result = given.permute(0, 3, 1, 2).conv2d(placed[0]).permute(0, 2, 3, 1)

        result = result.reshape(*given.shape[:3], n)
        return fused(node, result if offset is None else result + offset)

    return apply


RULES: Final[Mapping[str, Rule]] = {
    "CONV_2D": Rule(
        _conv_2d,
        version=8,
        dtypes=FLOAT | QUANTISED,
        constants=(1, 2),
        refuse=refuse_fused,
    ),
    "DEPTHWISE_CONV_2D": Rule(
        _depthwise_conv_2d,
        version=7,
        dtypes=FLOAT | QUANTISED,
        constants=(1, 2),
        refuse=refuse_fused,
    ),
    **transposed_rules(),
}
