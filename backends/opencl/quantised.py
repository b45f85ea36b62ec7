"""Stored whole numbers and the real values they stand for, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from tinygrad import Tensor, dtypes

from switchgear.backends.opencl.fixed_point import rounded, scaling, stored
from switchgear.backends.opencl.operators.activations import STORED_LIMITS
from switchgear.backends.opencl.rules import QUANTISED

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from switchgear.backends.opencl.graph import GraphTensor
    from switchgear.backends.opencl.rules import Inputs, Node


def reader(node: Node, position: int) -> Callable[[Inputs], Tensor]:
    """What gives an input as real values: dequantised where it is stored as whole numbers."""
    tensor = node.tensor(position)
    if tensor.dtype not in QUANTISED or tensor.quantisation is None:
        return lambda x: x(position)

    dequantise = dequantiser(node, tensor)
    return lambda x: dequantise(x(position))


def writer(node: Node, position: int = 0) -> Callable[[Tensor], Tensor]:
    """What turns real values into the operator's result: quantised where it is stored so."""
    tensor = node.result(position)
    if tensor.dtype not in QUANTISED or tensor.quantisation is None:
        return lambda value: value

    return quantiser(node, tensor)


def dequantiser(node: Node, tensor: GraphTensor) -> Callable[[Tensor], Tensor]:
    quantisation = node.quantisation(tensor)
    scale = _along(node, tensor, np.asarray(quantisation.scales, np.float32))
    zero = _along(node, tensor, np.asarray(quantisation.zero_points, np.int32))

    def apply(value: Tensor) -> Tensor:
        return (value.cast(dtypes.int32) - zero).cast(dtypes.float32) * scale

    return apply


def quantiser(node: Node, tensor: GraphTensor) -> Callable[[Tensor], Tensor]:
    quantisation = node.quantisation(tensor)
    scale = _along(node, tensor, np.asarray(quantisation.scales, np.float32))
    zero = _along(node, tensor, np.asarray(quantisation.zero_points, np.int32))
    least, largest = STORED_LIMITS[tensor.dtype]

    def apply(value: Tensor) -> Tensor:
        # Cut off before the conversion: what a value beyond int32 becomes is not defined.
        steps = (value / scale).maximum(-65536.0).minimum(65536.0)
        whole = rounded(steps) + zero
        return stored(whole, 0, (least, largest), tensor.dtype)

    return apply


def requantiser(
    node: Node, source: GraphTensor, target: GraphTensor
) -> Callable[[Tensor], Tensor]:
    """From one tensor's stored numbers to another's, in whole numbers as the engine does."""
    given, wanted = node.quantisation(source), node.quantisation(target)
    if source.dtype == target.dtype and given == wanted:
        return lambda value: value

    rescale = scaling([given.scales[0] / wanted.scales[0]], node.place)
    bounds = STORED_LIMITS[target.dtype]

    def apply(value: Tensor) -> Tensor:
        steps = rescale(value.cast(dtypes.int32) - given.zero_points[0])
        return stored(steps, wanted.zero_points[0], bounds, target.dtype)

    return apply


def _along(node: Node, tensor: GraphTensor, values: NDArray[Any]) -> Any:
    """A number, or what spreads over the other axes of the tensor."""
    if values.size == 1:
        return values.item()

    assert tensor.quantisation is not None
    along = [1] * len(tensor.shape)
    along[tensor.quantisation.axis] = -1
    return node.place(values.reshape(along))
