"""Pools over height and width: average, largest, and root of the mean square."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from tinygrad import Tensor, dtypes

from switchgear.backends.opencl.fixed_point import stored
from switchgear.backends.opencl.operators.activations import fused, refuse_fused, stored_bounds
from switchgear.backends.opencl.operators.sums import total
from switchgear.backends.opencl.operators.windows import Window, window
from switchgear.backends.opencl.rules import FLOAT, QUANTISED, Rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from switchgear.backends.opencl.rules import Apply, Inputs, Node


def _average_pool_2d(node: Node) -> Apply:
    windows = _windows(node)
    counts = _counts(node, windows)
    if not node.quantised:
        average = _averager(node, windows, counts)

        def apply(x: Inputs) -> Tensor:
            return fused(node, average(x(0)))

        return apply

    # The engine rounds a sum of stored values, halves away from zero, by the window's count.
    divisor = _operand(node, counts.astype(np.int32))
    bounds = stored_bounds(node)

    def apply_stored(x: Inputs) -> Tensor:
        acc = _totals(x(0).cast(dtypes.int32), windows)
        half = divisor // 2
        whole = (acc + (acc > 0).where(half, -half)).div(divisor, rounding_mode="trunc")
        return stored(whole, 0, bounds, node.result().dtype)

    return apply_stored


def _max_pool_2d(node: Node) -> Apply:
    windows = _windows(node)
    bounds = stored_bounds(node) if node.quantised else None

    def apply(x: Inputs) -> Tensor:
        largest = _slide(x(0), windows)
        if bounds is None:
            return fused(node, largest)

        return stored(largest.cast(dtypes.int32), 0, bounds, node.result().dtype)

    return apply


def _l2_pool_2d(node: Node) -> Apply:
    windows = _windows(node)
    average = _averager(node, windows, _counts(node, windows))

    def apply(x: Inputs) -> Tensor:
        return fused(node, average(x(0).square()).sqrt())

    return apply


def _windows(node: Node) -> Window:
    source = node.shape(0, rank=4)
    size = (node.option("filterHeight"), node.option("filterWidth"))
    return window(node, source[1:3], size, dilation=(1, 1))


def _counts(node: Node, windows: Window) -> NDArray[np.float32]:
    """How many elements of the input each window covers, [rows, columns, 1]."""
    sides: list[NDArray[Any]] = []
    left, _, top, _ = windows.padding
    for axis, before in enumerate((top, left)):
        begins = np.arange(windows.result[axis]) * windows.stride[axis] - before
        ends = np.minimum(begins + windows.size[axis], node.shape(0)[1 + axis])
        sides.append(ends - np.maximum(begins, 0))

    return np.asarray(sides[0][:, None, None] * sides[1][None, :, None], np.float32)


def _operand(node: Node, counts: NDArray[Any]) -> Tensor:
    if (counts == counts.flat[0]).all():
        return Tensor(int(counts.flat[0]), dtype=dtypes.int32)

    return node.place(counts)


def _averager(node: Node, windows: Window, counts: NDArray[np.float32]) -> Any:
    inverse = 1 / counts
    factor = float(inverse.flat[0]) if (counts == counts.flat[0]).all() else node.place(inverse)

    def average(x: Tensor) -> Tensor:
        return _totals(x, windows) * factor

    return average


def _totals(x: Tensor, windows: Window) -> Tensor:
    """Sums of the windows, [n, rows, columns, channels]."""
    if windows.result == (1, 1) and not any(windows.padding):
        return total(x[:, : windows.size[0], : windows.size[1]], (1, 2), keepdim=True)

    left, right, top, bottom = windows.padding
    wide = x.pad((None, (top, bottom), (left, right), None))
    tiles = wide.unfold(1, windows.size[0], windows.stride[0])
    return total(tiles.unfold(2, windows.size[1], windows.stride[1]), (4, 5), keepdim=False)


def _slide(x: Tensor, windows: Window) -> Tensor:
    pooled = x.permute(0, 3, 1, 2).max_pool2d(
        windows.size, stride=windows.stride, padding=windows.padding
    )
    assert isinstance(pooled, Tensor)
    return pooled.permute(0, 2, 3, 1)


RULES: Final[Mapping[str, Rule]] = {
    "AVERAGE_POOL_2D": Rule(
        _average_pool_2d, version=3, dtypes=FLOAT | QUANTISED, refuse=refuse_fused
    ),
    "MAX_POOL_2D": Rule(_max_pool_2d, version=3, dtypes=FLOAT | QUANTISED, refuse=refuse_fused),
    "L2_POOL_2D": Rule(_l2_pool_2d, refuse=refuse_fused),
}
