"""Reading .tflite files into a graph: what stands in them, and damage of all kinds."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from hypothesis import given, settings
from hypothesis import strategies as st

from switchgear.backends import generate
from switchgear.backends.generate.graph import Model, Quantisation
from switchgear.backends.opencl.graph import Graph, read_graph, with_shapes
from switchgear.backends.opencl.sparse import Level, Sparsity, dense
from switchgear.ipc.errors import BadModel, UnsupportedModel

pytestmark = pytest.mark.engine


def small() -> bytes:
    """A convolution, a reshape with a constant shape, an addition to itself."""
    model = Model("small")
    main = model.subgraph()
    x = main.input("x", "int8", (1, 4, 4, 2), quantisation=Quantisation((0.5,), 3))
    weights = main.constant(
        "w",
        np.arange(8, dtype=np.int8).reshape(4, 1, 1, 2),
        quantisation=Quantisation((0.1,) * 4),
    )
    bias = main.constant("b", np.arange(4, dtype=np.int32))
    middle = main.tensor("m", "int8", (1, 4, 4, 4), quantisation=Quantisation((0.25,), -1))
    flat = main.tensor("f", "int8", (1, 64), quantisation=Quantisation((0.25,), -1))
    options = schema.Conv2DOptionsT(padding=0, strideW=1, strideH=1)
    main.operator("CONV_2D", [x, weights, bias], [middle], options, version=3)
    shape = main.constant("s", np.asarray([1, 64], np.int32))
    main.operator("RESHAPE", [middle, shape], [main.output(flat)])
    return model.to_bytes()


SMALL = small()


def test_what_stands_in_a_file() -> None:
    graph = read_graph(SMALL)
    x, weights, bias, middle, _, shape = graph.tensors
    conv, reshape = graph.operators

    assert (graph.inputs, graph.outputs) == ((0,), (4,))
    assert (x.name, x.dtype, x.shape, x.data) == ("x", "int8", (1, 4, 4, 2), None)
    assert x.quantisation is not None
    assert (x.quantisation.scales, x.quantisation.zero_points) == ((0.5,), (3,))
    assert weights.quantisation is not None
    assert len(weights.quantisation.scales) == 4
    assert weights.data is not None
    assert weights.data.tolist() == list(range(8))
    assert bias.data is not None
    assert bias.data.dtype == np.int32
    assert middle.size == 64
    assert shape.data is not None
    assert (conv.name, conv.version, conv.inputs, conv.outputs) == (
        "CONV_2D",
        3,
        (0, 1, 2),
        (3,),
    )
    assert conv.options["strideW"] == 1
    assert reshape.options == {}


def test_constants_are_views_of_the_file() -> None:
    """They cost no memory of their own and cannot be written to."""
    data = generate.mobilenet_v1()
    graph = read_graph(memoryview(data))
    constants = [t.data for t in graph.tensors if t.data is not None]
    start = np.frombuffer(data, np.uint8).__array_interface__["data"][0]

    assert sum(c.nbytes for c in constants) > 16_000_000
    for value in constants:
        assert start <= value.__array_interface__["data"][0] < start + len(data)
        assert not value.flags.writeable


@pytest.mark.parametrize("data", [b"", b"TFL3", b"\0" * 64, b"\x10\0\0\0TFL3" + b"\xff" * 40])
def test_no_model(data: bytes) -> None:
    with pytest.raises(BadModel):
        read_graph(data)


def test_every_truncation_is_refused_or_read() -> None:
    for length in range(len(SMALL)):
        sound_or_refused(SMALL[:length])


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=6
    )
)
def test_flipped_bytes(changes: list[tuple[int, int]]) -> None:
    data = bytearray(SMALL)
    for place, value in changes:
        data[place] = value

    sound_or_refused(bytes(data))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, len(SMALL) // 4 - 1),
    st.sampled_from([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 20]),
)
def test_flipped_words(place: int, value: int) -> None:
    """Lengths and offsets: nothing is allocated or walked because a file says so."""
    data = bytearray(SMALL)
    struct.pack_into("<I", data, 4 * place, value)
    sound_or_refused(bytes(data))


def sound_or_refused(data: bytes) -> None:
    try:
        graph = read_graph(data)
    except (BadModel, UnsupportedModel):
        return

    assert_links(graph)


def assert_links(graph: Graph) -> None:
    known = set(graph.inputs) | {i for i, t in enumerate(graph.tensors) if t.data is not None}
    for operator in graph.operators:
        assert {i for i in operator.inputs if i >= 0} <= known
        assert not set(operator.outputs) & known
        known |= set(operator.outputs)

    assert set(graph.outputs) <= known


def test_an_operator_before_its_input_is_refused() -> None:
    model = Model("loop")
    main = model.subgraph()
    x = main.input("x", "float32", (2,))
    a, b = (main.tensor(name, "float32", (2,)) for name in "ab")
    main.operator("ADD", [x, b], [a], schema.AddOptionsT())
    main.operator("ADD", [x, a], [main.output(b)], schema.AddOptionsT())
    with pytest.raises(BadModel, match=r"reads tensor b before"):
        read_graph(model.to_bytes())


def test_a_tensor_that_is_written_twice_is_refused() -> None:
    model = Model("twice")
    main = model.subgraph()
    x = main.input("x", "float32", (2,))
    y = main.output(main.tensor("y", "float32", (2,)))
    main.operator("ABS", [x], [y])
    main.operator("NEG", [x], [y])
    with pytest.raises(BadModel, match=r"writes tensor"):
        read_graph(model.to_bytes())


def test_too_large_a_tensor_is_refused() -> None:
    model = Model("large")
    main = model.subgraph()
    x = main.input("x", "float32", (1 << 20, 1 << 12))
    main.operator("ABS", [x], [main.output(main.tensor("y", "float32", (1,)))])
    with pytest.raises(UnsupportedModel, match="bytes"):
        read_graph(model.to_bytes())


def test_other_shapes_are_refused() -> None:
    graph = read_graph(SMALL)

    assert with_shapes(graph, {0: (1, 4, 4, 2)}) is graph
    with pytest.raises(UnsupportedModel, match=r"\[1, 4, 4, 2\] in the file"):
        with_shapes(graph, {0: (1, 8, 8, 2)})


def test_a_sparse_matrix_becomes_dense() -> None:
    """Compressed rows."""
    rows = Level(size=3)
    columns = Level(
        segments=np.asarray([0, 2, 2, 3], np.int64), indices=np.asarray([0, 3, 1], np.int64)
    )
    layout = Sparsity((0, 1), (), (rows, columns))
    found = dense(layout, np.asarray([5, 6, 7], np.float32), (3, 4))

    assert found.reshape(3, 4).tolist() == [[5, 0, 0, 6], [0, 0, 0, 0], [0, 7, 0, 0]]


def test_a_sparse_matrix_of_blocks_becomes_dense() -> None:
    """Blocks of one row and two columns."""
    layout = Sparsity(
        (0, 1, 2),
        (1,),
        (
            Level(size=2),
            Level(
                segments=np.asarray([0, 1, 2], np.int64), indices=np.asarray([1, 0], np.int64)
            ),
            Level(size=2),
        ),
    )
    found = dense(layout, np.asarray([1, 2, 3, 4], np.int8), (2, 4))

    assert found.reshape(2, 4).tolist() == [[0, 0, 1, 2], [3, 4, 0, 0]]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-2, 6), max_size=5),
    st.lists(st.integers(-2, 6), max_size=5),
    st.integers(0, 5),
)
def test_any_sparse_layout_is_dense_or_refused(
    segments: list[int], indices: list[int], rows: int
) -> None:
    columns = Level(
        segments=np.asarray(segments, np.int64), indices=np.asarray(indices, np.int64)
    )
    layout = Sparsity((0, 1), (), (Level(size=rows), columns))
    try:
        found = dense(layout, np.arange(1, len(indices) + 1, dtype=np.int16), (3, 4))
    except BadModel:
        return

    assert found.size == 12
    assert set(found.tolist()) <= {0, *range(1, len(indices) + 1)}
