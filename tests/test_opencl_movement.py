"""Operators that move elements, join and part tensors, against the engine."""

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
    engine,
    image,
    model_of,
    ours,
    stored,
)

from switchgear.backends.generate.graph import Model, Quantisation
from switchgear.ipc.errors import BadModel, UnsupportedModel

pytestmark = pytest.mark.engine

X = Given(image(2, 3, 4))
PICTURE = Given(image(1, 4, 6, 3))
INT8 = (Wanted("int8", Quantisation((0.01,), 3)),)


@pytest.mark.parametrize(
    ("name", "given", "options"),
    [
        ("RESHAPE", [X, constant([4, -1])], None),
        ("RESHAPE", [X], schema.ReshapeOptionsT(newShape=[6, 4])),
        ("SQUEEZE", [Given(image(1, 3, 1, 4))], schema.SqueezeOptionsT(squeezeDims=[0])),
        ("SQUEEZE", [Given(image(1, 3, 1, 4))], schema.SqueezeOptionsT(squeezeDims=[])),
        ("EXPAND_DIMS", [X, constant([-1])], schema.ExpandDimsOptionsT()),
        ("TRANSPOSE", [X, constant([2, 0, 1])], schema.TransposeOptionsT()),
        ("PAD", [X, constant([[0, 1], [2, 0], [1, 1]])], schema.PadOptionsT()),
        (
            "PADV2",
            [X, constant([[0, 0], [1, 0], [0, 1]]), constant(np.asarray([0.5], np.float32))],
            schema.PadV2OptionsT(),
        ),
        (
            "MIRROR_PAD",
            [X, constant([[0, 0], [1, 2], [2, 0]])],
            schema.MirrorPadOptionsT(mode=schema.MirrorPadMode.REFLECT),
        ),
        (
            "MIRROR_PAD",
            [X, constant([[1, 0], [1, 2], [2, 0]])],
            schema.MirrorPadOptionsT(mode=schema.MirrorPadMode.SYMMETRIC),
        ),
        ("TILE", [X, constant([1, 2, 3])], schema.TileOptionsT()),
        ("BROADCAST_TO", [Given(image(3, 1)), constant([2, 3, 4])], None),
        ("REVERSE_V2", [X, constant([1])], schema.ReverseV2OptionsT()),
        ("SPACE_TO_DEPTH", [PICTURE], schema.SpaceToDepthOptionsT(blockSize=2)),
        (
            "DEPTH_TO_SPACE",
            [Given(image(1, 2, 3, 8))],
            schema.DepthToSpaceOptionsT(blockSize=2),
        ),
        (
            "SPACE_TO_BATCH_ND",
            [PICTURE, constant([2, 3]), constant([[0, 0], [1, 2]])],
            schema.SpaceToBatchNDOptionsT(),
        ),
        (
            "BATCH_TO_SPACE_ND",
            [Given(image(6, 2, 3, 2)), constant([2, 3]), constant([[1, 0], [1, 2]])],
            schema.BatchToSpaceNDOptionsT(),
        ),
        ("CONCATENATION", [X, Given(image(2, 2, 4))], schema.ConcatenationOptionsT(axis=-2)),
        (
            "PACK",
            [X, Given(image(2, 3, 4, seed=9))],
            schema.PackOptionsT(valuesCount=2, axis=1),
        ),
        ("FILL", [constant([2, 3]), Given(image(1)[0])], schema.FillOptionsT()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_result(name: str, given: list[Given], options: Any) -> None:
    compare(
        name,
        given,
        FLOAT,
        options,
        version=2 if name == "BROADCAST_TO" else 1,
        spread=name != "FILL",
    )


def test_a_slice() -> None:
    given = [X, constant([0, 1, 1]), constant([-1, 2, -1])]
    compare("SLICE", given, FLOAT, schema.SliceOptionsT(), shapes=[(2, 2, 3)])


@pytest.mark.parametrize(
    ("begins", "ends", "steps", "masks"),
    [
        ([0, 1, 0], [2, 3, 4], [1, 1, 2], {}),
        ([1, 2, 3], [2, 0, 0], [1, -1, -2], {}),
        ([1, 1, 1], [2, 2, 2], [1, 1, 1], {"beginMask": 5, "endMask": 6}),
        ([-1, 1, 0], [0, 3, 4], [1, 1, 1], {"shrinkAxisMask": 1}),
        ([0, 0, 0], [0, 2, 3], [1, 1, 1], {"newAxisMask": 1}),
        ([0, -2, 0], [9, 9, 9], [1, 1, 1], {}),
    ],
)
def test_a_strided_slice(
    begins: list[int], ends: list[int], steps: list[int], masks: dict[str, int]
) -> None:
    given = [X, constant(begins), constant(ends), constant(steps)]
    masks = {"beginMask": 0, "endMask": 0, "newAxisMask": 0, "shrinkAxisMask": 0, **masks}
    options = schema.StridedSliceOptionsT(ellipsisMask=0, **masks)
    compare("STRIDED_SLICE", given, FLOAT, options)


def test_a_strided_slice_with_an_ellipsis_is_refused() -> None:
    given = [X, constant([0, 0]), constant([1, 1]), constant([1, 1])]
    options = schema.StridedSliceOptionsT(
        ellipsisMask=1, beginMask=0, endMask=0, newAxisMask=0, shrinkAxisMask=0
    )
    data = model_of("STRIDED_SLICE", given, FLOAT, [(2, 3, 1)], options)
    with pytest.raises(UnsupportedModel, match="ellipsisMask"):
        ours(data, [])


def test_parts() -> None:
    two, three = (Wanted(),) * 2, (Wanted(),) * 3
    compare("SPLIT", [constant([2]), X], two, schema.SplitOptionsT(numSplits=2))
    compare(
        "SPLIT_V",
        [X, constant([1, -1]), constant([1])],
        two,
        schema.SplitVOptionsT(numSplits=2),
    )
    compare("UNPACK", [X], three, schema.UnpackOptionsT(num=3, axis=1))


def test_stored_values_are_padded_with_their_zero_point() -> None:
    x = stored(image(1, 3, 3, 2), 0.01, 3)
    found = compare("PAD", [x, constant([[0, 0], [1, 1], [1, 1], [0, 0]])], INT8)

    assert (found[0][:, 0] == 3).all()


def test_stored_values_are_joined_on_the_scale_of_the_result() -> None:
    """Only the uint8 kernels take inputs of different scales."""
    given = [
        stored(image(1, 3), 0.01, 100, "uint8"),
        stored(image(1, 3, seed=9), 0.02, 90, "uint8"),
    ]
    wanted = (Wanted("uint8", Quantisation((0.015,), 110)),)
    compare("CONCATENATION", given, wanted, schema.ConcatenationOptionsT(axis=1), steps=1)


def test_whole_numbers_and_truths_move_too() -> None:
    whole = Given(np.arange(12, dtype=np.int32).reshape(3, 4))
    order = constant([1, 0])
    compare("TRANSPOSE", [whole, order], (Wanted("int32"),), schema.TransposeOptionsT())
    truth = Given(np.arange(12).reshape(3, 4) % 3 == 0)
    compare("TILE", [truth, constant([2, 1])], (Wanted("bool"),), schema.TileOptionsT())


def test_shapes_are_known_before_the_model_runs() -> None:
    """SHAPE, a cut and PACK give the shape of a RESHAPE, as converters write it."""
    x = image(2, 3, 4)
    model = Model("shapes")
    main = model.subgraph()
    given = main.input("x", "float32", x.shape)
    shape = main.tensor("shape", "int32", (3,))
    first = main.tensor("first", "int32", ())
    rest = main.constant("rest", np.asarray(12, np.int32))
    packed = main.tensor("packed", "int32", (2,))
    result = main.tensor("y", "float32", (2, 12))
    cuts = [
        main.constant(n, np.asarray([v], np.int32)) for n, v in (("b", 0), ("e", 1), ("s", 1))
    ]
    main.operator("SHAPE", [given], [shape], schema.ShapeOptionsT(outType=2))
    options = schema.StridedSliceOptionsT(
        beginMask=0, endMask=0, ellipsisMask=0, newAxisMask=0, shrinkAxisMask=1
    )
    main.operator("STRIDED_SLICE", [shape, *cuts], [first], options)
    main.operator("PACK", [first, rest], [packed], schema.PackOptionsT(valuesCount=2, axis=0))
    main.operator("RESHAPE", [given, packed], [main.output(result)])

    np.testing.assert_array_equal(ours(model.to_bytes(), [x])[0], x.reshape(2, 12))


def test_what_depends_on_shapes_only() -> None:
    compare("RANK", [X], (Wanted("int32"),), schema.RankOptionsT())
    compare("ZEROS_LIKE", [X], spread=False)


def test_a_sparse_constant_becomes_dense() -> None:
    """Compressed rows: 5 and 6 in the first of three, 7 in the last."""
    model = Model("sparse")
    main = model.subgraph()
    x = main.input("x", "float32", (3, 4))
    values = main.constant("values", np.asarray([5, 6, 7], np.float32))
    main.packed.tensors[values].shape = [3, 4]
    main.packed.tensors[values].sparsity = schema.SparsityParametersT(
        traversalOrder=[0, 1],
        dimMetadata=[
            schema.DimensionMetadataT(format=schema.DimensionType.DENSE, denseSize=3),
            schema.DimensionMetadataT(
                format=schema.DimensionType.SPARSE_CSR,
                arraySegmentsType=schema.SparseIndexVector.Uint8Vector,
                arraySegments=schema.Uint8VectorT(values=[0, 2, 2, 3]),
                arrayIndicesType=schema.SparseIndexVector.Uint8Vector,
                arrayIndices=schema.Uint8VectorT(values=[0, 3, 1]),
            ),
        ],
    )
    dense = main.tensor("dense", "float32", (3, 4))
    y = main.output(main.tensor("y", "float32", (3, 4)))
    main.operator("DENSIFY", [values], [dense], schema.DensifyOptionsT())
    main.operator("ADD", [x, dense], [y], schema.AddOptionsT())
    data, given = model.to_bytes(), image(3, 4)
    found = ours(data, [given])[0]

    np.testing.assert_allclose(found, engine(data, [given])[0], atol=1e-6)
    np.testing.assert_allclose(
        found - given, [[5, 0, 0, 6], [0, 0, 0, 0], [0, 7, 0, 0]], atol=1e-5
    )


def test_a_range_is_a_constant() -> None:
    model = Model("range")
    main = model.subgraph()
    x = main.input("x", "int32", (4,))
    ends = [
        main.constant(n, np.asarray(v, np.int32)) for n, v in (("a", 1), ("b", 9), ("c", 2))
    ]
    counted = main.tensor("counted", "int32", (4,))
    result = main.tensor("y", "int32", (4,))
    main.operator("RANGE", ends, [counted], schema.RangeOptionsT())
    main.operator("ADD", [x, counted], [main.output(result)], schema.AddOptionsT())
    found = ours(model.to_bytes(), [np.asarray([10, 20, 30, 40], np.int32)])

    assert found[0].tolist() == [11, 23, 35, 47]


@pytest.mark.parametrize(
    ("name", "given", "options"),
    [
        ("RESHAPE", [X, constant([5, -1])], None),
        ("TRANSPOSE", [X, constant([0, 0, 1])], None),
        ("SLICE", [X, constant([0, 1, 1]), constant([2, 9, 1])], None),
        ("PAD", [X, constant([[0, -1], [2, 0], [1, 1]])], None),
        ("TILE", [X, constant([1, 2])], None),
        ("CONCATENATION", [X, Given(image(3, 2, 4))], schema.ConcatenationOptionsT(axis=1)),
        ("EXPAND_DIMS", [X, constant([7])], None),
        ("DEPTH_TO_SPACE", [PICTURE], schema.DepthToSpaceOptionsT(blockSize=2)),
    ],
)
def test_nonsense_is_refused(name: str, given: list[Given], options: Any) -> None:
    with pytest.raises(BadModel):
        ours(model_of(name, given, FLOAT, [(1,)], options), [])


def test_a_result_of_another_shape_than_the_files_is_refused() -> None:
    data = model_of("TRANSPOSE", [X, constant([2, 0, 1])], FLOAT, [(2, 4, 3)])
    with pytest.raises(BadModel, match=r"gives \[4, 2, 3\]"):
        ours(data, [])
