"""Convolutions and matrix products of the importer against the engine's reference kernels."""

from __future__ import annotations

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from opencl_graph_helpers import (
    FLOAT,
    Given,
    Wanted,
    compare,
    constant,
    engine,
    image,
    model_of,
    ours,
    stored,
    stored_bias,
    stored_weights,
)

from switchgear.backends.generate.graph import Model, Quantisation
from switchgear.ipc.errors import UnsupportedModel

pytestmark = pytest.mark.engine

SAME, VALID = schema.Padding.SAME, schema.Padding.VALID
RELU, RELU6 = schema.ActivationFunctionType.RELU, schema.ActivationFunctionType.RELU6
INT8 = (Wanted("int8", Quantisation((0.05,), -7)),)


def conv(padding: int, stride: int = 1, dilation: int = 1, activation: int = 0) -> object:
    return schema.Conv2DOptionsT(
        padding=padding,
        strideW=stride,
        strideH=stride,
        dilationWFactor=dilation,
        dilationHFactor=dilation,
        fusedActivationFunction=activation,
    )


@pytest.mark.parametrize("padding", [SAME, VALID])
@pytest.mark.parametrize(
    ("size", "stride", "dilation"), [(1, 1, 1), (3, 1, 1), (3, 2, 1), (3, 1, 2), (2, 3, 1)]
)
def test_a_float_convolution(padding: int, size: int, stride: int, dilation: int) -> None:
    x, w = Given(image(1, 6, 5, 2)), constant(image(3, size, size, 2, seed=8))
    compare("CONV_2D", [x, w, constant(image(3))], FLOAT, conv(padding, stride, dilation))


def test_a_convolution_with_an_activation() -> None:
    x, w = Given(image(1, 4, 5, 3)), constant(image(4, 1, 1, 3, seed=8))
    found = compare("CONV_2D", [x, w, constant(image(4))], FLOAT, conv(SAME, activation=RELU6))

    assert found[0].min() == 0


def test_a_grouped_convolution() -> None:
    x, w = Given(image(1, 4, 3, 4)), constant(image(6, 2, 2, 2, seed=8))
    options = conv(SAME)
    data = model_of("CONV_2D", [x, w, constant(image(6))], FLOAT, [(1, 4, 3, 6)], options)
    # The reference kernels have no groups; XNNPACK does.
    expected = engine(data, [x.value], "xnnpack")
    np.testing.assert_allclose(ours(data, [x.value])[0], expected[0], atol=1e-5)


@pytest.mark.parametrize("multiplier", [1, 2])
@pytest.mark.parametrize(("padding", "stride", "dilation"), [(SAME, 2, 1), (VALID, 1, 2)])
def test_a_depthwise_convolution(
    multiplier: int, padding: int, stride: int, dilation: int
) -> None:
    x, w = Given(image(1, 5, 6, 2)), constant(image(1, 3, 3, 2 * multiplier, seed=8))
    options = schema.DepthwiseConv2DOptionsT(
        padding=padding,
        strideW=stride,
        strideH=stride,
        depthMultiplier=multiplier,
        dilationWFactor=dilation,
        dilationHFactor=dilation,
        fusedActivationFunction=RELU,
    )
    compare("DEPTHWISE_CONV_2D", [x, w, constant(image(2 * multiplier))], FLOAT, options)


@pytest.mark.parametrize(
    ("padding", "size", "stride"),
    [(SAME, 2, 2), (SAME, 3, 2), (SAME, 3, 1), (SAME, 2, 3), (VALID, 4, 2), (VALID, 2, 2)],
)
def test_a_transposed_convolution(padding: int, size: int, stride: int) -> None:
    side = 3 * stride if padding == SAME else 2 * stride + size
    x, w = Given(image(1, 3, 3, 2)), constant(image(3, size, size, 2, seed=8))
    options = schema.TransposeConvOptionsT(padding=padding, strideW=stride, strideH=stride)
    compare("TRANSPOSE_CONV", [constant([1, side, side, 3]), w, x], FLOAT, options)


