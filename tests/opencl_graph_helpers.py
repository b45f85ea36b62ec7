"""Models of one operator, the engine's own answer to them, and ours.

The engine runs its reference kernels, without XNNPACK. Ours runs on tinygrad's PYTHON device,
which needs no driver and no compiler: what is compared is the importer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from tinygrad import Context

from switchgear.backends.generate.graph import Model, Quantisation
from switchgear.backends.opencl.graph import read_graph
from switchgear.backends.opencl.importer import build
from switchgear.backends.opencl.rules import on_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

DEVICE = "PYTHON"
# Unrolled kernels take long to compile and gain nothing on a few elements. Processes that
# compile, a file of compiled kernels, and a search for devices would outlive the test.
QUICK = {"DEV": DEVICE, "NOOPT": 1, "PARALLEL": 0, "CACHELEVEL": 0}
_KERNELS = {
    "reference": OpResolverType.BUILTIN_REF,
    "optimised": OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    "xnnpack": OpResolverType.AUTO,
}


@dataclass(frozen=True)
class Given:
    """An input of the operator: one of the model, or a constant in the file."""

    value: NDArray[Any]
    quantisation: Quantisation | None = None
    constant: bool = False


def constant(value: Any, quantisation: Quantisation | None = None) -> Given:
    """A constant; whole numbers without a dtype become int32."""
    array = np.asarray(value)
    if array.dtype == np.int64 and not isinstance(value, np.ndarray):
        array = array.astype(np.int32)

    return Given(array, quantisation, constant=True)


@dataclass(frozen=True)
class Wanted:
    """An output of the operator."""

    dtype: str = "float32"
    quantisation: Quantisation | None = None


FLOAT = (Wanted(),)


def model_of(
    name: str,
    given: Sequence[Given | None],
    wanted: Sequence[Wanted],
    shapes: Sequence[tuple[int, ...]],
    options: Any = None,
    *,
    version: int = 1,
    custom: bytes | None = None,
) -> bytes:
    """A file with one operator; `shapes` are those of its results."""
    model = Model(f"one {name}")
    main = model.subgraph()
    inputs = []
    for position, one in enumerate(given):
        if one is None:
            inputs.append(-1)
        elif one.constant:
            inputs.append(
                main.constant(f"c{position}", one.value, quantisation=one.quantisation)
            )
        else:
            inputs.append(
                main.input(
                    f"x{position}",
                    one.value.dtype.name,
                    one.value.shape,
                    quantisation=one.quantisation,
                )
            )

    outputs = [
        main.tensor(f"y{i}", one.dtype, shape, quantisation=one.quantisation)
        for i, (one, shape) in enumerate(zip(wanted, shapes, strict=True))
    ]
    main.operator(name.partition(":")[0], inputs, outputs, options, version=version)
    for output in outputs:
        main.output(output)

    if custom is not None:
        main.packed.operators[-1].customOptions = list(custom)

    data = model.to_bytes()
    return _named(data, name.partition(":")[2]) if custom is not None else data


def _named(data: bytes, name: str) -> bytes:
    """The same file with its custom operator named; the writer does not know such names."""
    import flatbuffers

    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(data, 0))
    model.operatorCodes[0].customCode = name
    builder = flatbuffers.Builder(len(data))
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def engine(
    data: bytes, values: Sequence[NDArray[Any]], kernels: str = "reference"
) -> list[NDArray[Any]]:
    """The engine's answer: by its `reference` kernels, its `optimised` ones, or `xnnpack`."""
    interpreter = _interpreter(data, kernels)
    interpreter.allocate_tensors()
    for detail, value in zip(interpreter.get_input_details(), values, strict=True):
        interpreter.set_tensor(detail["index"], value)

    interpreter.invoke()
    return [interpreter.get_tensor(d["index"]) for d in interpreter.get_output_details()]


def _interpreter(data: bytes, kernels: str) -> Interpreter:
    try:
        return Interpreter(model_content=data, experimental_op_resolver_type=_KERNELS[kernels])
    except ValueError:
        # A few operators have one kernel only, which stands among the optimised ones.
        return Interpreter(
            model_content=data, experimental_op_resolver_type=_KERNELS["optimised"]
        )


