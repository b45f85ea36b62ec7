"""Activations as operators of their own, in float and on quantised values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np
from tinygrad import Tensor, dtypes

from switchgear.backends.opencl.fixed_point import scaling, stored
from switchgear.backends.opencl.operators.activations import STORED_LIMITS, bounded, limits_of
from switchgear.backends.opencl.operators.sums import total
from switchgear.backends.opencl.quantised import reader, writer
from switchgear.backends.opencl.rules import FLOAT, QUANTISED, Rule
from switchgear.backends.opencl.weights import float_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from switchgear.backends.opencl.rules import Apply, Inputs, Node

# Below it the sum of squares counts as this: the engine's guard against a division by zero.
_LEAST_SQUARES: Final = 1e-6


def _real(function: Callable[[Node, Tensor], Tensor]) -> Callable[[Node], Apply]:
    """Computed on real values, within one step of the engine's on quantised ones."""

    def prepare(node: Node) -> Apply:
        read, write = reader(node, 0), writer(node)
        return lambda x: write(function(node, read(x)))

    return prepare


def _cut_off(low: float, high: float | None) -> Callable[[Node], Apply]:
    def prepare(node: Node) -> Apply:
        if not node.quantised:
            return lambda x: bounded(x(0), low, high)

        # In whole numbers, as the engine does.
        given = node.quantisation(node.tensor(0))
        wanted = node.quantisation(node.result())
        rescale = scaling([given.scales[0] / wanted.scales[0]], node.place)
        bounds = limits_of(node, low, high)

        def apply(x: Inputs) -> Tensor:
            steps = rescale(x(0).cast(dtypes.int32) - given.zero_points[0])
            return stored(steps, wanted.zero_points[0], bounds, node.result().dtype)

        return apply

    return prepare


def _leaky_relu(node: Node) -> Apply:
    slope = node.operator.options.get("alpha", 0.0)
    if not isinstance(slope, int | float):
        slope = 0.0

    if not node.quantised:
        return lambda x: (x(0) > 0).where(x(0), x(0) * slope)

    return _sloped(node, np.asarray([slope], np.float32))


def _prelu(node: Node) -> Apply:
    if node.quantised:
        slopes = node.quantisation(node.tensor(1))
        steps = node.constant(1).astype(np.int32) - slopes.zero_points[0]
        return _sloped_by(node, steps, slopes.scales[0])

    slope = node.place(float_weights(node, 1))
    return lambda x: (x(0) > 0).where(x(0), x(0) * slope)


def _sloped(node: Node, slopes: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Apply:
    return _sloped_by(node, np.ones(1, np.int32), float(slopes[0]))


def _sloped_by(
    node: Node, steps: np.ndarray[tuple[int, ...], np.dtype[np.int32]], scale: float
) -> Apply:
    """Below zero times steps * scale, in whole numbers as the engine does."""
    given, wanted = node.quantisation(node.tensor(0)), node.quantisation(node.result())
    ratio = given.scales[0] / wanted.scales[0]
    above = scaling([ratio], node.place)
    below = scaling([abs(ratio * scale)], node.place)
    factor = node.place(steps if scale >= 0 else -steps)
    bounds = STORED_LIMITS[node.result().dtype]

    def apply(x: Inputs) -> Tensor:
        value = x(0).cast(dtypes.int32) - given.zero_points[0]
        result = (value >= 0).where(above(value), below(value * factor))
        return stored(result, wanted.zero_points[0], bounds, node.result().dtype)

    return apply


def _hard_swish(node: Node, x: Tensor) -> Tensor:
    return x * bounded(x + 3, 0.0, 6.0) * (1 / 6)


def _elu(node: Node, x: Tensor) -> Tensor:
    return (x < 0).where(x.minimum(0).exp() - 1, x)


def _gelu(node: Node, x: Tensor) -> Tensor:
    return x.gelu("tanh" if node.option("approximate") else "none")


def _softmax(node: Node, x: Tensor) -> Tensor:
    beta = node.operator.options.get("beta", 1.0)
    scaled_up = x * beta if isinstance(beta, float) and beta != 1 else x
    powers = (scaled_up - scaled_up.max(axis=-1, keepdim=True)).exp()
    return powers * total(powers, (x.ndim - 1,), keepdim=True).reciprocal()


def _log_softmax(node: Node, x: Tensor) -> Tensor:
    below = x - x.max(axis=-1, keepdim=True)
    return below - total(below.exp(), (x.ndim - 1,), keepdim=True).log()


def _l2_normalise(node: Node, x: Tensor) -> Tensor:
    length = total(x.square(), (x.ndim - 1,), keepdim=True).sqrt()
    return x / length.maximum(_LEAST_SQUARES)


def _refuse_fused(node: Node) -> str:
    kind = node.option("fusedActivationFunction")
    return f"fused activation {kind}" if kind else ""


_BOTH: Final = FLOAT | QUANTISED

RULES: Final[Mapping[str, Rule]] = {
    "ELU": Rule(_real(_elu), dtypes=_BOTH),
    "GELU": Rule(_real(_gelu), version=2, dtypes=_BOTH),
    "HARD_SWISH": Rule(_real(_hard_swish), dtypes=_BOTH),
    "L2_NORMALIZATION": Rule(
        _real(_l2_normalise), version=2, dtypes=_BOTH, refuse=_refuse_fused
    ),
    "LEAKY_RELU": Rule(_leaky_relu, version=2, dtypes=_BOTH),
    "LOGISTIC": Rule(_real(lambda node, x: x.sigmoid()), version=3, dtypes=_BOTH),
    "LOG_SOFTMAX": Rule(_real(_log_softmax), version=2, dtypes=_BOTH),
    "PRELU": Rule(_prelu, dtypes=_BOTH, constants=(1,)),
    "RELU": Rule(_cut_off(0.0, None), version=3, dtypes=_BOTH),
    "RELU6": Rule(_cut_off(0.0, 6.0), version=3, dtypes=_BOTH),
    "RELU_0_TO_1": Rule(_cut_off(0.0, 1.0), dtypes=_BOTH),
    "RELU_N1_TO_1": Rule(_cut_off(-1.0, 1.0), dtypes=_BOTH),
    "SOFTMAX": Rule(_real(_softmax), version=3, dtypes=_BOTH),
    "TANH": Rule(_real(lambda node, x: x.tanh()), version=3, dtypes=_BOTH),
}
