"""The OpenCL backend from a model's file to its answers, on a real driver."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from backend_helpers import custom, loaded, repacked, run
from opencl_helpers import opened

from switchgear.backends import generate
from switchgear.backends.contract import Coverage, LoadRequest
from switchgear.backends.generate.dense import dense
from switchgear.backends.opencl import artefact as files
from switchgear.ipc.errors import (
    BadShape,
    DriverError,
    NotPrepared,
    OutputTooLarge,
    UnsupportedModel,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from switchgear.backends.opencl.backend import OpenClBackend

# The first one compiles for 4 s of CPU, which a busy machine makes four times as long.
pytestmark = pytest.mark.timeout(60)
SIZES = (64, 64, 64, 64)
Array = np.ndarray[Any, Any]

SERVE = """
import json, sys
from switchgear.backends.contract import LoadRequest
from switchgear.backends.opencl.backend import OpenClBackend
from switchgear.backends.trial import first_run

instance = OpenClBackend({}).load(LoadRequest(sys.argv[1], "fp32", cache=sys.argv[2]))
first_run(instance)
modules = ("tinygrad", "ai_edge_litert", "switchgear.backends.opencl.prepare")
print(json.dumps([name for name in modules if name in sys.modules]))
"""

NO_DEVICE = """
from switchgear.backends.opencl.backend import OpenClBackend
from switchgear.ipc.errors import DriverError

try:
    OpenClBackend({})
except DriverError as error:
    print(error.domain, error.code, error.name)
