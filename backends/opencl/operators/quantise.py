"""QUANTIZE, DEQUANTIZE, DENSIFY: between float, half float, stored numbers and sparse ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tinygrad import Tensor, dtypes

from switchgear.backends.opencl.quantised import dequantiser, quantiser, requantiser
from switchgear.backends.opencl.rules import QUANTISED, Rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from switchgear.backends.opencl.rules import Apply, Inputs, Node


def _quantize(node: Node) -> Apply:
    source = node.tensor(0)
    convert = (
        quantiser(node, node.result())
        if source.dtype == "float32"
        else requantiser(node, source, node.result())
    )
    return lambda x: convert(x(0))


def _refuse_quantize(node: Node) -> str:
    source, target = node.tensor(0), node.result()
    if target.dtype not in QUANTISED:
        return f"to {target.dtype}"

    given, wanted = source.quantisation, target.quantisation
    if source.dtype in QUANTISED and (given is None or len(given.scales) != 1):
        return "from stored numbers with more than one scale"

    if source.dtype in QUANTISED and (wanted is None or len(wanted.scales) != 1):
        return "to stored numbers with more than one scale"

    return ""


def _dequantize(node: Node) -> Apply:
    if node.dtype(0) == "float16":
        return lambda x: x(0).cast(dtypes.float32)

    convert = dequantiser(node, node.tensor(0))
    return lambda x: convert(x(0))


def _densify(node: Node) -> Apply:
    # Sparse constants are made dense when they are read.
    def apply(x: Inputs) -> Tensor:
        return x(0)

    return apply


RULES: Final[Mapping[str, Rule]] = {
    "QUANTIZE": Rule(
        _quantize, version=3, dtypes=QUANTISED | {"float32"}, refuse=_refuse_quantize
    ),
    "DEQUANTIZE": Rule(_dequantize, version=6, dtypes=QUANTISED | {"float16", "int4"}),
    "DENSIFY": Rule(_densify, dtypes=QUANTISED | {"float16", "float32"}, constants=(0,)),
}
