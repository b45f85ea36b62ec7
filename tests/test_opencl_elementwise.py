"""Operators on elements, reductions, pools, sizes and indices, against the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from opencl_graph_helpers import (
    FLOAT,
    Given,
    Wanted,
    compare,
    constant,
    image,
    model_of,
    ours,
    stored,
)

from switchgear.backends.generate.graph import Quantisation
from switchgear.ipc.errors import UnsupportedModel

pytestmark = pytest.mark.engine

A, B = Given(image(2, 3, 4)), Given(image(2, 3, 4, seed=9) * 1.5)
ROW = Given(image(4, seed=11))
POSITIVE = Given(np.abs(image(2, 3, 4)) + np.float32(0.1))
WIDE = Given(image(2, 3, 4) * 5)
TRUTH, OTHER_TRUTH = Given(A.value > 0), Given(B.value > 0.2)
COUNTS = Given(np.arange(-6, 6, dtype=np.int32).reshape(3, 4))
STEPS = Given(np.asarray([3, -2, 4, -5], np.int32))
STORED_A = stored(image(2, 3, 4), 0.01, 3)
STORED_B = stored(image(2, 3, 4, seed=9), 0.012, -5)
INT8 = (Wanted("int8", Quantisation((0.02,), -7)),)
RELU6 = schema.ActivationFunctionType.RELU6


@pytest.mark.parametrize("second", [B, ROW], ids=["same", "row"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ADD", schema.AddOptionsT(fusedActivationFunction=RELU6)),
        ("SUB", schema.SubOptionsT()),
        ("MUL", schema.MulOptionsT()),
        ("DIV", schema.DivOptionsT()),
        ("MAXIMUM", schema.MaximumMinimumOptionsT()),
        ("MINIMUM", schema.MaximumMinimumOptionsT()),
        ("SQUARED_DIFFERENCE", schema.SquaredDifferenceOptionsT()),
    ],
)
def test_arithmetic(name: str, options: Any, second: Given) -> None:
    compare(name, [A, second], FLOAT, options)


@pytest.mark.parametrize("name", ["FLOOR_DIV", "FLOOR_MOD"])
def test_division_towards_the_floor(name: str) -> None:
    compare(name, [A, B])
    compare(name, [COUNTS, STEPS], (Wanted("int32"),))


def test_powers_and_sums() -> None:
    compare("POW", [POSITIVE, B], FLOAT, schema.PowOptionsT())
    compare("ADD_N", [A, B, POSITIVE], FLOAT, schema.AddNOptionsT())
    compare("ADD", [COUNTS, STEPS], (Wanted("int32"),), schema.AddOptionsT())
    compare("MUL", [COUNTS, STEPS], (Wanted("int32"),), schema.MulOptionsT())


@pytest.mark.parametrize(
    "name",
    ["ABS", "NEG", "SIGN", "EXP", "SQUARE", "SIN", "COS", "FLOOR", "CEIL", "ROUND"],
)
def test_functions_of_one_value(name: str) -> None:
    compare(name, [WIDE])


@pytest.mark.parametrize("name", ["LOG", "SQRT", "RSQRT"])
def test_functions_of_a_positive_value(name: str) -> None:
    compare(name, [POSITIVE])


def test_halves_are_rounded_to_even() -> None:
    halves = Given(np.asarray([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5], np.float32))
    found = compare("ROUND", [halves])

    assert found[0].tolist() == [-2, -2, 0, 0, 2, 2, 4]


@pytest.mark.parametrize(
    "name",
    ["EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL"],
)
def test_comparisons(name: str) -> None:
    half = Given(np.where(A.value > 0, A.value, B.value))
    compare(name, [A, half], (Wanted("bool"),))
    other = Given(np.where(A.value > 0, STORED_A.value, STORED_B.value), STORED_A.quantisation)
    compare(name, [STORED_A, other], (Wanted("bool"),), version=2)


def test_truths_and_choices() -> None:
    truth = (Wanted("bool"),)
    compare("LOGICAL_AND", [TRUTH, OTHER_TRUTH], truth)
    compare("LOGICAL_OR", [TRUTH, OTHER_TRUTH], truth)
    compare("LOGICAL_NOT", [TRUTH], truth)
    compare("SELECT", [TRUTH, A, B])
    compare("SELECT_V2", [Given(ROW.value > 0), A, B])


@pytest.mark.parametrize("target", ["int32", "uint8", "bool", "int64"])
def test_casts(target: str) -> None:
    compare(
        "CAST", [Given(np.abs(np.rint(WIDE.value)))], (Wanted(target),), schema.CastOptionsT()
    )


def test_a_cast_from_whole_numbers() -> None:
    compare("CAST", [COUNTS], FLOAT, schema.CastOptionsT())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("RELU", None),
        ("RELU6", None),
        ("RELU_N1_TO_1", None),
        ("RELU_0_TO_1", None),
        ("LEAKY_RELU", schema.LeakyReluOptionsT(alpha=0.3)),
        ("HARD_SWISH", schema.HardSwishOptionsT()),
        ("LOGISTIC", None),
        ("TANH", None),
        ("ELU", None),
        ("GELU", schema.GeluOptionsT(approximate=False)),
        ("GELU", schema.GeluOptionsT(approximate=True)),
        ("SOFTMAX", schema.SoftmaxOptionsT(beta=0.7)),
        ("LOG_SOFTMAX", schema.LogSoftmaxOptionsT()),
        ("L2_NORMALIZATION", schema.L2NormOptionsT()),
    ],
)
def test_activations(name: str, options: Any) -> None:
    compare(name, [WIDE], FLOAT, options)


@pytest.mark.parametrize("name", ["LOGISTIC", "TANH", "SOFTMAX", "LOG_SOFTMAX"])
def test_activations_of_extreme_values(name: str) -> None:
    extreme = Given(np.asarray([[-300, -90, 0, 90, 300]], np.float32))
    options = schema.SoftmaxOptionsT(beta=1.0) if name == "SOFTMAX" else None
    found = compare(name, [extreme], FLOAT, options)

    assert np.isfinite(found[0]).all()


def test_a_slope_for_each_channel() -> None:
    compare("PRELU", [Given(image(1, 3, 4, 2)), constant(image(1, 1, 2))])


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", ["MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD"])
def test_reductions(name: str, keep: bool) -> None:
    options = schema.ReducerOptionsT(keepDims=keep)
    compare(name, [B, constant([0, -1])], FLOAT, options)


def test_truths_are_reduced() -> None:
    wanted, options = (Wanted("bool"),), schema.ReducerOptionsT(keepDims=False)
    rows = Given(np.asarray([[True, True], [True, False], [False, False]]))
    compare("REDUCE_ANY", [rows, constant([1])], wanted, options)
    compare("REDUCE_ALL", [rows, constant([1])], wanted, options)


@pytest.mark.parametrize("name", ["ARG_MAX", "ARG_MIN"])
def test_the_place_of_an_extreme(name: str) -> None:
    kind = schema.TensorType.INT32
    options = (
        schema.ArgMaxOptionsT(outputType=kind)
        if name == "ARG_MAX"
        else schema.ArgMinOptionsT(outputType=kind)
    )
    compare(name, [A, constant([-1])], (Wanted("int32"),), options)
    whole = stored(image(4, 5), 0.01, 100, "uint8")
    compare(name, [whole, constant([0])], (Wanted("int32"),), options)


@pytest.mark.parametrize(
    ("exclusive", "reverse"), [(False, False), (True, False), (False, True)]
)
def test_sums_so_far(exclusive: bool, reverse: bool) -> None:
    options = schema.CumsumOptionsT(exclusive=exclusive, reverse=reverse)
    compare("CUMSUM", [A, constant(np.asarray(1, np.int32))], FLOAT, options)


def pool(padding: int, size: int, stride: int) -> Any:
    return schema.Pool2DOptionsT(
        padding=padding, strideW=stride, strideH=stride, filterWidth=size, filterHeight=size
    )


@pytest.mark.parametrize("padding", [schema.Padding.SAME, schema.Padding.VALID])
@pytest.mark.parametrize(("size", "stride"), [(2, 2), (3, 2), (5, 1)])
@pytest.mark.parametrize("name", ["AVERAGE_POOL_2D", "MAX_POOL_2D"])
def test_pools(name: str, size: int, stride: int, padding: int) -> None:
    compare(name, [Given(image(1, 5, 5, 2))], FLOAT, pool(padding, size, stride))


def test_the_root_of_a_mean_square() -> None:
    compare("L2_POOL_2D", [Given(image(1, 5, 5, 2))], FLOAT, pool(schema.Padding.SAME, 3, 2))


@pytest.mark.parametrize(("corners", "centres"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("size", [(6, 8), (5, 7), (2, 2)])
def test_resizing(size: tuple[int, int], corners: bool, centres: bool) -> None:
    x = Given(image(1, 3, 4, 2))
    bilinear = schema.ResizeBilinearOptionsT(alignCorners=corners, halfPixelCenters=centres)
    nearest = schema.ResizeNearestNeighborOptionsT(
        alignCorners=corners, halfPixelCenters=centres
    )
    compare("RESIZE_BILINEAR", [x, constant(list(size))], FLOAT, bilinear, version=3)
    compare("RESIZE_NEAREST_NEIGHBOR", [x, constant(list(size))], FLOAT, nearest, version=3)


def test_elements_by_index() -> None:
    chosen = constant([2, 0, 2])
    compare("GATHER", [A, chosen], FLOAT, schema.GatherOptionsT(axis=1))
    given = Given(np.asarray([[1, 0], [0, 2]], np.int32))
    compare("GATHER", [A, given], FLOAT, schema.GatherOptionsT(axis=-1))
    compare("GATHER_ND", [A, given], FLOAT, schema.GatherNdOptionsT())
    rows = Given(np.asarray([1, 0], np.int32))
    compare("EMBEDDING_LOOKUP", [rows, constant(image(3, 4))])


def test_one_hot_and_the_best() -> None:
    given = [
        Given(np.asarray([[1, 0], [2, 2]], np.int32)),
        constant(np.asarray(3, np.int32)),
        constant(np.asarray(2.5, np.float32)),
        constant(np.asarray(-1, np.float32)),
    ]
    compare("ONE_HOT", given, FLOAT, schema.OneHotOptionsT(axis=-1))
    best = [A, constant(np.asarray(2, np.int32))]
    compare("TOPK_V2", best, (Wanted(), Wanted("int32")), schema.TopKV2OptionsT())


# Quantised values. Sums, products and cut-offs are bit for bit the engine's.


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ADD", schema.AddOptionsT(fusedActivationFunction=RELU6)),
        ("SUB", schema.SubOptionsT()),
        ("MUL", schema.MulOptionsT()),
    ],
)
def test_quantised_arithmetic(name: str, options: Any) -> None:
    compare(name, [STORED_A, STORED_B], INT8, options, version=2)


@pytest.mark.parametrize("name", ["RELU", "RELU6", "RELU_N1_TO_1"])
def test_quantised_values_are_cut_off(name: str) -> None:
    compare(name, [STORED_A], INT8, version=2 if name != "RELU_N1_TO_1" else 1, steps=0)


def test_quantised_slopes() -> None:
    options = schema.LeakyReluOptionsT(alpha=0.3)
    compare("LEAKY_RELU", [STORED_A], INT8, options, version=2)
    slopes = stored(image(1, 1, 2), 0.01, 3)
    given = [
        stored(image(1, 3, 4, 2), 0.01, 3),
        Given(slopes.value, slopes.quantisation, constant=True),
    ]
    compare("PRELU", given, INT8)


@pytest.mark.parametrize(
    ("name", "result", "version", "options"),
    [
        ("LOGISTIC", Quantisation((1 / 256,), -128), 2, None),
        ("TANH", Quantisation((1 / 128,), 0), 2, None),
        ("HARD_SWISH", Quantisation((0.02,), -7), 1, schema.HardSwishOptionsT()),
        ("SOFTMAX", Quantisation((1 / 256,), -128), 2, schema.SoftmaxOptionsT(beta=1.0)),
        ("ABS", Quantisation((0.02,), -128), 2, None),
    ],
)
def test_quantised_functions(
    name: str, result: Quantisation, version: int, options: Any
) -> None:
    compare(name, [STORED_A], (Wanted("int8", result),), options, version=version, steps=1)


@pytest.mark.parametrize("name", ["MEAN", "SUM"])
def test_quantised_sums(name: str) -> None:
    options = schema.ReducerOptionsT(keepDims=True)
    wide = (Wanted("int8", Quantisation((0.1,), -7)),)
    # The reference kernel of SUM takes no account of the zero points.
    given = [STORED_A, constant([1, 2])]
    compare(name, given, wide, options, version=2, steps=1, kernels="optimised")


@pytest.mark.parametrize("padding", [schema.Padding.SAME, schema.Padding.VALID])
@pytest.mark.parametrize("name", ["AVERAGE_POOL_2D", "MAX_POOL_2D"])
def test_quantised_pools(name: str, padding: int) -> None:
    x = stored(image(1, 5, 5, 2), 0.01, 3)
    wanted = (Wanted("int8", x.quantisation),)
    compare(name, [x], wanted, pool(padding, 3, 2), version=2)


@pytest.mark.parametrize("name", ["RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"])
def test_quantised_pictures_are_resized(name: str) -> None:
    x = stored(image(1, 3, 4, 2), 0.01, 3)
    options = (
        schema.ResizeBilinearOptionsT(halfPixelCenters=True)
        if name == "RESIZE_BILINEAR"
        else schema.ResizeNearestNeighborOptionsT()
    )
    wanted = (Wanted("int8", x.quantisation),)
    compare(name, [x, constant([6, 8])], wanted, options, version=3, steps=1)


def test_scales_are_changed() -> None:
    compare("QUANTIZE", [A], INT8, schema.QuantizeOptionsT())
    compare("QUANTIZE", [STORED_A], INT8, schema.QuantizeOptionsT(), version=2)
    wanted = (Wanted("uint8", Quantisation((0.02,), 121)),)
    compare("QUANTIZE", [STORED_A], wanted, schema.QuantizeOptionsT(), version=2)
    compare("DEQUANTIZE", [STORED_A], FLOAT, schema.DequantizeOptionsT(), version=2)


def test_versions_dtypes_and_options_are_named() -> None:
    short = Given(A.value.astype(np.int16), Quantisation((0.01,)))
    cases = [
        (model_of("EXP", [A], FLOAT, [(2, 3, 4)], version=9), "EXP: version 9"),
        (
            model_of("TANH", [short], (Wanted("int16", Quantisation((0.01,))),), [(2, 3, 4)]),
            "TANH: on int16",
        ),
        (
            model_of(
                "GATHER", [A, constant([0])], FLOAT, [(1,)], schema.GatherOptionsT(batchDims=1)
            ),
            "GATHER: batchDims = 1",
        ),
        (
            model_of("SEGMENT_SUM", [A, constant([0, 1])], FLOAT, [(2, 3, 4)]),
            "SEGMENT_SUM: not known",
        ),
    ]
    for data, text in cases:
        with pytest.raises(UnsupportedModel, match=text):
            ours(data, [])
