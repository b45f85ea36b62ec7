"""Where the interpreter keeps its inputs and outputs, and whether they stay there."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class FixedMemory:
    """The engine's own bytes of each input and output, which stay where they are."""

    inputs: tuple[memoryview, ...]
    outputs: tuple[memoryview, ...]


def fixed_memory(inputs: Sequence[Any], outputs: Sequence[Any]) -> FixedMemory | None:
    """The memory of all tensors, or None where some may move or have no view.

    An engine plans its memory anew only behind an operator whose output size is known at run
    time, and leaves everything behind the first one without memory until then. So where every
    output has memory before the first run, nothing moves.
    """
    views = []
    for get in (*inputs, *outputs):
        try:
            array = get()
        except ValueError:
            return None

        if not isinstance(array, np.ndarray) or array.ndim == 0 or array.size == 0:
            return None

        # By address: a view of the array itself would keep the engine from running.
        address, _ = array.__array_interface__["data"]
        views.append(
            memoryview((ctypes.c_ubyte * array.nbytes).from_address(address)).cast("B")
        )

    return FixedMemory(tuple(views[: len(inputs)]), tuple(views[len(inputs) :]))


def is_allocated(get: Any, details: Any) -> bool:
    """Whether an output has its memory, and so its size, before the first run."""
    if math.prod(int(d) for d in details["shape"]) == 0:
        return False

    try:
        get()
    except ValueError:
        return False

    return True
