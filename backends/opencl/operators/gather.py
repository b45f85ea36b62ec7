"""Operators that take elements by index, and those that order them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tinygrad import Tensor, dtypes

from switchgear.backends.opencl.rules import ANY, FLOAT, NUMBERS, Rule
from switchgear.ipc.errors import BadModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from switchgear.backends.opencl.rules import Apply, Inputs, Node


def _gather(node: Node) -> Apply:
    axis = node.axis(node.option("axis"), len(node.shape(0)))
    cuts: list[Any] = [slice(None)] * axis
    _check_known(node, 1, node.shape(0)[axis])
    return lambda x: x(0)[(*cuts, x(1))]


def _refuse_gather(node: Node) -> str:
    if node.option("batchDims"):
        return f"batchDims = {node.option('batchDims')}"

    return _refuse_indices(node, 1)


def _refuse_indices(node: Node, position: int) -> str:
    dtype = node.dtype(position)
    return "" if dtype in ("int32", "int64") else f"indices of {dtype}"


def _check_known(node: Node, position: int, size: int) -> None:
    """Indices that stand in the file must lie inside."""
    if node.is_known(position):
        values = node.constant(position)
        if values.size and not (values.min() >= 0 and values.max() < size):
            raise BadModel(f"{node.title}: an index outside of {size}")


def _gather_nd(node: Node) -> Apply:
    *_, depth = node.shape(1)
    if not 1 <= depth <= len(node.shape(0)):
        raise BadModel(f"{node.title}: indices of {depth} numbers")

    def apply(x: Inputs) -> Tensor:
        indices = x(1)
        return x(0)[tuple(indices[..., i] for i in range(depth))]

    return apply


def _embedding_lookup(node: Node) -> Apply:
    _check_known(node, 0, node.shape(1)[0])
    return lambda x: x(1)[x(0)]


def _one_hot(node: Node) -> Apply:
    depth = node.numbers(1)[0]
    if depth < 1:
        raise BadModel(f"{node.title}: a depth of {depth}")

    rank = len(node.shape(0))
    axis = node.option("axis", -1)
    axis = rank if axis == -1 else node.axis(axis, rank + 1)

    def apply(x: Inputs) -> Tensor:
        along = [1] * (rank + 1)
        along[axis] = depth
        places = Tensor.arange(depth).reshape(along)
        hot = x(0).unsqueeze(axis).eq(places)
        return hot.where(x(2).reshape(1), x(3).reshape(1))

    return apply


def _topk(node: Node) -> Apply:
    count = node.numbers(1)[0]
    if not 1 <= count <= node.shape(0)[-1]:
        raise BadModel(f"{node.title}: the best {count} of {node.shape(0)[-1]}")

    def apply(x: Inputs) -> list[Tensor]:
        values, indices = x(0).topk(count)
        return [values, indices.cast(dtypes.int32)]

    return apply


RULES: Final[Mapping[str, Rule]] = {
    "EMBEDDING_LOOKUP": Rule(
        _embedding_lookup, version=1, dtypes=FLOAT, data=(1,), refuse=lambda node: ""
    ),
    "GATHER": Rule(_gather, version=7, dtypes=ANY, refuse=_refuse_gather),
    "GATHER_ND": Rule(
        _gather_nd, version=5, dtypes=ANY, refuse=lambda node: _refuse_indices(node, 1)
    ),
    "ONE_HOT": Rule(
        _one_hot,
        dtypes=frozenset({"int32", "int64"}),
        constants=(1,),
        refuse=lambda node: _refuse_indices(node, 0),
    ),
    "TOPK_V2": Rule(_topk, version=3, dtypes=NUMBERS, constants=(1,)),
}
