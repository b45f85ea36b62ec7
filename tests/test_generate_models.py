"""Each generated model, run by LiteRT, gives what numpy gives."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter

from switchgear.backends.generate import (
    IDENTITY_DTYPES,
    accumulator,
    dynamic_batch,
    identity,
    leading_values,
    lookup,
    lookup_table,
    multiply_adds,
    positive_positions,
    ramp,
    slow,
    slow_reference,
    two_inputs,
)
from switchgear.backends.generate.__main__ import MODELS
from switchgear.backends.generate.__main__ import main as generate_command

if TYPE_CHECKING:
    from pathlib import Path


def started(model: bytes) -> Any:
    interpreter = Interpreter(model_content=model, num_threads=1)
    interpreter.allocate_tensors()
    return interpreter


def run(model: bytes, **inputs: Any) -> dict[str, Any]:
    """One invocation through the signature, in an instance of its own."""
    result: dict[str, Any] = started(model).get_signature_runner()(**inputs)
    return result


def values_of(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The ends of the range, and other values that a conversion on the way would change."""
    count = int(np.prod(shape))

    if dtype == "bool":
        return np.asarray([i % 3 == 0 for i in range(count)]).reshape(shape)

    kind = np.dtype(dtype)

    if kind.kind == "c":
        return (np.arange(count) * (0.1 - 0.7j)).astype(kind).reshape(shape)

    if kind.kind == "f":
        limits = np.finfo(kind)
        ends = [limits.max, limits.min, limits.smallest_normal, -0.0]
        values = np.concatenate([ends, np.linspace(-1.1, 1.3, count - 4)])
        return values.astype(kind).reshape(shape)

    whole = np.iinfo(kind)
    return np.asarray(
        [whole.max - i if i % 2 else whole.min + i for i in range(count)], kind
    ).reshape(shape)


@pytest.mark.parametrize("dtype", IDENTITY_DTYPES)
def test_identity_returns_every_bit(dtype: str) -> None:
    x = values_of(dtype, (2, 3, 4))
    y = run(identity((2, 3, 4), dtype), x=x)["y"]

    assert y.dtype == x.dtype
    assert y.shape == x.shape
    assert y.tobytes() == x.tobytes()


def test_identity_of_a_large_tensor() -> None:
    x = np.arange(3 << 20, dtype=np.uint8).reshape(3, 1 << 20)

    assert np.array_equal(run(identity(x.shape, "uint8"), x=x)["y"], x)


def test_identity_without_signature_has_tensor_names_only() -> None:
    interpreter = started(identity((2,), signature=False))
    (given,), (taken,) = interpreter.get_input_details(), interpreter.get_output_details()

    assert interpreter.get_signature_list() == {}
    assert given["name"] == "serving_default_x:0"
    assert taken["name"] == "PartitionedCall:0"

    interpreter.set_tensor(given["index"], np.asarray([1.5, -2.5], np.float32))
    interpreter.invoke()

    assert interpreter.get_tensor(taken["index"]).tolist() == [1.5, -2.5]


def test_leading_values_takes_16_mib_and_gives_16_bytes() -> None:
    x = np.arange(1, (4 << 20) + 1, dtype=np.float32)

    assert run(leading_values(x.size), x=x)["head"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("count", [0, 9, -1])
def test_leading_values_refuses_more_than_there_is(count: int) -> None:
    with pytest.raises(ValueError, match="between 1 and size"):
        leading_values(8, count)


def test_two_inputs_are_added_and_multiplied() -> None:
    a = np.asarray([1, -2, 3.5], np.float32)
    b = np.asarray([4, 5, -6], np.float32)
    result = run(two_inputs(3), a=a, b=b)

    assert set(result) == {"sum", "product"}
    assert np.array_equal(result["sum"], a + b)
    assert np.array_equal(result["product"], a * b)


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_dynamic_batch_takes_any_number_of_rows(batch: int) -> None:
    interpreter = started(dynamic_batch(5))
    (given,), (taken,) = interpreter.get_input_details(), interpreter.get_output_details()
    x = np.linspace(-3, 3, batch * 5, dtype=np.float32).reshape(batch, 5)

    assert given["shape_signature"].tolist() == [-1, 5]
    assert taken["shape_signature"].tolist() == [-1, 5]
    assert given["shape"].tolist() == [1, 5]

    interpreter.resize_tensor_input(given["index"], x.shape, strict=True)
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], x)
    interpreter.invoke()

    expected = x * np.arange(1, 6, dtype=np.float32) + 1
    np.testing.assert_allclose(interpreter.get_tensor(taken["index"]), expected, rtol=1e-6)


def test_dynamic_batch_fixes_its_second_dimension() -> None:
    interpreter = started(dynamic_batch(5))

    with pytest.raises(RuntimeError, match="dimension 1"):
        interpreter.resize_tensor_input(
            interpreter.get_input_details()[0]["index"], [1, 6], strict=True
        )


