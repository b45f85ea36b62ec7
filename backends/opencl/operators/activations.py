"""The activations that are fused into other operators, in float and on quantised values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ai_edge_litert.schema_py_generated import ActivationFunctionType as Kind

from switchgear.ipc.errors import UnsupportedModel

if TYPE_CHECKING:
    from tinygrad import Tensor

    from switchgear.backends.opencl.rules import Node

# Lower and upper bound of those that cut their input off.
_BOUNDS: Final = {
    Kind.NONE: (None, None),
    Kind.RELU: (0.0, None),
    Kind.RELU_N1_TO_1: (-1.0, 1.0),
    Kind.RELU6: (0.0, 6.0),
}
STORED_LIMITS: Final = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-32768, 32767)}


def refuse_fused(node: Node) -> str:
    """Why the fused activation is not possible, empty when it is."""
    kind = node.option("fusedActivationFunction")
    if kind in _BOUNDS or kind == Kind.TANH:
        return ""

    return f"fused activation {kind}"


def fused(node: Node, x: Tensor) -> Tensor:
    """The operator's own activation of float values."""
    kind = node.option("fusedActivationFunction")
    if kind == Kind.TANH:
        return x.tanh()

    if kind not in _BOUNDS:
        raise UnsupportedModel(f"{node.title}: fused activation {kind}")

    return bounded(x, *_BOUNDS[kind])


def bounded(x: Tensor, low: float | None, high: float | None) -> Tensor:
    if low is not None:
        x = x.relu() if low == 0 else x.maximum(low)

    return x.minimum(high) if high is not None else x


def stored_bounds(node: Node) -> tuple[int, int]:
    """The least and largest stored value that the fused activation lets through."""
    return limits_of(node, *_BOUNDS.get(node.option("fusedActivationFunction"), (None, None)))


def limits_of(node: Node, low: float | None, high: float | None) -> tuple[int, int]:
    """Real bounds as stored values of the operator's output, rounded as the engine does."""
    target = node.result()
    quantisation = node.quantisation(target)
    scale, zero = quantisation.scales[0], quantisation.zero_points[0]
    least, largest = STORED_LIMITS[target.dtype]
    if low is not None:
        least = max(least, zero + _round_half_away(low / scale))

    if high is not None:
        largest = min(largest, zero + _round_half_away(high / scale))

    return least, largest


def _round_half_away(value: float) -> int:
    return int(value + (0.5 if value >= 0 else -0.5))
