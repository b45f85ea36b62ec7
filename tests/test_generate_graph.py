"""The file that is written: its layout, its determinism, and the cost that is read from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter

from switchgear.backends.generate import (
    accumulator,
    identity,
    lookup,
    mobilenet_v1,
    multiply_adds,
    slow,
    two_inputs,
)
from switchgear.backends.generate.graph import Model, Quantisation


def invoked(model: bytes, *inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Output of one invocation, inputs in the order of the file."""
    interpreter = Interpreter(model_content=model, num_threads=1)
    interpreter.allocate_tensors()

    for given, value in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.set_tensor(given["index"], value)

    interpreter.invoke()
    output: np.ndarray[Any, Any] = interpreter.get_tensor(
        interpreter.get_output_details()[0]["index"]
    )
    return output


@pytest.mark.parametrize("model", [identity, two_inputs, accumulator, lookup, mobilenet_v1])
def test_the_same_call_gives_the_same_bytes(model: Any) -> None:
    assert model() == model()


def test_constants_begin_at_multiples_of_16() -> None:
    model = Model("three odd sizes")
    main = model.subgraph()
    contents = [np.arange(size, dtype=np.uint8) + 100 for size in (1, 13, 31)]

    for number, content in enumerate(contents):
        main.output(main.constant(f"constant_{number}", content))

    written = model.to_bytes()

    for content in contents[1:]:
        assert written.index(content.tobytes()) % 16 == 0


def test_operator_codes_stand_once_each_and_in_both_fields() -> None:
    parsed = schema.Model.GetRootAs(accumulator())
    codes = [parsed.OperatorCodes(index) for index in range(parsed.OperatorCodesLength())]
    builtin = [code.BuiltinCode() for code in codes]

    assert len(builtin) == len(set(builtin)) == 5
    assert [code.DeprecatedBuiltinCode() for code in codes] == [
        min(code, 127) for code in builtin
    ]
    assert max(builtin) > 127


def test_an_unknown_operator_or_dtype_is_refused() -> None:
    main = Model("nothing").subgraph()

    with pytest.raises(AttributeError, match="NO_SUCH_OPERATOR"):
        main.operator("NO_SUCH_OPERATOR", [], [])

    with pytest.raises(KeyError, match="float23"):
        main.tensor("x", "float23", [1])


def test_quantisation_reaches_the_engine() -> None:
    model = Model("dequantise")
    main = model.subgraph()
    x = main.input("x", "int8", [3], quantisation=Quantisation((0.5,), -2))
    y = main.output(main.tensor("y", "float32", [3]))
    main.operator("DEQUANTIZE", [x], [y], schema.DequantizeOptionsT())

    output = invoked(model.to_bytes(), np.asarray([-2, 0, 7], np.int8))

    assert output.tolist() == [0.0, 1.0, 4.5]


def test_fully_connected_is_counted() -> None:
    random = np.random.RandomState(3)
    weights = random.uniform(-1, 1, (5, 7)).astype(np.float32)
    model = Model("product")
    main = model.subgraph()
    x = main.input("x", "float32", [3, 7])
    y = main.output(main.tensor("y", "float32", [3, 5]))
    main.operator(
        "FULLY_CONNECTED",
        [x, main.constant("weights", weights)],
        [y],
        schema.FullyConnectedOptionsT(),
    )
    values = random.uniform(-1, 1, (3, 7)).astype(np.float32)
    written = model.to_bytes()

    np.testing.assert_allclose(invoked(written, values), values @ weights.T, atol=1e-5)
    assert multiply_adds(written) == 3 * 5 * 7


@pytest.mark.parametrize("transposed", [False, True])
def test_batch_matmul_is_counted(transposed: bool) -> None:
    random = np.random.RandomState(4)
    left = random.uniform(-1, 1, (2, 7, 3) if transposed else (2, 3, 7)).astype(np.float32)
    right = random.uniform(-1, 1, (2, 7, 5)).astype(np.float32)
    model = Model("products")
    main = model.subgraph()
    a = main.input("a", "float32", left.shape)
    b = main.input("b", "float32", right.shape)
    y = main.output(main.tensor("y", "float32", [2, 3, 5]))
    main.operator("BATCH_MATMUL", [a, b], [y], schema.BatchMatMulOptionsT(adjX=transposed))
    written = model.to_bytes()
    expected = (left.transpose(0, 2, 1) if transposed else left) @ right

    np.testing.assert_allclose(invoked(written, left, right), expected, atol=1e-5)
    assert multiply_adds(written) == 2 * 3 * 5 * 7


def test_transposed_convolution_is_counted() -> None:
    # With a stride of the filter's size no two products meet: each pixel becomes a tile.
    random = np.random.RandomState(5)
    image = random.uniform(-1, 1, (1, 3, 4, 2)).astype(np.float32)
    weights = random.uniform(-1, 1, (5, 2, 2, 2)).astype(np.float32)
    model = Model("tiles")
    main = model.subgraph()
    x = main.input("x", "float32", image.shape)
    shape = main.constant("shape", np.asarray([1, 6, 8, 5], np.int32))
    y = main.output(main.tensor("y", "float32", [1, 6, 8, 5]))
    main.operator(
        "TRANSPOSE_CONV",
        [shape, main.constant("weights", weights), x],
        [y],
        schema.TransposeConvOptionsT(padding=schema.Padding.VALID, strideW=2, strideH=2),
    )
    written = model.to_bytes()
    tiles = np.einsum("nhwc,oijc->nhiwjo", image, weights).reshape(1, 6, 8, 5)

    np.testing.assert_allclose(invoked(written, image), tiles, atol=1e-5)
    assert multiply_adds(written) == 3 * 4 * 2 * 2 * 2 * 5


def test_copies_and_additions_cost_no_multiply_adds() -> None:
    assert multiply_adds(identity()) == multiply_adds(accumulator()) == 0


@pytest.mark.parametrize("content", [b"", b"TFL3", b"A text, and no model at all.", bytes(64)])
def test_cost_of_something_else_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="TFL3"):
        multiply_adds(content)


def test_cost_of_a_damaged_file_is_a_number_or_refused() -> None:
    whole = slow(1)
    random = np.random.RandomState(6)
    refused = 0

    for round_number in range(300):
        damaged = bytearray(whole)

        if round_number % 2:
            del damaged[random.randint(8, len(damaged)) :]
        else:
            # The tables stand in front of the constants or behind them: at both ends.
            for end in (random.randint(8, 4000), -random.randint(1, 4000)):
                damaged[end] ^= 1 << random.randint(8)

        try:
            assert isinstance(multiply_adds(bytes(damaged)), int)
        except ValueError:
            refused += 1

    assert refused > 50