def test_the_transposed_convolution_of_mediapipe() -> None:
    """Only XNNPACK has it."""
    x, w = Given(image(1, 4, 5, 3)), constant(image(2, 2, 2, 3, seed=8))
    data = model_of(
        "CUSTOM:Convolution2DTransposeBias",
        [x, w, constant(image(2))],
        FLOAT,
        [(1, 8, 10, 2)],
        custom=np.asarray([1, 2, 2], "<i4").tobytes(),
    )
    expected = engine(data, [x.value], "xnnpack")
    np.testing.assert_allclose(ours(data, [x.value])[0], expected[0], atol=1e-5)


@pytest.mark.parametrize("keep", [False, True])
def test_a_fully_connected_layer(keep: bool) -> None:
    x, w = Given(image(2, 3, 8)), constant(image(5, 8, seed=8))
    options = schema.FullyConnectedOptionsT(keepNumDims=keep, fusedActivationFunction=RELU)
    compare("FULLY_CONNECTED", [x, w, constant(image(5))], FLOAT, options, version=5)


def test_a_fully_connected_layer_with_computed_weights() -> None:
    given = [Given(image(2, 8)), Given(image(5, 8, seed=8)), None]
    compare("FULLY_CONNECTED", given, FLOAT, schema.FullyConnectedOptionsT(), version=5)


@pytest.mark.parametrize(("left", "right"), [(False, False), (False, True), (True, False)])
def test_a_product_of_two_tensors(left: bool, right: bool) -> None:
    a = image(2, 4, 3) if left else image(2, 3, 4)
    b = image(2, 5, 4, seed=8) if right else image(2, 4, 5, seed=8)
    options = schema.BatchMatMulOptionsT(adjX=left, adjY=right)
    compare("BATCH_MATMUL", [Given(a), Given(b)], FLOAT, options)


def test_half_float_weights_are_widened() -> None:
    x, weights = image(1, 4, 4, 2), image(3, 2, 2, 2, seed=8).astype(np.float16)
    model = Model("half-float weights")
    main = model.subgraph()
    given = main.input("x", "float32", x.shape)
    stored_as = main.constant("stored", weights)
    widened = main.tensor("widened", "float32", weights.shape)
    bias = main.constant("bias", image(3))
    result = main.tensor("y", "float32", (1, 4, 4, 3))
    main.operator("DEQUANTIZE", [stored_as], [widened], version=2)
    main.operator("CONV_2D", [given, widened, bias], [main.output(result)], conv(SAME))
    data = model.to_bytes()
    expected = engine(data, [x])

    assert expected[0].std() > 0.1
    np.testing.assert_allclose(ours(data, [x])[0], expected[0], atol=1e-5)


# Whole numbers: bit for bit.


@pytest.mark.parametrize(("padding", "size", "stride"), [(SAME, 3, 2), (VALID, 2, 1)])
@pytest.mark.parametrize("activation", [0, RELU6])
def test_a_quantised_convolution(padding: int, size: int, stride: int, activation: int) -> None:
    x = stored(image(1, 5, 4, 2), 0.01, 3)
    w = stored_weights(image(3, size, size, 2, seed=8), 0)
    given = [x, w, stored_bias(image(3), x, w)]
    compare("CONV_2D", given, INT8, conv(padding, stride, activation=activation), version=3)


def test_a_quantised_depthwise_convolution() -> None:
    x, w = stored(image(1, 4, 4, 2), 0.01, 3), stored_weights(image(1, 3, 3, 4, seed=8), 3)
    options = schema.DepthwiseConv2DOptionsT(
        padding=SAME, strideW=1, strideH=1, depthMultiplier=2
    )
    given = [x, w, stored_bias(image(4), x, w)]
    compare("DEPTHWISE_CONV_2D", given, INT8, options, version=3)


def test_a_quantised_transposed_convolution() -> None:
    x, w = stored(image(1, 3, 3, 2), 0.01, 3), stored_weights(image(3, 3, 3, 2, seed=8), 0)
    options = schema.TransposeConvOptionsT(padding=SAME, strideW=2, strideH=2)
    given = [constant([1, 6, 6, 3]), w, x, stored_bias(image(3), x, w)]
    compare("TRANSPOSE_CONV", given, INT8, options, version=3)


