"""RESIZE_BILINEAR and RESIZE_NEAREST_NEIGHBOR: which pixels each new one is made of.

Indices and weights are computed in float32 when the model is built, as the engine does at each
run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from switchgear.backends.opencl.quantised import reader, writer
from switchgear.backends.opencl.rules import FLOAT, QUANTISED, WHOLE, Rule
from switchgear.ipc.errors import BadModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from tinygrad import Tensor

    from switchgear.backends.opencl.rules import Apply, Inputs, Node


def _resize_bilinear(node: Node) -> Apply:
    rows, columns = _sizes(node)
    _, height, width, _ = node.shape(0, rank=4)
    read, write = reader(node, 0), writer(node)
    vertical = _Blend(node, 1, height, rows)
    horizontal = _Blend(node, 2, width, columns)
    return lambda x: write(horizontal(vertical(read(x))))


def _resize_nearest(node: Node) -> Apply:
    rows, columns = _sizes(node)
    _, height, width, _ = node.shape(0, rank=4)
    picks = [
        _Pick(node, axis, _nearest(node, size, wanted), size)
        for axis, size, wanted in ((1, height, rows), (2, width, columns))
    ]

    def apply(x: Inputs) -> Tensor:
        return picks[1](picks[0](x(0)))

    return apply


class _Pick:
    """Takes elements by index along an axis."""

    def __init__(self, node: Node, axis: int, indices: NDArray[np.int32], size: int) -> None:
        self._axis = axis
        self._same = np.array_equal(indices, np.arange(size))
        repeat = len(indices) // size if len(indices) % size == 0 else 0
        # Whole multiples repeat each element: no index has to be read.
        self._repeat = (
            repeat
            if repeat and np.array_equal(indices, np.repeat(np.arange(size), repeat))
            else 0
        )
        self._indices = None if self._same or self._repeat else node.place(indices)

    def __call__(self, x: Tensor) -> Tensor:
        if self._same:
            return x

        if self._indices is None:
            return x.repeat_interleave(self._repeat, dim=self._axis)

        cuts: list[Any] = [slice(None)] * self._axis
        return x[(*cuts, self._indices)]


class _Blend:
    """Blends two neighbours along an axis."""

    def __init__(self, node: Node, axis: int, size: int, wanted: int) -> None:
        places = _places(node, size, wanted)
        lower = np.maximum(np.floor(places), 0).astype(np.int32)
        upper = np.minimum(np.ceil(places), size - 1).astype(np.int32)
        share = (places - lower).astype(np.float32)
        self._lower = _Pick(node, axis, lower, size)
        self._same = bool((lower == upper).all())
        self._upper = self._lower if self._same else _Pick(node, axis, upper, size)
        along = [1] * 4
        along[axis] = wanted
        self._share = node.place(share.reshape(along))

    def __call__(self, x: Tensor) -> Tensor:
        if self._same:
            return self._lower(x)

        return self._lower(x) * (1 - self._share) + self._upper(x) * self._share


def _sizes(node: Node) -> tuple[int, int]:
    sizes = node.numbers(1)
    if len(sizes) != 2 or min(sizes) < 1:
        raise BadModel(f"{node.title}: a size of {list(sizes)}")

    # The file's tensors are bounded, a constant is not.
    if node.result().shape[1:3] != sizes:
        raise BadModel(f"{node.title}: {list(sizes)} into {list(node.result().shape)}")

    return sizes[0], sizes[1]


def _scale(node: Node, size: int, wanted: int) -> np.float32:
    if node.option("alignCorners") and wanted > 1:
        return np.float32(size - 1) / np.float32(wanted - 1)

    return np.float32(size) / np.float32(wanted)


def _places(node: Node, size: int, wanted: int) -> NDArray[np.float32]:
    """Where each new pixel lies in the old ones."""
    steps = np.arange(wanted, dtype=np.float32)
    scale = _scale(node, size, wanted)
    if node.option("halfPixelCenters"):
        return (steps + np.float32(0.5)) * scale - np.float32(0.5)

    return steps * scale


def _nearest(node: Node, size: int, wanted: int) -> NDArray[np.int32]:
    steps = np.arange(wanted, dtype=np.float32)
    offset = np.float32(0.5 if node.option("halfPixelCenters") else 0)
    places = (steps + offset) * _scale(node, size, wanted)
    whole = np.floor(places + np.float32(0.5)) if node.option("alignCorners") else places
    return np.asarray(np.clip(np.floor(whole), 0, size - 1), np.int32)


def _refuse(node: Node) -> str:
    if node.quantised and node.tensor(0).quantisation != node.result().quantisation:
        return "a change of scale"

    return ""


RULES: Final[Mapping[str, Rule]] = {
    "RESIZE_BILINEAR": Rule(
        _resize_bilinear, version=4, dtypes=FLOAT | QUANTISED, constants=(1,), refuse=_refuse
    ),
    "RESIZE_NEAREST_NEIGHBOR": Rule(
        _resize_nearest,
        version=4,
        dtypes=FLOAT | QUANTISED | WHOLE,
        constants=(1,),
        refuse=_refuse,
    ),
}
