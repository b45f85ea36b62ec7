"""The model's matrix products with known weights: as the importer's hook gets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from switchgear.backends.opencl import float_product, tinygrad_jit

Weights = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Layer:
    """A product of `rows` rows of activations with weights [n, k]."""

    operator: int
    rows: int
    weights: Weights


@dataclass
class LayerList:
    """A hook that only notes which products there are."""

    layers: dict[int, Layer] = field(default_factory=dict)

    def __call__(self, operator: int, x: Any, weights: Weights) -> None:
        self.layers[operator] = Layer(operator, int(x.shape[0]), weights)


@dataclass
class FloatProducts:
    """A hook that computes in float; afterwards `constants` has the weights of each product.

    On a processor by a kernel of our own, elsewhere by tinygrad's.
    """

    processor: bool
    constants: dict[int, Any] = field(default_factory=dict)

    def __call__(self, operator: int, x: Any, weights: Weights) -> Any:
        self.constants[operator] = tinygrad_jit.constant(self.laid_out(weights))
        # Else what comes before would be computed once for each column.
        rows = x.contiguous()
        if not self.processor:
            return rows.dot(self.constants[operator].transpose(0, 1))

        kernel = float_product.product_kernel(int(x.shape[0]), *weights.shape)
        shape = (int(x.shape[0]), weights.shape[0])
        arguments = [rows, self.constants[operator]]
        return tinygrad_jit.own_kernel(kernel, shape, "float32", arguments)

    def laid_out(self, weights: Weights) -> Weights:
        """The weights as the kernel wants them."""
        return float_product.strips(weights) if self.processor else weights


# A note of an artefact: the constant buffer of a product, so that other weights can be tried.
_NOTE = "product."


def as_notes(buffers: Mapping[int, int]) -> dict[str, str]:
    """The buffers of the products' weights, by operator, as notes of an artefact."""
    return {f"{_NOTE}{operator}": str(index) for operator, index in buffers.items()}


def from_notes(notes: Mapping[str, str]) -> dict[int, int]:
    """What `as_notes` made."""
    return {
        int(name.removeprefix(_NOTE)): int(index)
        for name, index in notes.items()
        if name.startswith(_NOTE)
    }
