"""The known-answer check: its inputs and its reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from backend_helpers import custom, loaded
from hypothesis import given, settings
from hypothesis import strategies as st

from switchgear.backends import generate
from switchgear.backends.generate.graph import Model
from switchgear.backends.known_answer.check import compare, has_spread
from switchgear.backends.known_answer.inputs import COUNT, InputFacts, known_inputs, role_of
from switchgear.backends.known_answer.reference import (
    OutputFacts,
    Reference,
    compute_reference,
    run_once,
)
from switchgear.ipc.errors import UnsupportedModel

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.engine]

Array = np.ndarray[Any, Any]


# Inputs


@pytest.mark.parametrize(
    ("dtype", "shape", "scale", "limit", "role"),
    [
        ("float32", (1, 128, 128, 3), 0.0, 0, "image"),
        ("uint8", (1, 64, 48, 1), 0.0, 0, "image"),
        ("int8", (1, 224, 224, 3), 1 / 128, 0, "image"),
        ("float32", (1, 128, 128, 64), 0.0, 0, "features"),
        ("float32", (1, 16000), 0.0, 0, "signal"),
        ("int16", (16000,), 0.0, 0, "signal"),
        ("int8", (1, 3, 40), 0.1, 0, "features"),
        ("float32", (), 0.0, 0, "features"),
        ("int32", (1, 128), 0.0, 0, "index"),
        ("int32", (1, 300), 0.0, 900, "index"),
        ("bool", (4,), 0.0, 0, "flags"),
    ],
)
def test_roles(dtype: str, shape: tuple[int, ...], scale: float, limit: int, role: str) -> None:
    facts = InputFacts("x", dtype, shape, scale, 0, limit)
    assert role_of(facts) == role
    first, again = known_inputs([facts]), known_inputs([facts])
    assert len(first) == COUNT >= 8
    for (values,), (same,) in zip(first, again, strict=True):
        assert values.shape == shape
        assert values.dtype == dtype
        assert values.tobytes() == same.tobytes()

    # A single bit has two values, and no more.
    assert len({values.tobytes() for (values,) in first}) >= (2 if dtype == "bool" else 4)


def test_images_are_in_range_and_differ() -> None:
    runs = [row[0] for row in known_inputs([InputFacts("x", "float32", (2, 96, 64, 3))])]
    assert all(values.min() >= -1 and values.max() <= 1 for values in runs)
    assert sum(values.min() >= 0 for values in runs) == 4
    # Pictures, not noise: most neighbours are alike in most of them.
    steps = [float(np.abs(np.diff(values, axis=2)).mean()) for values in runs]
    assert sum(step < 0.1 for step in steps) >= 5
    assert {float(runs[4].min()), float(runs[4].max())} == {-1.0, 1.0}
    in_unit_range = known_inputs(
        [InputFacts("x", "float32", (2, 96, 64, 3))], images_in_unit_range=True
    )
    assert all(row[0].min() >= 0 and row[0].max() <= 1 for row in in_unit_range)


def test_quantised_inputs_fill_their_range() -> None:
    runs = known_inputs([InputFacts("x", "int8", (1, 32, 32, 3), 1 / 255, -128)])
    values = np.concatenate([row[0].ravel() for row in runs])
    assert (values.min(), values.max()) == (-128, 127)
    # The drawn face in [0, 1] begins at the integer that stands for zero.
    signed = known_inputs([InputFacts("x", "int8", (1, 32, 32, 3), 1 / 128, 0)])
    assert signed[1][0].min() >= 0
    assert signed[0][0].min() < -60


@settings(deadline=None, max_examples=50)
@given(
    limit=st.integers(1, 100_000),
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    dtype=st.sampled_from(["int32", "int64", "uint8", "int16"]),
)
def test_an_index_is_always_in_its_table(
    limit: int, shape: tuple[int, ...], dtype: str
) -> None:
    limit = min(limit, int(np.iinfo(dtype).max) + 1)
    for (values,) in known_inputs([InputFacts("x", dtype, shape, 0.0, 0, limit)]):
        assert values.shape == shape
        assert ((values >= 0) & (values.astype(np.int64) < limit)).all()


# The reference


def reference_of(folder: Path, model: bytes) -> Reference:
    path = folder / "model.tflite"
    path.write_bytes(model)
    return compute_reference(str(path), {})


def test_the_reference_of_exact_arithmetic(tmp_path: Path) -> None:
    reference = reference_of(tmp_path, generate.two_inputs(50))
    assert reference.kernels == "built-in"
    assert not reference.quantised
    for (a, b), (total, product) in zip(reference.inputs, reference.answers, strict=True):
        assert np.array_equal(total, a + b)
        assert np.array_equal(product, a * b)

    assert has_spread(reference)


def test_the_reference_of_a_lookup_uses_valid_rows(tmp_path: Path) -> None:
    reference = reference_of(tmp_path, generate.lookup(rows=16, width=4, count=5))
    table = generate.lookup_table(16, 4)
    for (index,), (rows,) in zip(reference.inputs, reference.answers, strict=True):
        assert np.array_equal(rows, table[index])

    indices = {int(i) for (index,) in reference.inputs for i in index}
    assert {0, 15} < indices <= set(range(16))


def test_indices_that_the_engine_refuses_are_replaced(tmp_path: Path) -> None:
    """Along the second axis only 4 are valid, of the 16 that the table's rows suggest."""
    model = Model("columns of a table")
    main = model.subgraph()
    index = main.input("index", "int32", [5])
    table = main.constant("table", generate.lookup_table(16, 4))
    column = main.output(main.tensor("column", "float32", [16, 5]))
    main.operator("GATHER", [table, index], [column], schema.GatherOptionsT(axis=1))
    reference = reference_of(tmp_path, model.to_bytes())
    assert has_spread(reference)
    assert {int(i) for (index,) in reference.inputs for i in index} == {0, 1}


