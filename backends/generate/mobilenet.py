"""MobileNet v1 1.0 224 (Howard et al., arXiv 1704.04861, table 1) with weights from a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from switchgear.backends.generate.graph import Model, Quantisation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from switchgear.backends.generate.graph import Subgraph

_SEED: Final = 20170417
_STEPS: Final = 32767
_SIDE: Final = 224
_CLASSES: Final = 1000
_FIRST_CHANNELS: Final = 32

# Stride of the depthwise and channels of the pointwise convolution of each block. The paper
# prints stride 2 for the last one; 7x7 in and out allow only 1.
_BLOCKS: Final = (
    (1, 64),
    (2, 128),
    (1, 128),
    (2, 256),
    (1, 256),
    (2, 512),
    (1, 512),
    (1, 512),
    (1, 512),
    (1, 512),
    (1, 512),
    (2, 1024),
    (1, 1024),
)

# What goes into an activation is aimed at this standard deviation: a third or so of it is then
# below zero, some above six, and the rest spreads over all INT8 steps.
_TARGET_DEVIATION: Final = 2.0

# Mean square of the input, and variance of the activations over the channels of a pixel, that
# the gains below assume. Of values uniform in [-1, 1]; of a normal distribution of the
# deviation above, clipped to [0, 6].
_INPUT_MEAN_SQUARE: Final = 1 / 3
_ACTIVATION_MEAN_SQUARE: Final = 1.9
_ACTIVATION_VARIANCE: Final = 1.25

# INT8: an image in [-1, 1), activations in [0, 6], logits in [-LOGIT_RANGE, LOGIT_RANGE).
_INPUT_QUANTISATION: Final = Quantisation((1 / 128,), 0)
_ACTIVATION_QUANTISATION: Final = Quantisation((6 / 255,), -128)
_LOGIT_RANGE: Final = 8.0
_LOGIT_QUANTISATION: Final = Quantisation((_LOGIT_RANGE / 128,), 0)


@dataclass(frozen=True, slots=True)
class _Activation:
    """A tensor between two layers: its index, shape [1, side, side, channels] and scale."""

    tensor: int
    side: int
    channels: int
    quantisation: Quantisation | None


def mobilenet_v1(quantised: bool = False) -> bytes:
    """`image` [1, 224, 224, 3] -> `logits` [1, 1000]; 568,740,352 multiply-adds.

    Float: float32, image in [-1, 1], 16.9 MB. Quantised: int8 in and out (image scale 1/128,
    zero point 0), weights with a scale per output channel, biases int32, 4.6 MB; the weights
    are those of the float model, rounded.

    The paper's softmax is left out: its INT8 form has steps of 1/256 and a sum of 1, so at most
    22 different values, which is too few to tell a right answer from a wrong one. It costs no
    multiply-adds. The answers mean nothing, but they depend on every weight and on the image.
    """
    model = Model(f"MobileNet v1 1.0 224 {'int8' if quantised else 'float32'}, random weights")
    main = model.subgraph()
    network = _Network(main, quantised)
    dtype = "int8" if quantised else "float32"
    image = main.input(
        "image",
        dtype,
        [1, _SIDE, _SIDE, 3],
        quantisation=_INPUT_QUANTISATION if quantised else None,
    )
    x = _Activation(image, _SIDE, 3, _INPUT_QUANTISATION if quantised else None)
    x = network.convolution("conv_0", x, _FIRST_CHANNELS, size=3, stride=2)

    for number, (stride, channels) in enumerate(_BLOCKS, start=1):
        x = network.depthwise(f"depthwise_{number}", x, stride)
        x = network.convolution(f"pointwise_{number}", x, channels)

    x = network.average_pool("pool", x)
    x = network.classifier("classifier", x)
    logits = main.tensor("logits", dtype, [1, _CLASSES], quantisation=x.quantisation)
    to = main.constant("logits_shape", np.asarray([1, _CLASSES], np.int32))
    options = schema.ReshapeOptionsT(newShape=[1, _CLASSES])
    main.operator("RESHAPE", [x.tensor, to], [main.output(logits)], options)
    model.signature({"image": image}, {"logits": logits})
    return model.to_bytes()


class _Network:
    """Layers in the order of their calls; each draws its weights from one stream of numbers."""

    def __init__(self, graph: Subgraph, quantised: bool) -> None:
        self._graph = graph
        self._quantised = quantised
        # RandomState's streams are frozen by numpy's compatibility policy, those of newer
        # generators are not.
        self._random = np.random.RandomState(_SEED)

    def convolution(
        self, name: str, x: _Activation, channels: int, *, size: int = 1, stride: int = 1
    ) -> _Activation:
        fan_in = size * size * x.channels

        if size == 1:
            weights = self._centred([channels, 1, 1, x.channels])
        else:
            weights = self._weights(
                [channels, size, size, x.channels], fan_in, _INPUT_MEAN_SQUARE
            )

        return self._convolution(name, x, weights, stride, schema.ActivationFunctionType.RELU6)

    def classifier(self, name: str, x: _Activation) -> _Activation:
        weights = self._centred([_CLASSES, 1, 1, x.channels])
        return self._convolution(name, x, weights, 1, schema.ActivationFunctionType.NONE)

    def depthwise(self, name: str, x: _Activation, stride: int) -> _Activation:
        weights = self._weights([1, 3, 3, x.channels], 9, _ACTIVATION_MEAN_SQUARE)
        result = self._activation(name, -(-x.side // stride), x.channels, relu=True)
        self._graph.operator(
            "DEPTHWISE_CONV_2D",
            [x.tensor, *self._parameters(name, x, weights, channel_axis=3)],
            [result.tensor],
            schema.DepthwiseConv2DOptionsT(
                padding=schema.Padding.SAME,
                strideW=stride,
                strideH=stride,
                depthMultiplier=1,
                fusedActivationFunction=schema.ActivationFunctionType.RELU6,
            ),
            version=3 if self._quantised else 1,
        )
        return result

    def average_pool(self, name: str, x: _Activation) -> _Activation:
        result = self._activation(name, 1, x.channels, relu=True)
        self._graph.operator(
            "AVERAGE_POOL_2D",
            [x.tensor],
            [result.tensor],
            schema.Pool2DOptionsT(
                padding=schema.Padding.VALID,
                strideW=1,
                strideH=1,
                filterWidth=x.side,
                filterHeight=x.side,
            ),
            version=2 if self._quantised else 1,
        )
        return result

    def _convolution(
        self,
        name: str,
        x: _Activation,
        weights: NDArray[np.float32],
        stride: int,
        activation: int,
    ) -> _Activation:
        relu = activation == schema.ActivationFunctionType.RELU6
        result = self._activation(name, -(-x.side // stride), weights.shape[0], relu=relu)
        self._graph.operator(
            "CONV_2D",
            [x.tensor, *self._parameters(name, x, weights, channel_axis=0)],
            [result.tensor],
            schema.Conv2DOptionsT(
                padding=schema.Padding.SAME,
                strideW=stride,
                strideH=stride,
                fusedActivationFunction=activation,
            ),
            version=3 if self._quantised else 1,
        )
        return result

    def _activation(self, name: str, side: int, channels: int, *, relu: bool) -> _Activation:
        quantisation = None

        if self._quantised:
            quantisation = _ACTIVATION_QUANTISATION if relu else _LOGIT_QUANTISATION

        tensor = self._graph.tensor(
            name,
            "int8" if self._quantised else "float32",
            [1, side, side, channels],
            quantisation=quantisation,
        )
        return _Activation(tensor, side, channels, quantisation)

    def _parameters(
        self, name: str, x: _Activation, weights: NDArray[np.float32], *, channel_axis: int
    ) -> tuple[int, int]:
        """Adds weights and bias of a layer, rounded where the model is quantised."""
        bias = _scaled(self._steps([weights.shape[channel_axis]]), 0.5)
        weights_name, bias_name = f"{name}/weights", f"{name}/bias"

        if x.quantisation is None:
            return (
                self._graph.constant(weights_name, weights),
                self._graph.constant(bias_name, bias),
            )

        others = tuple(axis for axis in range(4) if axis != channel_axis)
        scales = np.abs(weights).max(axis=others, keepdims=True) / np.float32(127)
        steps = np.rint(weights / scales).astype(np.int8)
        bias_scales = scales.reshape(-1) * np.float32(x.quantisation.scales[0])
        return (
            self._graph.constant(
                weights_name,
                steps,
                quantisation=Quantisation(tuple(scales.reshape(-1)), 0, channel_axis),
            ),
            self._graph.constant(
                bias_name,
                np.rint(bias / bias_scales).astype(np.int32),
                quantisation=Quantisation(tuple(bias_scales)),
            ),
        )

    def _centred(self, shape: Sequence[int]) -> NDArray[np.float32]:
        """Weights of a 1x1 convolution [out, 1, 1, in] whose sum is zero for each output.

        Activations are all positive, so their mean would decide everything after a few layers
        and every image give the same answer; these weights take it out.
        """
        steps = self._steps(shape)
        steps -= np.rint(steps.sum(axis=3, keepdims=True) / shape[3]).astype(np.int64)
        return _scaled(steps, _limit(shape[3], _ACTIVATION_VARIANCE))

    def _weights(
        self, shape: Sequence[int], fan_in: int, mean_square: float
    ) -> NDArray[np.float32]:
        return _scaled(self._steps(shape), _limit(fan_in, mean_square))

    def _steps(self, shape: Sequence[int]) -> NDArray[np.int64]:
        """Uniform in [-_STEPS, _STEPS]: whole numbers have sums that no order changes."""
        return self._random.randint(-_STEPS, _STEPS + 1, tuple(shape), np.int64)


def _limit(fan_in: int, mean_square: float) -> float:
    """Bound of the uniform weights that turn such inputs into sums of the target deviation."""
    # A uniform distribution over [-limit, limit] has a variance of limit squared over 3.
    return _TARGET_DEVIATION * math.sqrt(3 / (fan_in * mean_square))


def _scaled(steps: NDArray[np.int64], limit: float) -> NDArray[np.float32]:
    return np.asarray(steps * (limit / _STEPS), np.float32)