def test_a_quantised_fully_connected_layer() -> None:
    x, w = stored(image(3, 16), 0.01, 3), stored(image(5, 16, seed=8), 0.01)
    weights = Given(w.value, w.quantisation, constant=True)
    given = [x, weights, stored_bias(image(5), x, weights)]
    compare("FULLY_CONNECTED", given, INT8, schema.FullyConnectedOptionsT(), version=4)


def test_an_old_uint8_convolution() -> None:
    """Its weights have a zero point of their own."""
    x = stored(image(1, 4, 4, 2), 0.01, 120, "uint8")
    w = stored(image(4, 2, 2, 2, seed=8), 0.01, 130, "uint8")
    weights = Given(w.value, w.quantisation, constant=True)
    bias = constant(np.asarray([100, -900, 30, 4000], np.int32), Quantisation((0.0001,)))
    wanted = (Wanted("uint8", Quantisation((0.05,), 117)),)
    compare("CONV_2D", [x, weights, bias], wanted, conv(SAME))


def test_a_quantised_product_of_two_tensors() -> None:
    given = [stored(image(2, 3, 4), 0.01, 3), stored(image(2, 4, 5, seed=8), 0.008)]
    compare("BATCH_MATMUL", given, INT8, schema.BatchMatMulOptionsT(), version=2)


def test_stored_weights_of_a_float_convolution() -> None:
    """The engine rounds the input to eight bits at each run, ours does not."""
    x, w = Given(image(1, 4, 4, 3)), stored_weights(image(4, 2, 2, 3, seed=8), 0)
    options = conv(SAME)
    compare("CONV_2D", [x, w, constant(image(4))], FLOAT, options, version=5, tolerance=0.01)


def test_weights_that_are_computed_are_refused() -> None:
    given = [Given(image(1, 4, 4, 3)), Given(image(2, 1, 1, 3)), None]
    data = model_of("CONV_2D", given, FLOAT, [(1, 4, 4, 2)], conv(SAME))
    with pytest.raises(UnsupportedModel, match=r"CONV_2D: its input 1 is computed"):
        ours(data, [])


@pytest.mark.parametrize("quantised", [False, True])
def test_weights_in_four_bits(quantised: bool) -> None:
    """Two in a byte, the low half first."""
    halves = np.random.RandomState(3).randint(-7, 8, 40) & 15
    packed = (halves[::2] | halves[1::2] << 4).astype(np.uint8)
    x = stored(image(3, 8), 0.01, 3) if quantised else Given(image(3, 8))
    scales = tuple(0.1 + 0.01 * i for i in range(5))
    model = Model("weights in four bits")
    main = model.subgraph()
    given = main.input("x", x.value.dtype.name, (3, 8), quantisation=x.quantisation)
    weights = main.constant("w", packed, quantisation=Quantisation(scales))
    main.packed.tensors[weights].type = schema.TensorType.INT4
    main.packed.tensors[weights].shape = [5, 8]
    wanted = INT8[0] if quantised else FLOAT[0]
    result = main.tensor("y", wanted.dtype, (3, 5), quantisation=wanted.quantisation)
    bias = (
        main.constant(
            "b",
            np.arange(5, dtype=np.int32) * 20,
            quantisation=Quantisation(tuple(0.01 * scale for scale in scales)),
        )
        if quantised
        else main.constant("b", image(5))
    )
    options = schema.FullyConnectedOptionsT()
    main.operator(
        "FULLY_CONNECTED", [given, weights, bias], [main.output(result)], options, version=10
    )
    data = model.to_bytes()
    expected = engine(data, [x.value])[0]

    assert expected.std() > 0.1
    # In float, the engine rounds the input to eight bits.
    np.testing.assert_allclose(
        ours(data, [x.value])[0], expected, rtol=0, atol=0 if quantised else 0.01
    )
