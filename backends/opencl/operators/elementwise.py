"""Operators on each element: arithmetic, functions of one value, comparisons, choices, casts.

Quantised sums and products are computed in whole numbers as the reference kernels do; the rest
of the quantised ones turn to real values and back, which is within one step of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np
from tinygrad import Tensor, dtypes

from switchgear.backends.opencl.fixed_point import scaling, stored
from switchgear.backends.opencl.operators.activations import fused, refuse_fused, stored_bounds
from switchgear.backends.opencl.quantised import reader, writer
from switchgear.backends.opencl.rules import ANY, FLOAT, NUMBERS, QUANTISED, TYPES, WHOLE, Rule
from switchgear.ipc.errors import BadModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from switchgear.backends.opencl.rules import Apply, Inputs, Node

Binary = Callable[[Tensor, Tensor], Tensor]
Unary = Callable[[Tensor], Tensor]

# Bits by which the reference kernels widen stored values before they scale and add them.
_SUM_SHIFT: Final = 20


def _refuse_binary(node: Node) -> str:
    try:
        np.broadcast_shapes(node.shape(0), node.shape(1))
    except ValueError:
        return f"shapes {list(node.shape(0))} and {list(node.shape(1))}"

    if node.dtype(0) != node.dtype(1):
        return f"{node.dtype(0)} with {node.dtype(1)}"

    return refuse_fused(node)


def _binary(function: Binary) -> Callable[[Node], Apply]:
    def prepare(node: Node) -> Apply:
        left, right, write = reader(node, 0), reader(node, 1), writer(node)

        def apply(x: Inputs) -> Tensor:
            value = fused(node, function(left(x), right(x)))
            return write(value)

        return apply

    return prepare


def _sum_prepare(sign: int) -> Callable[[Node], Apply]:
    ordinary = _binary(lambda a, b: a + b if sign > 0 else a - b)

    def prepare(node: Node) -> Apply:
        return _whole_sum(node, sign) if node.quantised else ordinary(node)

    return prepare


def _whole_sum(node: Node, sign: int) -> Apply:
    left, right = node.quantisation(node.tensor(0)), node.quantisation(node.tensor(1))
    target = node.quantisation(node.result())
    twice = 2 * max(left.scales[0], right.scales[0])
    first = scaling([left.scales[0] / twice], node.place)
    second = scaling([right.scales[0] / twice], node.place)
    last = scaling([twice / ((1 << _SUM_SHIFT) * target.scales[0])], node.place)
    bounds = stored_bounds(node)

    def widened(value: Tensor, zero: int) -> Tensor:
        return (value.cast(dtypes.int32) - zero) * (1 << _SUM_SHIFT)

    def apply(x: Inputs) -> Tensor:
        a = first(widened(x(0), left.zero_points[0]))
        b = second(widened(x(1), right.zero_points[0]))
        total = last(a + b if sign > 0 else a - b)
        return stored(total, target.zero_points[0], bounds, node.result().dtype)

    return apply


def _product_prepare(node: Node) -> Apply:
    return _whole_product(node) if node.quantised else _binary(lambda a, b: a * b)(node)


def _whole_product(node: Node) -> Apply:
    left, right = node.quantisation(node.tensor(0)), node.quantisation(node.tensor(1))
    target = node.quantisation(node.result())
    rescale = scaling([left.scales[0] * right.scales[0] / target.scales[0]], node.place)
    bounds = stored_bounds(node)

    def apply(x: Inputs) -> Tensor:
        a = x(0).cast(dtypes.int32) - left.zero_points[0]
        b = x(1).cast(dtypes.int32) - right.zero_points[0]
        return stored(rescale(a * b), target.zero_points[0], bounds, node.result().dtype)

    return apply


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else a.div(b, rounding_mode="trunc")


def _floor_divide(a: Tensor, b: Tensor) -> Tensor:
    return a.div(b, rounding_mode="floor")


def _floor_modulo(a: Tensor, b: Tensor) -> Tensor:
    return a - _floor_divide(a, b) * b


def _add_n(node: Node) -> Apply:
    def apply(x: Inputs) -> Tensor:
        total = x(0)
        for position in range(1, node.count):
            total = total + x(position)

        return total

    return apply


def _unary(function: Unary) -> Callable[[Node], Apply]:
    def prepare(node: Node) -> Apply:
        read, write = reader(node, 0), writer(node)
        return lambda x: write(function(read(x)))

    return prepare


def _comparison(function: Binary) -> Callable[[Node], Apply]:
    """Quantised values of one scale are compared as they are stored."""

    def prepare(node: Node) -> Apply:
        if node.tensor(0).quantisation == node.tensor(1).quantisation:
            return lambda x: function(x(0), x(1))

        left, right = reader(node, 0), reader(node, 1)
        return lambda x: function(left(x), right(x))

    return prepare


def _plain(function: Binary) -> Callable[[Node], Apply]:
    def prepare(node: Node) -> Apply:
        return lambda x: function(x(0), x(1))

    return prepare


def _extreme(function: Binary) -> Callable[[Node], Apply]:
    """The larger or smaller: stored values of one scale keep their order."""

    def prepare(node: Node) -> Apply:
        scales = [t.quantisation for t in (node.tensor(0), node.tensor(1), node.result())]
        if scales[0] == scales[1] == scales[2]:
            return lambda x: function(x(0), x(1))

        return _binary(function)(node)

    return prepare


def _select(node: Node) -> Apply:
    condition, chosen = node.shape(0), node.shape(1)
    # SELECT takes one condition for each row, too.
    rows = node.operator.name == "SELECT" and len(condition) == 1 < len(chosen)
    if rows and condition[0] not in (1, chosen[0]):
        raise BadModel(f"{node.title}: {condition[0]} conditions for {chosen[0]} rows")

    shape = (condition[0], *[1] * (len(chosen) - 1)) if rows else condition
    return lambda x: x(0).reshape(shape).where(x(1), x(2))


def _refuse_select(node: Node) -> str:
    if node.tensor(1).quantisation != node.tensor(2).quantisation:
        return "choices of different scales"

    return "" if node.dtype(0) == "bool" else f"a condition of {node.dtype(0)}"


def _cast(node: Node) -> Apply:
    target = TYPES[node.result().dtype]
    return lambda x: x(0).cast(target)


def _refuse_cast(node: Node) -> str:
    target = node.result().dtype
    return "" if target in TYPES else f"to {target}"


def _logical_not(node: Node) -> Apply:
    return lambda x: x(0).logical_not()


def _arithmetic(
    prepare: Callable[[Node], Apply], version: int, dtypes_: frozenset[str] = NUMBERS
) -> Rule:
    return Rule(prepare, version=version, dtypes=dtypes_, data=(0, 1), refuse=_refuse_binary)


def _function(
    function: Unary, version: int = 1, dtypes_: frozenset[str] = FLOAT | QUANTISED
) -> Rule:
    return Rule(_unary(function), version=version, dtypes=dtypes_)


def _compared(function: Binary, version: int) -> Rule:
    return Rule(
        _comparison(function),
        version=version,
        dtypes=ANY,
        data=(0, 1),
        refuse=_refuse_binary,
    )


_BOOL: Final = frozenset({"bool"})

RULES: Final[Mapping[str, Rule]] = {
    "ABS": _function(lambda x: x.abs(), 5, NUMBERS),
    "ADD": _arithmetic(_sum_prepare(1), 5),
    "ADD_N": Rule(_add_n, dtypes=FLOAT | WHOLE),
    "CAST": Rule(_cast, version=8, dtypes=ANY, refuse=_refuse_cast),
    "CEIL": _function(lambda x: x.ceil()),
    "COS": _function(lambda x: x.cos()),
    "DIV": _arithmetic(_binary(_divide), 2),
    "EQUAL": _compared(lambda a, b: a.eq(b), 4),
    "EXP": _function(lambda x: x.exp(), 2),
    "FLOOR": _function(lambda x: x.floor()),
    "FLOOR_DIV": _arithmetic(_binary(_floor_divide), 3, FLOAT | WHOLE),
    "FLOOR_MOD": _arithmetic(_binary(_floor_modulo), 2, FLOAT | WHOLE),
    "GREATER": _compared(lambda a, b: a > b, 2),
    "GREATER_EQUAL": _compared(lambda a, b: a >= b, 3),
    "LESS": _compared(lambda a, b: a < b, 3),
    "LESS_EQUAL": _compared(lambda a, b: a <= b, 2),
    "LOG": _function(lambda x: x.log(), 2),
    "LOGICAL_AND": Rule(_plain(lambda a, b: a & b), dtypes=_BOOL, data=(0, 1)),
    "LOGICAL_NOT": Rule(_logical_not, dtypes=_BOOL),
    "LOGICAL_OR": Rule(_plain(lambda a, b: a | b), dtypes=_BOOL, data=(0, 1)),
    "MAXIMUM": _arithmetic(_extreme(lambda a, b: a.maximum(b)), 4),
    "MINIMUM": _arithmetic(_extreme(lambda a, b: a.minimum(b)), 4),
    "MUL": _arithmetic(_product_prepare, 7),
    "NEG": _function(lambda x: -x, 2, NUMBERS),
    "NOT_EQUAL": _compared(lambda a, b: a != b, 3),
    "POW": _arithmetic(_binary(lambda a, b: a.pow(b)), 2, FLOAT),
    "ROUND": _function(lambda x: x.round()),
    "RSQRT": _function(lambda x: x.rsqrt(), 3),
    "SELECT": Rule(_select, version=4, dtypes=ANY, data=(1, 2), refuse=_refuse_select),
    "SELECT_V2": Rule(_select, version=2, dtypes=ANY, data=(1, 2), refuse=_refuse_select),
    "SIGN": _function(lambda x: x.sign(), 2, NUMBERS),
    "SIN": _function(lambda x: x.sin()),
    "SQRT": _function(lambda x: x.sqrt()),
    "SQUARE": _function(lambda x: x.square()),
    "SQUARED_DIFFERENCE": _arithmetic(_binary(lambda a, b: (a - b).square()), 2),
    "SUB": _arithmetic(_sum_prepare(-1), 5),
}
