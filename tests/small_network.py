"""A convolutional network small enough to be compiled in any test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from switchgear.backends.generate.graph import Model

if TYPE_CHECKING:
    from switchgear.backends.generate.graph import Subgraph

SIDE = 16
CHANNELS = 8
CLASSES = 10
_RELU6 = schema.ActivationFunctionType.RELU6


def small_network(last: str = "", *, shared: bool = False) -> bytes:
    """`image` [1, 16, 16, 3] -> `map` [1, 8, 8, 8], `scores` [1, 10]; all float32.

    Two convolutions, a depthwise one, an addition, a sigmoid, a pool and a fully connected
    layer: 8 operators of which 4 multiply. `last` is an operator of one input and its axes
    (REVERSE_V2) that `scores` goes through at the end. A `shared` map is what the pool reads
    too, without the sigmoid.
    """
    random = np.random.RandomState(11)
    model = Model("small network")
    main = model.subgraph()
    image = main.input("image", "float32", [1, SIDE, SIDE, 3])
    half = SIDE // 2
    area = [1, half, half, CHANNELS]

    def weights(name: str, shape: list[int], fan_in: int) -> int:
        bound = np.sqrt(3 / fan_in)
        return main.constant(name, random.uniform(-bound, bound, shape).astype(np.float32))

    def bias(name: str, size: int) -> int:
        return main.constant(name, random.uniform(-0.2, 0.2, size).astype(np.float32))

    first = main.tensor("first", "float32", area)
    main.operator(
        "CONV_2D",
        [image, weights("w1", [CHANNELS, 3, 3, 3], 27), bias("b1", CHANNELS)],
        [first],
        schema.Conv2DOptionsT(
            padding=schema.Padding.SAME, strideW=2, strideH=2, fusedActivationFunction=_RELU6
        ),
    )
    deep = main.tensor("deep", "float32", area)
    main.operator(
        "DEPTHWISE_CONV_2D",
        [first, weights("w2", [1, 3, 3, CHANNELS], 9), bias("b2", CHANNELS)],
        [deep],
        schema.DepthwiseConv2DOptionsT(
            padding=schema.Padding.SAME,
            strideW=1,
            strideH=1,
            depthMultiplier=1,
            fusedActivationFunction=_RELU6,
        ),
    )
    point = main.tensor("point", "float32", area)
    main.operator(
        "CONV_2D",
        [deep, weights("w3", [CHANNELS, 1, 1, CHANNELS], CHANNELS), bias("b3", CHANNELS)],
        [point],
        schema.Conv2DOptionsT(padding=schema.Padding.SAME, strideW=1, strideH=1),
    )
    added = main.tensor("added", "float32", area)
    main.operator("ADD", [first, point], [added], schema.AddOptionsT())
    features = main.output(added if shared else main.tensor("map", "float32", area))
    if not shared:
        main.operator("LOGISTIC", [added], [features])

    scores = _head(main, added, half, weights, bias)
    if last:
        end = main.tensor("end", "float32", [1, CLASSES])
        main.operator(last, [scores], [end])
        scores = end

    main.output(scores)
    model.signature({"image": image}, {"map": features, "scores": scores})
    return model.to_bytes()


def _head(main: Subgraph, features: int, side: int, weights: Any, bias: Any) -> int:
    pooled = main.tensor("pooled", "float32", [1, 1, 1, CHANNELS])
    main.operator(
        "AVERAGE_POOL_2D",
        [features],
        [pooled],
        schema.Pool2DOptionsT(
            padding=schema.Padding.VALID,
            strideW=1,
            strideH=1,
            filterWidth=side,
            filterHeight=side,
        ),
    )
    flat = main.tensor("flat", "float32", [1, CHANNELS])
    shape = main.constant("shape", np.asarray([1, CHANNELS], np.int32))
    main.operator(
        "RESHAPE", [pooled, shape], [flat], schema.ReshapeOptionsT(newShape=[1, CHANNELS])
    )
    scores = main.tensor("scores", "float32", [1, CLASSES])
    main.operator(
        "FULLY_CONNECTED",
        [flat, weights("w4", [CLASSES, CHANNELS], CHANNELS), bias("b4", CLASSES)],
        [scores],
        schema.FullyConnectedOptionsT(),
    )
    return scores
