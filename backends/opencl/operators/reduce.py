"""Reductions along axes: sums, means, extremes, and where the extremes are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from tinygrad import Tensor, dtypes

from switchgear.backends.opencl.fixed_point import scaling, stored
from switchgear.backends.opencl.operators.activations import STORED_LIMITS
from switchgear.backends.opencl.operators.sums import total
from switchgear.backends.opencl.quantised import reader, writer
from switchgear.backends.opencl.rules import FLOAT, NUMBERS, QUANTISED, WHOLE, Rule, volume

if TYPE_CHECKING:
    from collections.abc import Mapping

    from switchgear.backends.opencl.rules import Apply, Inputs, Node

Reduction = Callable[[Tensor, tuple[int, ...], bool], Tensor]


def _axes(node: Node) -> tuple[int, ...]:
    rank = len(node.shape(0))
    return tuple(sorted({node.axis(axis, rank) for axis in node.numbers(1)}))


def _sums(mean: bool) -> Callable[[Node], Apply]:
    """SUM and MEAN. Quantised ones add up stored values and scale once, as the engine does."""

    def prepare(node: Node) -> Apply:
        axes, keep = _axes(node), bool(node.option("keepDims"))
        count = volume([node.shape(0)[axis] for axis in axes]) if mean else 1
        if node.quantised:
            return _whole_sums(node, axes, keep, count)

        def apply(x: Inputs) -> Tensor:
            value = total(x(0), axes, keepdim=keep)
            if count == 1:
                return value

            if value.is_floating_point():
                return value * (1 / count)

            return value.div(count, rounding_mode="trunc")

        return apply

    return prepare


def _whole_sums(node: Node, axes: tuple[int, ...], keep: bool, count: int) -> Apply:
    given, wanted = node.quantisation(node.tensor(0)), node.quantisation(node.result())
    rescale = scaling([given.scales[0] / (wanted.scales[0] * count)], node.place)
    bounds = STORED_LIMITS[node.result().dtype]

    def apply(x: Inputs) -> Tensor:
        value = x(0).cast(dtypes.int32) - given.zero_points[0]
        result = rescale(value.sum(axis=axes, keepdim=keep))
        return stored(result, wanted.zero_points[0], bounds, node.result().dtype)

    return apply


def _reduced(reduction: Reduction, *, ordered: bool = False) -> Callable[[Node], Apply]:
    """`ordered`: stored values of one scale give the same as the real ones."""

    def prepare(node: Node) -> Apply:
        axes, keep = _axes(node), bool(node.option("keepDims"))
        if ordered and node.tensor(0).quantisation == node.result().quantisation:
            return lambda x: reduction(x(0), axes, keep)

        read, write = reader(node, 0), writer(node)
        return lambda x: write(reduction(read(x), axes, keep))

    return prepare


def _product(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return x.prod(axis=axes, keepdim=keep)


def _place_of_extreme(largest: bool) -> Callable[[Node], Apply]:
    def prepare(node: Node) -> Apply:
        values = node.numbers(1)
        axis = node.axis(values[0] if values else 0, len(node.shape(0)))
        target: Any = dtypes.int64 if node.result().dtype == "int64" else dtypes.int32

        def apply(x: Inputs) -> Tensor:
            value = x(0)
            # Unsigned values have no negative: the least is the largest of what they lack.
            found = value.argmax(axis) if largest else value.argmin(axis)
            return found.cast(target)

        return apply

    return prepare


def _cumsum(node: Node) -> Apply:
    values = node.numbers(1)
    axis = node.axis(values[0] if values else 0, len(node.shape(0)))
    exclusive, reverse = node.option("exclusive"), node.option("reverse")

    def apply(x: Inputs) -> Tensor:
        value = x(0).flip(axis) if reverse else x(0)
        sums = value.cumsum(axis)
        sums = sums - value if exclusive else sums
        return sums.flip(axis) if reverse else sums

    return apply


def _reducing(prepare: Callable[[Node], Apply], version: int, dtypes_: frozenset[str]) -> Rule:
    return Rule(prepare, version=version, dtypes=dtypes_, constants=(1,))


_BOOL: Final = frozenset({"bool"})

RULES: Final[Mapping[str, Rule]] = {
    "ARG_MAX": _reducing(_place_of_extreme(True), 3, NUMBERS),
    "ARG_MIN": _reducing(_place_of_extreme(False), 3, NUMBERS),
    "CUMSUM": _reducing(_cumsum, 1, FLOAT | WHOLE),
    "MEAN": _reducing(_sums(True), 3, NUMBERS),
    "REDUCE_ALL": _reducing(_reduced(lambda x, a, k: x.all(a, k)), 1, _BOOL),
    "REDUCE_ANY": _reducing(_reduced(lambda x, a, k: x.any(a, k)), 2, _BOOL),
    "REDUCE_MAX": _reducing(_reduced(lambda x, a, k: x.max(a, k), ordered=True), 3, NUMBERS),
    "REDUCE_MIN": _reducing(_reduced(lambda x, a, k: x.min(a, k), ordered=True), 3, NUMBERS),
    "REDUCE_PROD": _reducing(_reduced(_product), 2, FLOAT | QUANTISED | WHOLE),
    "SUM": _reducing(_sums(False), 2, NUMBERS),
}