def test_accumulator_sums_what_one_instance_was_given() -> None:
    random = np.random.RandomState(1)
    runner = started(accumulator(3)).get_signature_runner()
    expected = np.zeros(3, np.float32)

    for _ in range(20):
        x = random.uniform(-1, 1, 3).astype(np.float32)
        expected = expected + x

        assert np.array_equal(runner(x=x)["total"], expected)


def test_only_a_new_instance_clears_the_accumulator() -> None:
    model = accumulator(1)
    interpreter = started(model)
    one = np.ones(1, np.float32)
    given = interpreter.get_input_details()[0]["index"]
    taken = interpreter.get_output_details()[0]["index"]

    def add_one() -> float:
        interpreter.set_tensor(given, one)
        interpreter.invoke()
        return float(interpreter.get_tensor(taken)[0])

    assert add_one() == 1
    interpreter.reset_all_variables()
    assert add_one() == 2
    interpreter.allocate_tensors()
    assert add_one() == 3

    assert run(model, x=one)["total"].tolist() == [1]
    assert add_one() == 4


@pytest.mark.parametrize(
    "x",
    [[1, -1, 0, 2, -3, 5], [1] * 6, [np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-30]],
    ids=["some", "all", "special"],
)
def test_positive_positions_have_as_many_rows_as_there_are(x: list[float]) -> None:
    values = np.asarray(x, np.float32)
    positions = run(positive_positions(6), x=values)["positions"]

    assert positions.dtype == np.int64
    assert np.array_equal(positions, np.argwhere(values > 0))


def test_no_positive_position_is_an_output_without_elements() -> None:
    # LiteRT gives no array for such a tensor ("Invalid tensor size."), only its shape.
    interpreter = started(positive_positions(6))
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], np.zeros(6, np.float32))
    interpreter.invoke()

    assert interpreter.get_output_details()[0]["shape"].tolist() == [0, 1]


def test_ramp_grows_and_shrinks_from_call_to_call() -> None:
    runner = started(ramp()).get_signature_runner()

    for limit in (3, 100_000, 1, 7):
        assert np.array_equal(runner(limit=np.int32(limit))["values"], np.arange(limit))


def test_lookup_gives_the_rows_of_the_table() -> None:
    index = np.asarray([7, 0, 7], np.int32)
    row = run(lookup(rows=8, width=3, count=3), index=index)["row"]

    assert np.array_equal(row, lookup_table(8, 3)[index])
    assert len(np.unique(lookup_table(8, 3))) == 24


@pytest.mark.parametrize("index", [8, -1, 2**31 - 1])
def test_lookup_fails_on_an_index_outside(index: int) -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        run(lookup(rows=8), index=np.asarray([index], np.int32))


@pytest.mark.parametrize("ms_hint", [0.02, 1, 4.4])
def test_slow_computes_its_permutation_exactly(ms_hint: float) -> None:
    x = np.random.RandomState(2).uniform(-9, 9, (1, 1, 1, 128)).astype(np.float32)
    y = run(slow(ms_hint), x=x)["y"]

    assert np.array_equal(y, slow_reference(x, ms_hint))
    assert not np.array_equal(y, x)


def test_slow_has_work_in_proportion_and_a_small_file() -> None:
    work = {ms_hint: multiply_adds(slow(ms_hint)) for ms_hint in (1, 10, 100, 1000)}

    for ms_hint, count in work.items():
        assert count / ms_hint == pytest.approx(work[1], rel=0.05)

    assert len(slow(1000)) < 200_000


@pytest.mark.parametrize("ms_hint", [0, -1, 60_001, float("nan")])
def test_slow_refuses_a_time_that_is_none(ms_hint: float) -> None:
    with pytest.raises(ValueError, match="ms_hint"):
        slow(ms_hint)


def test_models_are_written_without_an_engine() -> None:
    script = (
        "import sys; from switchgear.backends import generate; generate.identity();"
        "print([name for name in sys.modules if name.endswith('.interpreter')"
        " or '_pywrap' in name])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert result.stdout.strip() == "[]"


def test_the_command_writes_what_the_functions_return(tmp_path: Path) -> None:
    assert generate_command(["--", str(tmp_path / "models"), "ramp", "lookup"]) == 0
    assert {path.name for path in (tmp_path / "models").iterdir()} == {
        "ramp.tflite",
        "lookup.tflite",
    }
    assert (tmp_path / "models" / "ramp.tflite").read_bytes() == ramp()


def test_the_command_refuses_a_name_it_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        generate_command([str(tmp_path), "ramp", "no_such_model"])

    assert caught.value.code == 2
    assert "no_such_model" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_the_command_loads(name: str) -> None:
    assert started(MODELS[name]()).get_output_details()