def test_the_reference_of_an_int8_model_knows_its_step(tmp_path: Path) -> None:
    reference = reference_of(tmp_path, generate.mobilenet_v1(quantised=True))
    assert reference.quantised
    assert reference.outputs == (OutputFacts("logits", "int8", 1.0),)
    # The CPU's own two sets of kernels hold the check that both are measured by.
    assert reference.other_answers is not None
    report = compare(reference, reference.other_answers, "int8")
    assert report.ok, report.text


def test_the_steps_of_a_dequantised_output(tmp_path: Path) -> None:
    model = Model("dequantised")
    main = model.subgraph()
    quantisation = generate.graph.Quantisation((0.25,), 3)
    x = main.input("x", "int8", [1, 8], quantisation=quantisation)
    y = main.output(main.tensor("y", "float32", [1, 8]))
    main.operator("DEQUANTIZE", [x], [y], schema.DequantizeOptionsT())
    reference = reference_of(tmp_path, model.to_bytes())
    assert reference.outputs == (OutputFacts("y", "float32", 0.25),)
    results = [[answer[0] + np.float32(0.25)] for answer in reference.answers]
    assert compare(reference, results, "fp32").ok
    results = [[answer[0] + np.float32(0.26)] for answer in reference.answers]
    assert not compare(reference, results, "fp32").ok


def dynamic_range(weights: Array, scales: tuple[float, ...]) -> bytes:
    """`x` [1, n] -> `y` [1, m] = x w' of INT8 weights [m, n], a scale a row or one for all."""
    model = Model("dynamic range")
    main = model.subgraph()
    rows, columns = weights.shape
    x = main.input("x", "float32", [1, columns])
    w = main.constant("w", weights, quantisation=generate.graph.Quantisation(scales))
    y = main.output(main.tensor("y", "float32", [1, rows]))
    main.operator("FULLY_CONNECTED", [x, w], [y], schema.FullyConnectedOptionsT())
    return model.to_bytes()


@pytest.mark.parametrize("rows_with_scales", [1, 40])
def test_dynamic_range_weights_are_taken_as_floats(
    tmp_path: Path, rows_with_scales: int
) -> None:
    generator = np.random.default_rng(5)
    weights = generator.integers(-127, 128, (40, 64)).astype(np.int8)
    scales = tuple(float(s) for s in generator.uniform(0.001, 0.01, rows_with_scales))
    path = tmp_path / "model.tflite"
    path.write_bytes(dynamic_range(weights, scales))
    reference = compute_reference(str(path), {})
    assert reference.kernels == "built-in, weights as floats"
    assert not reference.quantised
    floats = weights * np.array(scales, np.float64)[:, None]
    for (x,), (y,) in zip(reference.inputs, reference.answers, strict=True):
        np.testing.assert_allclose(y, x @ floats.T, rtol=1e-5, atol=1e-5)

    # The engine's own way is about 1 % off: backends in floats must not be held to that.
    with loaded(path, tmp_path) as instance:
        rounded = [run_once(instance, values) for values in reference.inputs]

    report = compare(reference, rounded, "fp32")
    assert not report.ok
    assert 1e-3 < report.worst.error < 5e-2


def steep_below_zero() -> bytes:
    """An image `x` -> `y` = max(x, -100 x): a caricature of a model meant for [0, 1]."""
    model = Model("steep below zero")
    main = model.subgraph()
    shape = [1, 16, 16, 3]
    x = main.input("x", "float32", shape)
    factor = main.constant("factor", np.full(1, -100, np.float32))
    steep = main.tensor("steep", "float32", shape)
    y = main.output(main.tensor("y", "float32", shape))
    main.operator("MUL", [x, factor], [steep], schema.MulOptionsT())
    main.operator("MAXIMUM", [x, steep], [y], schema.MaximumMinimumOptionsT())
    return model.to_bytes()


def test_a_model_for_images_from_0_to_1_gets_such(tmp_path: Path) -> None:
    reference = reference_of(tmp_path, steep_below_zero())
    assert all(row[0].min() >= 0 for row in reference.inputs)
    assert max(answer[0].max() for answer in reference.answers) <= 1


def test_a_model_that_the_engine_lacks_operators_for(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="NoSuchOperator"):
        reference_of(tmp_path, custom("NoSuchOperator"))
