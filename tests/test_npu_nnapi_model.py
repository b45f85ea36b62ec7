"""Each operator that NNAPI gets, in floats and quantised, against the CPU."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from isolated_backend import inputs_of, outputs_of
from npu_helpers import loaded, on_nnapi, worst, written

from switchgear.backends.contract import LoadRequest
from switchgear.backends.cpu import CpuBackend
from switchgear.backends.generate.graph import Model, Quantisation
from switchgear.ipc.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from switchgear.backends.contract import Instance
    from switchgear.backends.generate.graph import Subgraph

pytestmark = pytest.mark.engine
RELU6 = schema.ActivationFunctionType.RELU6
SAME, VALID = schema.Padding.SAME, schema.Padding.VALID
IMAGE = [1, 6, 5, 4]
# Floats: of the reference's largest value. Quantised: steps, as both round.
TOLERANCE = {"float32": 1e-5, "int8": 1, "uint8": 1}


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """A caught error's traceback holds the graph, and that the mapped file."""
    yield
    gc.collect()


class Builder:
    """A model of one operator whose tensors have scales where the type asks for them."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.model = Model("one operator")
        self.main: Subgraph = self.model.subgraph()
        self.random = np.random.RandomState(3)
        self._inputs: dict[str, int] = {}

    def steps(self, scale: float, zero_point: int = 0) -> Quantisation | None:
        return None if self.dtype == "float32" else Quantisation((scale,), zero_point)

    def input(self, shape: Sequence[int], scale: float = 0.02) -> int:
        name = f"x{len(self._inputs)}"
        zero_point = {"int8": -3, "uint8": 120}.get(self.dtype, 0)
        quantisation = self.steps(scale, zero_point)
        index = self.main.input(name, self.dtype, shape, quantisation=quantisation)
        self._inputs[name] = index
        return index

    def weights(self, shape: Sequence[int], *, axis: int | None = None) -> int:
        if self.dtype == "float32":
            values = self.random.uniform(-1, 1, shape).astype(np.float32)
            return self.main.constant("weights", values)

        low, high = (-127, 128) if self.dtype == "int8" else (0, 256)
        values = self.random.randint(low, high, shape).astype(self.dtype)
        if axis is None:
            zero_point = 0 if self.dtype == "int8" else 128
            quantisation = Quantisation((0.01,), zero_point)
        else:
            quantisation = Quantisation(
                tuple(0.005 + 0.001 * i for i in range(shape[axis])), 0, axis
            )

        return self.main.constant("weights", values, quantisation=quantisation)

    def bias(self, size: int, *, per_channel: bool = False) -> int:
        if self.dtype == "float32":
            values = self.random.uniform(-1, 1, size).astype(np.float32)
            return self.main.constant("bias", values)

        scales = (
            tuple(0.02 * (0.005 + 0.001 * i) for i in range(size)) if per_channel else (0.0002,)
        )
        values = self.random.randint(-2000, 2000, size).astype(np.int32)
        return self.main.constant("bias", values, quantisation=Quantisation(scales))

    def integers(self, values: Any) -> int:
        return self.main.constant("integers", np.asarray(values, np.int32))

    def finished(
        self,
        name: str,
        inputs: Sequence[int],
        shape: Sequence[int],
        options: Any = None,
        scale: float = 0.05,
        zero_point: int | None = None,
    ) -> bytes:
        if zero_point is None:
            zero_point = 128 if self.dtype == "uint8" else 0

        quantisation = self.steps(scale, zero_point)
        y = self.main.tensor("y", self.dtype, shape, quantisation=quantisation)
        self.main.output(y)
        newer = self.dtype != "float32" and name not in ("RESHAPE", "SQUEEZE")
        version = 2 if newer else 1
        self.main.operator(name, inputs, [y], options, version=version)
        self.model.signature(self._inputs, {"y": y})
        return self.model.to_bytes()


def steps_apart(instance: Instance, path: str, seed: int) -> float:
    """The largest difference from the CPU in steps of the outputs' scales."""
    reference = CpuBackend({}).load(LoadRequest(path))
    values = inputs_of(instance.info, seed)
    found, wanted = outputs_of(instance, values), outputs_of(reference, values)
    reference.close()
    # Else any constant would be near enough.
    assert all(np.ptp(each.astype(int)) > 8 for each in wanted.values())
    return max(
        float(np.abs(found[name].astype(int) - wanted[name].astype(int)).max())
        for name in wanted
    )


