"""Constant weights of convolutions and matrix products: as float, and as stored numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from switchgear.backends.opencl.graph import GraphTensor
from switchgear.ipc.errors import BadModel, UnsupportedModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from switchgear.backends.opencl.graph import Quantisation
    from switchgear.backends.opencl.rules import Node

_FLOATS = {"float32", "float16"}
_WHOLE = {"int8", "uint8", "int4", "int16", "int32"}


def unpacked(tensor: GraphTensor, data: NDArray[Any]) -> NDArray[Any]:
    """A constant in its shape; 4-bit ones become int8, the low half of a byte first."""
    if tensor.dtype != "int4":
        return data.reshape(tensor.shape)

    halves = np.stack([data & 15, data >> 4], axis=-1).reshape(-1)[: tensor.size]
    return ((halves ^ 8).astype(np.int8) - 8).reshape(tensor.shape)


def dequantised(
    values: NDArray[Any], quantisation: Quantisation, *, what: str = "a constant"
) -> NDArray[np.float32]:
    """scale * (stored - zero point), in float32 as the engine does."""
    scales = np.asarray(quantisation.scales, np.float32)
    zeros = np.asarray(quantisation.zero_points, np.int32)
    if scales.size > 1:
        if not quantisation.axis < values.ndim:
            raise BadModel(f"{what} has its scales along an axis that it lacks")

        along = [1] * values.ndim
        along[quantisation.axis] = -1
        scales, zeros = scales.reshape(along), zeros.reshape(along)

    result: NDArray[np.float32] = (values.astype(np.int32) - zeros).astype(np.float32) * scales
    return result


def float_weights(node: Node, position: int) -> NDArray[np.float32]:
    """A constant input as float32: half floats widened, stored numbers dequantised.

    :raises UnsupportedModel: it is computed at run time, or of another dtype.
    """
    tensor = node.tensor(position)
    values = node.constant(position)
    if tensor.dtype in _FLOATS:
        return np.asarray(values, np.float32)

    if tensor.dtype not in _WHOLE:
        raise UnsupportedModel(f"{node.title}: weights of {tensor.dtype}")

    return dequantised(values, node.quantisation(tensor), what=tensor.name)


def whole_weights(node: Node, position: int, axis: int) -> tuple[NDArray[Any], list[float]]:
    """A constant input as stored numbers less their zero point, and its scales.

    int8 where the zero points are zero, as they nearly always are, else int32. There is one
    scale, or one for each element along `axis`.

    :raises UnsupportedModel: the scales run along another axis.
    """
    tensor = node.tensor(position)
    quantisation = node.quantisation(tensor)
    values = node.constant(position)
    if len(quantisation.scales) > 1 and quantisation.axis != axis:
        raise UnsupportedModel(f"{node.title}: weights with scales along {quantisation.axis}")

    zeros = np.asarray(quantisation.zero_points, np.int32)
    if zeros.any():
        along = [1] * values.ndim
        along[axis] = -1
        values = values.astype(np.int32) - zeros.reshape(along if zeros.size > 1 else ())

    return values, list(quantisation.scales)


def whole_bias(node: Node, position: int) -> NDArray[np.int32] | None:
    """The bias of a quantised operator, None where it has none.

    :raises UnsupportedModel: it is not int32.
    """
    if not node.has(position):
        return None

    values = node.constant(position)
    if values.dtype != np.int32:
        raise UnsupportedModel(f"{node.title}: a bias of {values.dtype.name}")

    return values


def float_bias(node: Node, position: int) -> NDArray[np.float32] | None:
    """The bias as float32, None where the operator has none."""
    return float_weights(node, position) if node.has(position) else None