def ours(data: bytes, values: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """What our program of the same file answers."""
    with Context(**QUICK):
        program = build(read_graph(data), device=DEVICE)
        given = [on_device(np.asarray(value), DEVICE) for value in values]
        return [np.asarray(output.numpy()) for output in program(*given)]


def compare(
    name: str,
    given: Sequence[Given | None],
    wanted: Sequence[Wanted] = FLOAT,
    options: Any = None,
    *,
    version: int = 1,
    tolerance: float = 1e-5,
    steps: int = 0,
    spread: bool = True,
    kernels: str = "reference",
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> list[NDArray[Any]]:
    """Holds our answer against the engine's, in shape, dtype and value, and returns it.

    `tolerance` is for floats, relative to the largest value or to 1; whole numbers may differ
    by `steps`. `spread`: the engine's answer has to vary, so that a wrong one can be told.
    `shapes` are those of the results where the engine wants to know them beforehand.
    """
    values = [one.value for one in given if one is not None and not one.constant]
    if shapes is None:
        shapes = result_shapes(name, given, wanted, options, version)

    data = model_of(name, given, wanted, shapes, options, version=version)
    expected = engine(data, values, kernels)
    found = ours(data, values)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        if spread:
            assert theirs.size == 1 or np.unique(theirs).size > 1

        if mine.dtype.kind == "f":
            bound = tolerance * max(1.0, float(np.abs(theirs).max()))
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=bound)
        else:
            distance = np.abs(mine.astype(np.int64) - theirs.astype(np.int64))
            assert distance.max() <= steps, (distance.max(), np.mean(distance > 0))

    return found


def result_shapes(
    name: str,
    given: Sequence[Given | None],
    wanted: Sequence[Wanted],
    options: Any,
    version: int,
) -> list[tuple[int, ...]]:
    """The shapes that the engine computes, which a converter would write into the file."""
    data = model_of(name, given, wanted, [(1,)] * len(wanted), options, version=version)
    values = [one.value for one in given if one is not None and not one.constant]
    return [value.shape for value in engine(data, values)]


def image(*shape: int, seed: int = 5) -> NDArray[np.float32]:
    """Waves with some noise on them, in about [-1, 1]: neighbours are alike, as in a photo."""
    random = np.random.RandomState(seed)
    places = sum(
        np.arange(size).reshape([-1 if i == axis else 1 for i in range(len(shape))]) * step
        for axis, (size, step) in enumerate(zip(shape, (0.9, 0.7, 0.4, 1.3, 0.3), strict=False))
    )
    return np.asarray(0.8 * np.sin(places) + random.uniform(-0.2, 0.2, shape), np.float32)


def stored(
    value: NDArray[np.float32], scale: float, zero_point: int = 0, dtype: str = "int8"
) -> Given:
    """Real values quantised with one scale."""
    limits = np.iinfo(dtype)
    whole = np.clip(np.rint(value / scale) + zero_point, limits.min, limits.max)
    return Given(whole.astype(dtype), Quantisation((scale,), zero_point))


def stored_weights(value: NDArray[np.float32], axis: int) -> Given:
    """Weights as int8 with a scale for each element of an axis."""
    others = tuple(i for i in range(value.ndim) if i != axis)
    scales = np.abs(value).max(axis=others, keepdims=True) / np.float32(127)
    return Given(
        np.rint(value / scales).astype(np.int8),
        Quantisation(tuple(float(s) for s in scales.reshape(-1)), 0, axis),
        constant=True,
    )


def stored_bias(value: NDArray[np.float32], source: Given, weights: Given) -> Given:
    """A bias as int32, on the product of both scales."""
    assert source.quantisation is not None
    assert weights.quantisation is not None
    scales = np.asarray(weights.quantisation.scales) * source.quantisation.scales[0]
    return Given(
        np.rint(value / scales).astype(np.int32),
        Quantisation(tuple(float(s) for s in scales)),
        constant=True,
    )
