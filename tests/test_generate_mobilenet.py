"""MobileNet v1: the paper's shapes and cost, answers that spread, INT8 close to float."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter

from switchgear.backends.generate import mobilenet_v1, multiply_adds

# Table 1 of the paper, as (operator, side of the output, channels of the output).
_CONV, _DEPTHWISE = "CONV_2D", "DEPTHWISE_CONV_2D"
_TABLE: Final = [
    (_CONV, 112, 32),
    (_DEPTHWISE, 112, 32),
    (_CONV, 112, 64),
    (_DEPTHWISE, 56, 64),
    (_CONV, 56, 128),
    (_DEPTHWISE, 56, 128),
    (_CONV, 56, 128),
    (_DEPTHWISE, 28, 128),
    (_CONV, 28, 256),
    (_DEPTHWISE, 28, 256),
    (_CONV, 28, 256),
    (_DEPTHWISE, 14, 256),
    (_CONV, 14, 512),
    *[(_DEPTHWISE, 14, 512), (_CONV, 14, 512)] * 5,
    (_DEPTHWISE, 7, 512),
    (_CONV, 7, 1024),
    (_DEPTHWISE, 7, 1024),
    (_CONV, 7, 1024),
    ("AVERAGE_POOL_2D", 1, 1024),
    (_CONV, 1, 1000),
]


def operators(model: bytes) -> list[tuple[str, list[int]]]:
    """Name and output shape of each operator, in the order in which they run."""
    names = {
        code: name for name, code in vars(schema.BuiltinOperator).items() if name[0].isupper()
    }
    parsed = schema.Model.GetRootAs(model)
    graph = parsed.Subgraphs(0)
    listed = []

    for index in range(graph.OperatorsLength()):
        operator = graph.Operators(index)
        code = parsed.OperatorCodes(operator.OpcodeIndex()).BuiltinCode()
        shape = graph.Tensors(operator.Outputs(0)).ShapeAsNumpy().tolist()
        listed.append((names[code], shape))

    return listed


def logits(model: bytes, images: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """The answers to images [1, 224, 224, 3] in the model's own dtype."""
    interpreter = Interpreter(model_content=model, num_threads=2)
    interpreter.allocate_tensors()
    runner = interpreter.get_signature_runner()
    return [runner(image=image)["logits"] for image in images]


@pytest.fixture(scope="module")
def images() -> list[np.ndarray[Any, Any]]:
    """Noise, a soft gradient, and one grey: what an image's content changes has to show."""
    noise = np.random.RandomState(6).uniform(-1, 1, (1, 224, 224, 3))
    ramp = np.linspace(-1, 1, 224)
    gradient = np.stack(
        [np.add.outer(ramp, ramp) / 2, np.multiply.outer(ramp, ramp), np.outer(ramp, ramp**2)],
        axis=-1,
    )[None]
    return [image.astype(np.float32) for image in (noise, gradient, np.full_like(noise, 0.25))]


@pytest.fixture(scope="module")
def float_answers(images: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    return logits(mobilenet_v1(), images)


@pytest.fixture(scope="module")
def int8_answers(images: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    steps = [np.clip(np.rint(image * 128), -128, 127).astype(np.int8) for image in images]
    return logits(mobilenet_v1(quantised=True), steps)


@pytest.mark.parametrize("quantised", [False, True], ids=["float", "int8"])
def test_layers_are_those_of_the_paper(quantised: bool) -> None:
    expected = [(name, [1, side, side, channels]) for name, side, channels in _TABLE]

    assert operators(mobilenet_v1(quantised)) == [*expected, ("RESHAPE", [1, 1000])]


@pytest.mark.parametrize("quantised", [False, True], ids=["float", "int8"])
def test_multiply_adds_are_those_of_the_paper(quantised: bool) -> None:
    total = 0
    channels = 3

    for name, side, outputs in _TABLE:
        if name == _DEPTHWISE:
            total += side * side * outputs * 9
        elif name == _CONV:
            total += side * side * outputs * channels * (9 if channels == 3 else 1)

        channels = outputs

    assert multiply_adds(mobilenet_v1(quantised)) == total
    assert round(total / 1e6, 2) == 568.74


@pytest.mark.parametrize(("quantised", "megabytes"), [(False, 16.9), (True, 4.6)])
def test_size_is_that_of_4_2_million_weights(quantised: bool, megabytes: float) -> None:
    assert len(mobilenet_v1(quantised)) / 1e6 == pytest.approx(megabytes, abs=0.1)


@pytest.mark.parametrize("kind", ["float_answers", "int8_answers"])
def test_answers_spread(kind: str, request: pytest.FixtureRequest) -> None:
    for answer in request.getfixturevalue(kind):
        assert answer.shape == (1, 1000)
        assert len(np.unique(answer)) >= 30


def test_int8_answers_stay_off_the_ends_of_the_range(
    int8_answers: list[np.ndarray[Any, Any]],
) -> None:
    for answer in int8_answers:
        assert answer.dtype == np.int8
        assert np.abs(answer.astype(np.int32)).max() < 127


def test_int8_is_float_with_little_noise(
    float_answers: list[np.ndarray[Any, Any]], int8_answers: list[np.ndarray[Any, Any]]
) -> None:
    for exact, steps in zip(float_answers, int8_answers, strict=True):
        noise = exact - steps * np.float32(8 / 128)
        signal_to_noise_db = 10 * np.log10(np.mean(exact**2) / np.mean(noise**2))

        assert signal_to_noise_db > 20
        assert exact.argmax() == steps.argmax()


def test_answers_differ_by_more_than_the_noise_of_int8(
    float_answers: list[np.ndarray[Any, Any]], int8_answers: list[np.ndarray[Any, Any]]
) -> None:
    noise = [
        np.abs(exact - steps * np.float32(8 / 128)).mean()
        for exact, steps in zip(float_answers, int8_answers, strict=True)
    ]

    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(float_answers[one] - float_answers[other]).mean() > 2 * max(noise)


def test_weights_have_a_scale_per_channel() -> None:
    graph = schema.Model.GetRootAs(mobilenet_v1(quantised=True)).Subgraphs(0)
    seen = 0

    for index in range(graph.OperatorsLength()):
        operator = graph.Operators(index)

        # Pooling has one input, RESHAPE two.
        if operator.InputsLength() != 3:
            continue

        seen += 1
        weights = graph.Tensors(operator.Inputs(1))
        shape = weights.ShapeAsNumpy()
        scales = weights.Quantization()

        assert weights.Type() == schema.TensorType.INT8
        assert graph.Tensors(operator.Inputs(2)).Type() == schema.TensorType.INT32
        assert scales.ScaleLength() == shape[scales.QuantizedDimension()] > 1
        assert len(np.unique(scales.ScaleAsNumpy())) > scales.ScaleLength() // 2

    assert seen == 28