"""


@pytest.fixture(scope="module")
def backend() -> Iterator[OpenClBackend]:
    opened()
    from switchgear.backends.opencl.backend import OpenClBackend

    opencl = OpenClBackend({})
    yield opencl
    opencl.close()


@pytest.fixture(scope="module")
def prepared(backend: OpenClBackend, tmp_path_factory: pytest.TempPathFactory) -> LoadRequest:
    """A request for a compiled model; its folder holds the artefact in float."""
    folder = tmp_path_factory.mktemp("dense")
    model = folder / "dense.tflite"
    model.write_bytes(dense(SIZES, rows=2))
    cache = folder / "cache"
    cache.mkdir()
    request = LoadRequest(str(model), "fp32", cache=str(cache))
    backend.load(compiling(request)).close()
    return request


def compiling(request: LoadRequest, precision: str = "fp32") -> LoadRequest:
    return LoadRequest(request.path, precision, request.shapes, request.cache, compile=True)


def files_of(request: LoadRequest) -> list[str]:
    return sorted(os.listdir(request.cache))


def x_values() -> Array:
    return np.random.default_rng(7).standard_normal((2, SIZES[0])).astype(np.float32)


def test_the_answers_are_the_cpus(
    backend: OpenClBackend, prepared: LoadRequest, tmp_path: Path
) -> None:
    x = x_values()
    with loaded(dense(SIZES, rows=2), tmp_path) as cpu:
        want = run(cpu, x=x)
        cpu_info = cpu.info

    instance = backend.load(prepared)
    assert instance.info == cpu_info
    assert (instance.precision, instance.coverage) == ("fp32", Coverage(3, 3, 1.0))
    for _ in range(2):
        got = run(instance, x=x)
        assert got["y"].shape == want["y"].shape
        assert np.abs(got["y"] - want["y"]).max() <= 1e-5 * np.abs(want["y"]).max()

    instance.close()


def test_auto_is_float(backend: OpenClBackend, prepared: LoadRequest) -> None:
    instance = backend.load(LoadRequest(prepared.path, "auto", cache=prepared.cache))
    assert instance.precision == "fp32"
    instance.close()


def test_who_and_where_it_is(backend: OpenClBackend) -> None:
    identity = backend.identity()
    assert set(identity) == {"device", "driver", "platform"}
    assert all(identity.values())
    assert backend.name == "opencl"
    assert backend.precisions == ("fp32", "int4")
    assert identity["device"] in backend.probe()


def test_a_serving_process_imports_no_compiler_and_writes_nothing(
    prepared: LoadRequest, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    for folder in (home, tmp_path / "pocl"):
        folder.mkdir()

    result = subprocess.run(
        [sys.executable, "-c", SERVE, prepared.path, prepared.cache],
        capture_output=True,
        text=True,
        check=True,
        # PoCL's own cache is the driver's matter.
        env={
            **os.environ,
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home),
            "POCL_CACHE_DIR": str(tmp_path / "pocl"),
        },
    )
    assert result.stdout.split("\n")[-2] == "[]"
    assert os.listdir(home) == []


def test_without_a_driver_the_loaders_code_is_told() -> None:
    result = subprocess.run(
        [sys.executable, "-c", NO_DEVICE],
        capture_output=True,
        text=True,
        env={**os.environ, "OCL_ICD_VENDORS": "/nonexistent", "OCL_ICD_FILENAMES": ""},
        check=True,
    )
    assert result.stdout.split() == ["opencl", "-1001", "CL_PLATFORM_NOT_FOUND_KHR"]


def test_nothing_is_compiled_unless_asked(
    backend: OpenClBackend, prepared: LoadRequest, tmp_path: Path
) -> None:
    for cache in ("", str(tmp_path), str(tmp_path / "none")):
        with pytest.raises(NotPrepared):
            backend.load(LoadRequest(prepared.path, "fp32", cache=cache))

    assert os.listdir(tmp_path) == []


def test_another_model_driver_or_compiler_is_not_prepared(
    backend: OpenClBackend,
    prepared: LoadRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = tmp_path / "other.tflite"
    other.write_bytes(dense(SIZES, rows=2, outlier=1.0))
    with pytest.raises(NotPrepared, match="model_sha256"):
        backend.load(LoadRequest(str(other), "fp32", cache=prepared.cache))

    with monkeypatch.context() as patch:
        patch.setattr(backend, "engine_version", "0.15.0")
        with pytest.raises(NotPrepared, match="tinygrad"):
            backend.load(prepared)

    identity = {**backend.identity(), "driver": "another 4.0"}
    with monkeypatch.context() as patch:
        patch.setattr(backend, "identity", lambda: identity)
        with pytest.raises(NotPrepared, match=r"another 4\.0"):
            backend.load(prepared)

    backend.load(prepared).close()


def copied(prepared: LoadRequest, folder: Path) -> tuple[LoadRequest, Path]:
    """The same with a copy of the artefact that may be spoilt."""
    (name,) = [each for each in files_of(prepared) if "fp32" in each]
    path = folder / name
    path.write_bytes((folder.__class__(prepared.cache) / name).read_bytes())
    return LoadRequest(prepared.path, "fp32", cache=str(folder)), path


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty"])
def test_a_damaged_artefact_is_deleted(
    backend: OpenClBackend, prepared: LoadRequest, tmp_path: Path, damage: str
) -> None:
    request, path = copied(prepared, tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    kept = {"flipped": len(data), "truncated": len(data) // 3, "empty": 0}[damage]
    path.write_bytes(data[:kept])
    with pytest.raises(NotPrepared, match="unusable"):
        backend.load(request)

    assert os.listdir(tmp_path) == []


def test_a_refused_binary_is_deleted_and_the_source_built(
    backend: OpenClBackend, prepared: LoadRequest, tmp_path: Path
) -> None:
    request, path = copied(prepared, tmp_path)
    good = files.read(str(path))
    assert good.binary
    bad = files.without_binary(good)
    object.__setattr__(bad, "binary", b"not of this driver")
    files.write(bad, str(path))
    del good, bad

    instance = backend.load(request)
    x = x_values()
    result = run(instance, x=x)["y"]
    instance.close()
    assert files.read(str(path)).binary == b""

    # A preparer builds it again, and keeps the binary.
    again = backend.load(compiling(request))
    assert np.array_equal(run(again, x=x)["y"], result)
    again.close()
    assert files.read(str(path)).binary


def test_a_folder_that_cannot_be_written_is_an_error_with_its_code(
    backend: OpenClBackend, prepared: LoadRequest, tmp_path: Path
) -> None:
    with pytest.raises(DriverError) as caught:
        backend.load(LoadRequest(prepared.path, "fp32", {}, str(tmp_path / "none"), True))

    assert (caught.value.domain, caught.value.name) == ("errno", "ENOENT")


def test_an_output_without_room_is_refused_before_any_run(
    backend: OpenClBackend, prepared: LoadRequest
) -> None:
    instance = backend.load(prepared)
    (y,) = instance.info.outputs
    with pytest.raises(OutputTooLarge) as caught:
        instance.attach_output([memoryview(bytearray(y.capacity_bytes - 1))])

    assert caught.value.details["bytes_needed"] == y.capacity_bytes
    with pytest.raises(ValueError, match="bytes"):
        instance.attach_input([memoryview(bytearray(3))])

    # Room to spare stays as it was.
    memory = memoryview(bytearray(b"\x5a" * (y.capacity_bytes + 8)))
    source = instance.attach_input([memoryview(bytearray(x_values().tobytes()))])
    instance.run(source, instance.attach_output([memory]))
    assert bytes(memory[-8:]) == b"\x5a" * 8
    assert bytes(memory[:-8]) != b"\x5a" * y.capacity_bytes
    instance.close()


def request_for(model: bytes, folder: Path, precision: str = "fp32") -> LoadRequest:
    path = folder / "model.tflite"
    path.write_bytes(model)
    return LoadRequest(str(path), precision, cache=str(folder), compile=True)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (generate.accumulator(), "state"),
        (generate.positive_positions(), "no fixed size"),
        (custom("TimeTravel"), "TimeTravel"),
    ],
    ids=["state", "dynamic output", "unknown operator"],
)
def test_what_it_cannot_run_is_refused_by_name(
    backend: OpenClBackend, tmp_path: Path, model: bytes, said: str
) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        backend.load(request_for(model, tmp_path))

    assert os.listdir(tmp_path) == ["model.tflite"]


def test_a_shape_that_the_model_does_not_take(
    backend: OpenClBackend, prepared: LoadRequest
) -> None:
    with pytest.raises(BadShape):
        backend.load(LoadRequest(prepared.path, "fp32", {"x": (3, 5)}, prepared.cache, True))


def test_a_precision_that_it_does_not_have(
    backend: OpenClBackend, prepared: LoadRequest
) -> None:
    with pytest.raises(UnsupportedModel, match="fp64"):
        backend.load(LoadRequest(prepared.path, "fp64", cache=prepared.cache))


@pytest.fixture
def any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four bits are offered whatever they take: the times of small models tell nothing."""
    opened()
    from switchgear.backends.opencl import int4_compiler, prepare

    monkeypatch.setattr(int4_compiler, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(int4_compiler, "LAYER_FASTER", math.inf)
    monkeypatch.setattr(prepare, "FASTER", math.inf)


@pytest.mark.usefixtures("any_speed")
def test_four_bits_where_the_answers_bear_it(
    backend: OpenClBackend, prepared: LoadRequest, tmp_path: Path
) -> None:
    instance = backend.load(compiling(prepared, "int4"))
    assert instance.precision == "int4"
    # The first and the last of three layers stay float.
    assert instance.notes["int4_layers"] == "1"  # type: ignore[attr-defined]
    assert float(instance.notes["int4_snr_db"]) >= 20  # type: ignore[attr-defined]
    x = x_values()
    result = run(instance, x=x)["y"]
    instance.close()
    with loaded(dense(SIZES, rows=2), tmp_path) as cpu:
        want = run(cpu, x=x)["y"]

    noise = float(np.square(result - want).sum())
    ratio = 10 * math.log10(float(np.square(want).sum()) / noise)
    assert 15 < ratio < 60

    # Served from its own file, beside the one in float.
    served = backend.load(LoadRequest(prepared.path, "int4", cache=prepared.cache))
    assert served.precision == "int4"
    assert np.array_equal(run(served, x=x)["y"], result)
    served.close()
    assert len(files_of(prepared)) == 2


@pytest.mark.usefixtures("any_speed")
def test_four_bits_are_refused_with_the_figure(backend: OpenClBackend, tmp_path: Path) -> None:
    """Two large weights in each group take the resolution of the others."""
    request = request_for(dense(SIZES, outlier=40.0), tmp_path, "int4")
    with pytest.raises(UnsupportedModel, match=r"int4: with all 3 layers .*-?\d+\.\d dB"):
        backend.load(request)


def test_four_bits_are_refused_where_they_are_slower(
    backend: OpenClBackend, prepared: LoadRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    from switchgear.backends.opencl import int4_compiler

    for name in files_of(prepared):
        if "int4" in name:
            os.unlink(os.path.join(prepared.cache, name))

    with pytest.raises(UnsupportedModel, match="none of 3 layers has 32768 weights"):
        backend.load(compiling(prepared, "int4"))

    monkeypatch.setattr(int4_compiler, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(int4_compiler, "LAYER_FASTER", 0.0)
    with pytest.raises(UnsupportedModel, match="none of 3 large layers is faster"):
        backend.load(compiling(prepared, "int4"))


def test_names_come_from_the_tensors_where_there_is_no_signature(
    backend: OpenClBackend, tmp_path: Path
) -> None:
    from ai_edge_litert import schema_py_generated as schema

    packed = schema.ModelT.InitFromPackedBuf(generate.two_inputs(), 0)
    packed.signatureDefs = None
    model = repacked(packed)
    with loaded(model, tmp_path) as cpu:
        cpu_info = cpu.info

    instance = backend.load(request_for(model, tmp_path))
    assert instance.info == cpu_info
    a, b = np.arange(4, dtype=np.float32), np.full(4, 2, np.float32)
    names = [spec.name for spec in cpu_info.inputs]
    inputs: dict[str, Any] = dict(zip(names, (a, b), strict=True))
    results = run(instance, **inputs)
    assert [values.tolist() for values in results.values()] == [
        (a + b).tolist(),
        (a * b).tolist(),
    ]
    instance.close()
