"""Sums of many floats: in stages, since one by one they drift.

Equal values are the worst: each step rounds the same way. The engine's own pool adds them one
by one, so that the truth here is numpy's in float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from opencl_graph_helpers import (
    DEVICE,
    FLOAT,
    QUICK,
    Given,
    constant,
    image,
    model_of,
    ours,
)
from tinygrad import Context

from switchgear.backends.opencl.operators import sums
from switchgear.backends.opencl.rules import on_device

if TYPE_CHECKING:
    from numpy.typing import NDArray

pytestmark = pytest.mark.engine

SIDE = 40
COUNT = SIDE * SIDE
# Of those tried, the value with which it shows most: itself, its square, and its power of e.
VALUE = float(np.float32(0.18))
# Of the true value: stages stay under it, one by one is tenfold.
CLOSE = 2e-6
WHOLE_IMAGE = schema.Pool2DOptionsT(
    padding=schema.Padding.VALID,
    strideW=SIDE,
    strideH=SIDE,
    filterWidth=SIDE,
    filterHeight=SIDE,
)
KEEP = schema.ReducerOptionsT(keepDims=True)


def drifting(*shape: int) -> NDArray[np.float32]:
    return np.full(shape, VALUE, np.float32)


def test_one_by_one_they_drift() -> None:
    values = drifting(COUNT)
    one_by_one = np.cumsum(values, dtype=np.float32)[-1]

    assert abs(one_by_one / values.sum(dtype=np.float64) - 1) > 10 * CLOSE


@pytest.mark.parametrize(
    ("name", "axes", "options", "wanted"),
    [
        ("AVERAGE_POOL_2D", None, WHOLE_IMAGE, VALUE),
        ("L2_POOL_2D", None, WHOLE_IMAGE, VALUE),
        ("MEAN", [1, 2], KEEP, VALUE),
        ("SUM", [1, 2], KEEP, COUNT * VALUE),
    ],
    ids=["AVERAGE_POOL_2D", "L2_POOL_2D", "MEAN", "SUM"],
)
def test_a_sum_over_the_whole_image(
    name: str, axes: list[int] | None, options: object, wanted: float
) -> None:
    x = drifting(1, SIDE, SIDE, 1)
    given = [Given(x), *([] if axes is None else [constant(axes)])]
    found = ours(model_of(name, given, FLOAT, [(1, 1, 1, 1)], options), [x])[0]

    assert found.item() == pytest.approx(wanted, rel=CLOSE)


@pytest.mark.parametrize("name", ["SOFTMAX", "LOG_SOFTMAX", "L2_NORMALIZATION"])
def test_a_share_of_many(name: str) -> None:
    x = drifting(1, COUNT)
    # Else the powers of e were all 1, whose sum is exact.
    x[0, 0] = 1.3
    exact = x.astype(np.float64)
    options, wanted = {
        "SOFTMAX": (schema.SoftmaxOptionsT(beta=1.0), np.exp(exact) / np.exp(exact).sum()),
        "LOG_SOFTMAX": (schema.LogSoftmaxOptionsT(), exact - np.log(np.exp(exact).sum())),
        "L2_NORMALIZATION": (schema.L2NormOptionsT(), exact / np.linalg.norm(exact)),
    }[name]
    found = ours(model_of(name, [Given(x)], FLOAT, [x.shape], options), [x])[0]

    # A relative error of the sum is an absolute one of its logarithm.
    scale = 1.0 if name == "LOG_SOFTMAX" else wanted
    assert np.abs((found - wanted) / scale).max() < CLOSE


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((8,), (0,)),
        ((9,), (0,)),
        ((67, 2), (0,)),
        ((3, 4, 2, 4), (1, 3)),
        ((5, 3, 7), (0, 2)),
        ((2, 19, 3), (0, 1, 2)),
    ],
)
def test_any_axes(
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    keepdim: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sums, "LONGEST", 8)
    x = image(*shape)
    with Context(**QUICK):
        found = sums.total(on_device(x, DEVICE), axes, keepdim=keepdim).numpy()

    wanted = x.sum(axis=axes, dtype=np.float64, keepdims=keepdim)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


def test_whole_numbers_are_exact() -> None:
    x = np.arange(2 * sums.LONGEST, dtype=np.int32)
    with Context(**QUICK):
        assert sums.total(on_device(x, DEVICE), (0,), keepdim=False).item() == x.sum()