def convolution(
    dtype: str, *, stride: int = 1, dilation: int = 1, channels: bool = False
) -> bytes:
    build = Builder(dtype)
    x = build.input(IMAGE)
    weights = build.weights([7, 3, 3, 4], axis=0 if channels else None)
    options = schema.Conv2DOptionsT(
        padding=SAME,
        strideW=stride,
        strideH=stride,
        dilationWFactor=dilation,
        dilationHFactor=dilation,
        fusedActivationFunction=RELU6,
    )
    shape = [1, -(-6 // stride), -(-5 // stride), 7]
    bias = build.bias(7, per_channel=channels)
    return build.finished("CONV_2D", [x, weights, bias], shape, options)


def depthwise(dtype: str, *, multiplier: int = 1, channels: bool = False) -> bytes:
    build = Builder(dtype)
    x = build.input(IMAGE)
    outs = 4 * multiplier
    weights = build.weights([1, 3, 2, outs], axis=3 if channels else None)
    options = schema.DepthwiseConv2DOptionsT(
        padding=VALID, strideW=1, strideH=2, depthMultiplier=multiplier
    )
    bias = build.bias(outs, per_channel=channels)
    return build.finished("DEPTHWISE_CONV_2D", [x, weights, bias], [1, 2, 4, outs], options)


def fully_connected(dtype: str, *, bias: bool = True) -> bytes:
    build = Builder(dtype)
    x = build.input([2, 12])
    inputs = [x, build.weights([5, 12]), build.bias(5) if bias else -1]
    return build.finished("FULLY_CONNECTED", inputs, [2, 5], schema.FullyConnectedOptionsT())


def pool(dtype: str, name: str) -> bytes:
    build = Builder(dtype)
    x = build.input(IMAGE)
    options = schema.Pool2DOptionsT(
        padding=SAME, strideW=2, strideH=1, filterWidth=3, filterHeight=2
    )
    zero_point = {"int8": -3, "uint8": 120}.get(dtype, 0)
    return build.finished(name, [x], [1, 6, 3, 4], options, 0.02, zero_point)


def binary(dtype: str, name: str, other: Sequence[int], options: Any) -> bytes:
    build = Builder(dtype)
    x = build.input(IMAGE)
    return build.finished(name, [x, build.input(other, 0.03)], IMAGE, options)


def unary(dtype: str, name: str, options: Any = None) -> bytes:
    build = Builder(dtype)
    x = build.input(IMAGE)
    if name in ("LOGISTIC", "SOFTMAX"):
        # The scale that both engines fix for shares of one.
        zero_point = -128 if dtype == "int8" else 0
        return build.finished(name, [x], IMAGE, options, 1 / 256, zero_point)

    if name == "TANH":
        return build.finished(name, [x], IMAGE, options, 1 / 128)

    zero_point = {"int8": -3, "uint8": 120}.get(dtype, 0)
    return build.finished(name, [x], IMAGE, options, 0.02, zero_point)


def with_integers(
    dtype: str, name: str, values: Any, shape: Sequence[int], options: Any = None
) -> bytes:
    build = Builder(dtype)
    x = build.input(IMAGE)
    zero_point = {"int8": -3, "uint8": 120}.get(dtype, 0)
    inputs = [x, build.integers(values)]
    return build.finished(name, inputs, shape, options, 0.02, zero_point)


def concatenation(dtype: str) -> bytes:
    build = Builder(dtype)
    inputs = [build.input(IMAGE), build.input([1, 6, 5, 3])]
    zero_point = {"int8": -3, "uint8": 120}.get(dtype, 0)
    options = schema.ConcatenationOptionsT(axis=-1)
    return build.finished("CONCATENATION", inputs, [1, 6, 5, 7], options, 0.02, zero_point)


def squeeze(dtype: str) -> bytes:
    build = Builder(dtype)
    x = build.input([1, 4, 1, 5])
    zero_point = {"int8": -3, "uint8": 120}.get(dtype, 0)
    options = schema.SqueezeOptionsT(squeezeDims=[0, -2])
    return build.finished("SQUEEZE", [x], [4, 5], options, 0.02, zero_point)


def resize(dtype: str, *, corners: bool = False, half: bool = False) -> bytes:
    options = schema.ResizeBilinearOptionsT(alignCorners=corners, halfPixelCenters=half)
    return with_integers(dtype, "RESIZE_BILINEAR", [9, 8], [1, 9, 8, 4], options)


ALL = ("float32", "int8", "uint8")
CASES = {
    **{f"conv {d}": convolution(d) for d in ALL},
    **{f"conv stride {d}": convolution(d, stride=2) for d in ALL},
    "conv dilated": convolution("float32", dilation=2),
    "conv per channel": convolution("int8", channels=True),
    **{f"depthwise {d}": depthwise(d) for d in ALL},
    "depthwise multiplier": depthwise("float32", multiplier=3),
    "depthwise per channel": depthwise("int8", channels=True),
    **{f"fully connected {d}": fully_connected(d) for d in ALL},
    "fully connected without bias": fully_connected("float32", bias=False),
    "fully connected int8 without bias": fully_connected("int8", bias=False),
    **{f"average {d}": pool(d, "AVERAGE_POOL_2D") for d in ALL},
    **{f"max {d}": pool(d, "MAX_POOL_2D") for d in ALL},
    **{
        f"{name} {d}": binary(d, name, other, options(fusedActivationFunction=activation))
        for d in ALL
        for name, other, options, activation in (
            ("ADD", IMAGE, schema.AddOptionsT, 0),
            ("SUB", [1, 1, 1, 4], schema.SubOptionsT, 0),
            ("MUL", [1, 1, 1, 4], schema.MulOptionsT, RELU6),
        )
    },
    "DIV": binary("float32", "DIV", IMAGE, schema.DivOptionsT()),
    "MAXIMUM": binary("float32", "MAXIMUM", IMAGE, schema.MaximumMinimumOptionsT()),
    "MINIMUM": binary("float32", "MINIMUM", [1, 1, 1, 1], schema.MaximumMinimumOptionsT()),
    **{f"LOGISTIC {d}": unary(d, "LOGISTIC") for d in ALL},
    **{f"TANH {d}": unary(d, "TANH") for d in ALL},
    **{f"RELU {d}": unary(d, "RELU") for d in ALL},
    "RELU6": unary("float32", "RELU6"),
    "RELU_N1_TO_1": unary("float32", "RELU_N1_TO_1"),
    "HARD_SWISH": unary("float32", "HARD_SWISH", schema.HardSwishOptionsT()),
    **{f"SOFTMAX {d}": unary(d, "SOFTMAX", schema.SoftmaxOptionsT(beta=1.0)) for d in ALL},
    "SOFTMAX beta": unary("float32", "SOFTMAX", schema.SoftmaxOptionsT(beta=2.5)),
    **{
        f"RESHAPE {d}": with_integers(
            d, "RESHAPE", [6, 20], [6, 20], schema.ReshapeOptionsT(newShape=[6, 20])
        )
        for d in ALL
    },
    **{
        f"PAD {d}": with_integers(
            d, "PAD", [[0, 0], [1, 2], [0, 3], [0, 0]], [1, 9, 8, 4], schema.PadOptionsT()
        )
        for d in ALL
    },
    "MEAN": with_integers(
        "float32", "MEAN", [1, 2], [1, 4], schema.ReducerOptionsT(keepDims=False)
    ),
    "MEAN kept": with_integers(
        "float32", "MEAN", [-3, 2], [1, 1, 1, 4], schema.ReducerOptionsT(keepDims=True)
    ),
    "TRANSPOSE": with_integers(
        "float32", "TRANSPOSE", [0, 3, 1, 2], [1, 4, 6, 5], schema.TransposeOptionsT()
    ),
    **{f"CONCATENATION {d}": concatenation(d) for d in ALL},
    **{f"SQUEEZE {d}": squeeze(d) for d in ALL},
    **{f"RESIZE {d}": resize(d) for d in ALL},
    "RESIZE corners": resize("float32", corners=True),
    "RESIZE half": resize("float32", half=True),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_has_the_numbers_of_the_cpu(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, CASES[name])
    with loaded(on_nnapi(), path, "fp32") as instance:
        dtype = instance.info.inputs[0].dtype
        assert instance.coverage.nodes == instance.coverage.nodes_total == 1
        assert instance.precision == ("fp32" if dtype == "float32" else "int8")
        compare = worst if dtype == "float32" else steps_apart
        assert max(compare(instance, path, seed) for seed in (1, 2)) <= TOLERANCE[dtype]


def test_half_float_weights_are_widened(tmp_path: Path) -> None:
    build = Builder("float32")
    main = build.main
    x = build.input(IMAGE)
    wide = []
    for name, shape in (("weights", [7, 1, 1, 4]), ("bias", [7])):
        half = main.constant(name, build.random.uniform(-1, 1, shape).astype(np.float16))
        wide.append(main.tensor(f"{name} wide", "float32", shape))
        main.operator("DEQUANTIZE", [half], [wide[-1]], schema.DequantizeOptionsT(), version=3)

    options = schema.Conv2DOptionsT(padding=VALID, strideW=1, strideH=1)
    path = written(tmp_path, build.finished("CONV_2D", [x, *wide], [1, 6, 5, 7], options))
    with loaded(on_nnapi(), path, "fp32") as instance:
        # What is done at load is not left to the CPU.
        assert instance.coverage.nodes == instance.coverage.nodes_total == 3
        assert worst(instance, path) < 1e-5


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (unary("float32", "L2_NORMALIZATION", schema.L2NormOptionsT()), "L2_NORMALIZATION"),
        (unary("float32", "EXP"), "EXP"),
        (
            binary(
                "float32",
                "ADD",
                IMAGE,
                schema.AddOptionsT(fusedActivationFunction=schema.ActivationFunctionType.TANH),
            ),
            "ADD (with a fused activation that NNAPI lacks)",
        ),
    ],
)
def test_an_operator_without_a_counterpart_is_named(
    model: bytes, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        on_nnapi().load(LoadRequest(written(tmp_path, model)))

    assert f"1 of the model's 1 operators: {said}" in caught.value.text
