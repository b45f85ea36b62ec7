"""The rules by which each operator becomes tinygrad calls, by family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from switchgear.backends.opencl.operators import (
    activation,
    convolution,
    elementwise,
    gather,
    matrix,
    movement,
    pool,
    quantise,
    reduce,
    resize,
    split,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from switchgear.backends.opencl.rules import Rule

RULES: Final[Mapping[str, Rule]] = {
    **activation.RULES,
    **convolution.RULES,
    **elementwise.RULES,
    **gather.RULES,
    **matrix.RULES,
    **movement.RULES,
    **pool.RULES,
    **quantise.RULES,
    **reduce.RULES,
    **resize.RULES,
    **split.RULES,
}
