"""What the canaries compute, by numpy: four small kernels that feed each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]

ROWS: Final = 64
WIDTH: Final = 64
# Largest error over the largest element of the answer. In fp32, with the least exact exp that
# the specification of Vulkan allows, it stays under 1e-5.
TOLERANCE: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Numbers:
    """The inputs `q`, `k`, `v` and the answers, (ROWS, WIDTH) and smaller, in fp32."""

    q: Array
    k: Array
    v: Array
    answers: dict[str, Array]


def numbers() -> Numbers:
    """The same at every run; answers computed in float64."""
    generator = np.random.default_rng(64)
    q, k, v = generator.standard_normal((3, ROWS, WIDTH)).astype(np.float32)
    scores = q.astype(np.float64) @ k.T.astype(np.float64) / math.sqrt(WIDTH)
    powers = np.exp(scores)
    sums = powers.sum(axis=1)
    answers = {
        "dot": scores,
        "exp": powers,
        "reduce_sum": sums,
        "attention": powers @ v / sums[:, None],
    }
    return Numbers(q, k, v, {name: a.astype(np.float32) for name, a in answers.items()})


def holds(error: float | None) -> bool:
    """Whether a kernel's error is within the tolerance."""
    return error is not None and error <= TOLERANCE


def finite(value: float) -> float | None:
    """A number for JSON: None for one that is not finite."""
    return value if math.isfinite(value) else None


def relative_error(result: Array, answer: Array) -> float:
    """Largest error over the largest element; infinite when a result is not finite."""
    if not np.isfinite(result).all():
        return math.inf

    return float(np.abs(result - answer).max() / np.abs(answer).max())
