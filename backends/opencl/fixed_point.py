"""Arithmetic on stored whole numbers, bit for bit as the engine's reference kernels do it.

A product of scales becomes a 31-bit multiplier and a power of two. The product is rounded
twice, as theirs is: to 32 bits half up, then by the power of two half away from zero. 64-bit
products need no more than OpenCL's `long`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from tinygrad import Tensor, dtypes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Place = Callable[[NDArray[Any]], Tensor]


def multiplier(real: float) -> tuple[int, int]:
    """(m, e) with m in [2**30, 2**31) and real close to m * 2**(e - 31); (0, 0) for tiny."""
    if not 0 < real < math.inf:
        return 0, 0

    fraction, exponent = math.frexp(real)
    whole = math.floor(fraction * (1 << 31) + 0.5)
    if whole == 1 << 31:
        whole, exponent = whole // 2, exponent + 1

    if exponent < -31:
        return 0, 0

    return (whole, exponent) if exponent <= 30 else ((1 << 31) - 1, 30)


def scaling(reals: Sequence[float], place: Place) -> Callable[[Tensor], Tensor]:
    """What multiplies int32 [..., c] by one real number, or by one per element of the last
    axis; its constants are placed here, once."""
    pairs = [multiplier(real) for real in reals]
    factor = _operand([m << max(e, 0) for m, e in pairs], place)
    shifts = [max(-e, 0) for _, e in pairs]
    shift = _operand(shifts, place)
    half = _operand([1 << (e - 1) if e else 0 for e in shifts], place)
    # What is rounded down from a half below zero; a shift by nothing rounds nothing.
    down = _operand([min(e, 1) for e in shifts], place)
    shifted = any(shifts)

    def apply(acc: Tensor) -> Tensor:
        high = (acc.cast(dtypes.int64) * factor + (1 << 30)) >> 31
        if shifted:
            high = (high + half - (high < 0).where(down, 0)) >> shift

        return high.cast(dtypes.int32)

    return apply


def _operand(values: Sequence[int], place: Place) -> Tensor | int:
    """A plain number where all are the same: it becomes part of the kernel."""
    return values[0] if len(set(values)) == 1 else place(np.asarray(values, np.int64))


def stored(value: Tensor, zero: int, bounds: tuple[int, int], dtype: str) -> Tensor:
    """Adds the zero point to whole numbers, cuts them off at the bounds, and stores them."""
    return (value + zero).maximum(bounds[0]).minimum(bounds[1]).cast(STORED[dtype])


def rounded(value: Tensor) -> Tensor:
    """float32 rounded to int32, halves away from zero."""
    return (value + (value < 0).where(-0.5, 0.5)).cast(dtypes.int32)


STORED = {"int8": dtypes.int8, "uint8": dtypes.uint8, "int16": dtypes.int16}
