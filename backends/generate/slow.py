"""A model that computes for about as long as it is asked to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from switchgear.backends.generate.graph import Model

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHANNELS: Final = 128
_COLUMNS: Final = 64

# One thread of XNNPACK, float, on AVX2: this chain reached 34 to 44 million multiply-adds per
# millisecond on a server core, MobileNet v1 36 to 49 on two of them.
MULTIPLY_ADDS_PER_MS: Final = 40_000_000

_ROW_MULTIPLY_ADDS: Final = _COLUMNS * CHANNELS * CHANNELS
_LAYERS_PER_MS: Final = 2
_MOST_LAYERS: Final = 256


def slow(ms_hint: float) -> bytes:
    """`x` [1, 1, 1, 128] -> `y` [1, 1, 1, 128], float32, in about `ms_hint` milliseconds.

    x is repeated over an image of rows x 64, which goes through a chain of 1x1 convolutions
    that share one signed permutation of the 128 channels; y is the first pixel. So the result
    is exact (`slow_reference`), and the file is small whatever the time is. The hint is turned
    into multiply-adds (`MULTIPLY_ADDS_PER_MS`, one thread); other devices and more threads
    take another time, in proportion. Raises ValueError unless 0 < ms_hint <= 60000.
    """
    layers, rows = _chain(ms_hint)
    model = Model(f"{layers} convolutions of {rows} x {_COLUMNS} x {CHANNELS}")
    main = model.subgraph()
    image = [1, rows, _COLUMNS, CHANNELS]
    x = main.input("x", "float32", [1, 1, 1, CHANNELS])
    size = main.constant("size", np.asarray([rows, _COLUMNS], np.int32))
    weights = main.constant("weights", _permutation().reshape(CHANNELS, 1, 1, CHANNELS))
    bias = main.constant("bias", np.zeros(CHANNELS, np.float32))
    previous = main.tensor("repeated", "float32", image)
    main.operator(
        "RESIZE_NEAREST_NEIGHBOR",
        [x, size],
        [previous],
        schema.ResizeNearestNeighborOptionsT(),
    )

    for layer in range(layers):
        result = main.tensor(f"layer_{layer}", "float32", image)
        main.operator(
            "CONV_2D",
            [previous, weights, bias],
            [result],
            schema.Conv2DOptionsT(padding=schema.Padding.VALID, strideW=1, strideH=1),
        )
        previous = result

    begin = main.constant("begin", np.zeros(4, np.int32))
    end = main.constant("end", np.asarray([1, 1, 1, CHANNELS], np.int32))
    strides = main.constant("strides", np.ones(4, np.int32))
    y = main.output(main.tensor("y", "float32", [1, 1, 1, CHANNELS]))
    main.operator(
        "STRIDED_SLICE", [previous, begin, end, strides], [y], schema.StridedSliceOptionsT()
    )
    model.signature({"x": x}, {"y": y})
    return model.to_bytes()


def slow_reference(x: NDArray[np.float32], ms_hint: float) -> NDArray[np.float32]:
    """What `slow(ms_hint)` answers to x [1, 1, 1, 128]: the same shape, exact."""
    layers, _ = _chain(ms_hint)
    power = np.linalg.matrix_power(_permutation().astype(np.int64), layers)
    y: NDArray[np.float32] = (x.reshape(CHANNELS) @ power.T).astype(np.float32)
    return y.reshape(1, 1, 1, CHANNELS)


def _chain(ms_hint: float) -> tuple[int, int]:
    """Layers and rows: layers of half a millisecond, higher ones where that gives too many."""
    if not 0 < ms_hint <= 60_000:
        raise ValueError(f"ms_hint is {ms_hint}; it has to be above 0 and at most 60000")

    layers = min(_MOST_LAYERS, max(1, round(ms_hint * _LAYERS_PER_MS)))
    rows = max(1, round(ms_hint * MULTIPLY_ADDS_PER_MS / (layers * _ROW_MULTIPLY_ADDS)))
    return layers, rows


def _permutation() -> NDArray[np.float32]:
    """[128, 128], one entry a row: channel c comes from 5 c + 3, every third one negated."""
    weights = np.zeros((CHANNELS, CHANNELS), np.float32)

    for channel in range(CHANNELS):
        weights[channel, (5 * channel + 3) % CHANNELS] = -1.0 if channel % 3 == 0 else 1.0

    return weights
