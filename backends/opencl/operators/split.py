"""Operators that join tensors or part them."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Final

from switchgear.backends.opencl.operators.activations import fused
from switchgear.backends.opencl.quantised import requantiser
from switchgear.backends.opencl.rules import ANY, QUANTISED, Rule
from switchgear.ipc.errors import BadModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tinygrad import Tensor

    from switchgear.backends.opencl.rules import Apply, Inputs, Node


def _concatenation(node: Node) -> Apply:
    shapes = [node.shape(i) for i in range(node.count)]
    axis = node.axis(node.option("axis"), len(shapes[0]))
    rests = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
    if len(rests) != 1 or len({len(shape) for shape in shapes}) != 1:
        raise BadModel(f"{node.title}: shapes {[list(shape) for shape in shapes]}")

    target = node.result()
    convert = [
        requantiser(node, node.tensor(i), target)
        if target.dtype in QUANTISED and target.quantisation is not None
        else (lambda value: value)
        for i in range(node.count)
    ]

    def apply(x: Inputs) -> Tensor:
        parts = [convert[i](x(i)) for i in range(node.count)]
        return fused(node, parts[0].cat(*parts[1:], dim=axis))

    return apply


def _refuse_concatenation(node: Node) -> str:
    if node.option("fusedActivationFunction"):
        return "a fused activation"

    if len({node.dtype(i) for i in range(node.count)}) > 1:
        return "inputs of different dtypes"

    return ""


def _pack(node: Node) -> Apply:
    if len({node.shape(i) for i in range(node.count)}) != 1:
        raise BadModel(f"{node.title}: its inputs have different shapes")

    axis = node.axis(node.option("axis"), len(node.shape(0)) + 1)

    def apply(x: Inputs) -> Tensor:
        parts = [x(i) for i in range(node.count)]
        return parts[0].stack(*parts[1:], dim=axis)

    return apply


def _unpack(node: Node) -> Apply:
    shape = node.shape(0)
    axis = node.axis(node.option("axis"), len(shape))
    if len(node.operator.outputs) != shape[axis]:
        raise BadModel(f"{node.title}: {len(node.operator.outputs)} of {shape[axis]}")

    parted = _parted(axis, [1] * shape[axis])
    rest = (*shape[:axis], *shape[axis + 1 :])
    return lambda x: [part.reshape(rest) for part in parted(x(0))]


def _split(node: Node) -> Apply:
    axis = node.axis(_one(node, 0), len(node.shape(1)))
    count = len(node.operator.outputs)
    size = node.shape(1)[axis]
    if not count or size % count:
        raise BadModel(f"{node.title}: {size} in {count} parts")

    parted = _parted(axis, [size // count] * count)
    return lambda x: parted(x(1))


def _split_v(node: Node) -> Apply:
    axis = node.axis(_one(node, 2), len(node.shape(0)))
    sizes = list(node.numbers(1))
    whole = node.shape(0)[axis]
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = whole - sum(sizes) - 1

    if min(sizes, default=0) < 1 or sum(sizes) != whole:
        raise BadModel(f"{node.title}: {whole} in parts of {sizes}")

    if len(sizes) != len(node.operator.outputs):
        raise BadModel(f"{node.title}: {len(node.operator.outputs)} of {len(sizes)} parts")

    parted = _parted(axis, sizes)
    return lambda x: parted(x(0))


def _parted(axis: int, sizes: Sequence[int]) -> Callable[[Tensor], list[Tensor]]:
    """What cuts a tensor along an axis into parts of these sizes."""
    ends = list(accumulate(sizes))

    def apply(x: Tensor) -> list[Tensor]:
        parts = []
        for size, end in zip(sizes, ends, strict=True):
            cuts = [None if i != axis else (end - size, end) for i in range(x.ndim)]
            parts.append(x.shrink(tuple(cuts)))

        return parts

    return apply


def _one(node: Node, position: int) -> int:
    values = node.numbers(position)
    if len(values) != 1:
        raise BadModel(f"{node.title}: {len(values)} axes")

    return values[0]


RULES: Final[Mapping[str, Rule]] = {
    "CONCATENATION": Rule(_concatenation, version=5, dtypes=ANY, refuse=_refuse_concatenation),
    "PACK": Rule(_pack, version=4, dtypes=ANY),
    "SPLIT": Rule(_split, version=4, dtypes=ANY, data=(1,), constants=(0,)),
    "SPLIT_V": Rule(_split_v, version=2, dtypes=ANY, constants=(1, 2)),
    "UNPACK": Rule(_unpack, version=4, dtypes=ANY),
}
