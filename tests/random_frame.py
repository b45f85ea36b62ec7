"""Inputs for any model of floats: the same ones for the same seed."""

from __future__ import annotations

from typing import Any

import numpy as np

from switchgear.client import Model


def frame(model: Model, seed: int = 3) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {
        tensor.name: draw.uniform(-1, 1, tensor.shape).astype(np.float32)
        for tensor in model.inputs
    }
