"""NNAPI against a runtime of the same C interface that computes, and fails on demand."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import native_build
import numpy as np
import pytest
from backend_helpers import recurrent
from isolated_backend import Steps, hangs_after, inputs_of, isolated, outputs_of
from npu_helpers import TOLERANCE, loaded, on_nnapi, worst, written
from small_network import small_network

from switchgear.backends import generate
from switchgear.backends.contract import LoadRequest
from switchgear.backends.npu.nnapi import NnapiInstance
from switchgear.backends.npu.nnapi_abi import RESULT_NAMES
from switchgear.ipc.errors import BadShape, DriverError, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]
SETTING = "SWITCHGEAR_TEST_NNAPI"
CONV_2D, LOGISTIC = 3, 14


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """A caught error's traceback holds the graph, and that the mapped file."""
    yield
    gc.collect()


def test_identity_names_the_accelerator_and_the_library() -> None:
    identity = on_nnapi().identity()

    assert identity["provider"] == "nnapi"
    assert identity["device"] == "test-npu (accelerator)"
    assert identity["driver"] == "test-npu 1.2, feature level 30"
    assert identity["library"] == str(native_build.library("stub_neuralnetworks"))


def test_a_network_has_the_numbers_of_the_cpu_and_a_time(tmp_path: Path) -> None:
    path = written(tmp_path, small_network())
    with loaded(on_nnapi(), path) as instance:
        assert isinstance(instance, NnapiInstance)
        assert instance.precision == "fp16"
        assert (instance.coverage.nodes, instance.coverage.arithmetic) == (8, 1.0)
        assert max(worst(instance, path, seed) for seed in (1, 2)) < TOLERANCE
        assert instance.duration_ns is not None
        assert instance.duration_ns > 0


def test_a_driver_that_tells_no_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, "untimed=1")
    path = written(tmp_path, small_network())
    with loaded(on_nnapi(), path, "fp32") as instance:
        assert isinstance(instance, NnapiInstance)
        assert instance.precision == "fp32"
        assert worst(instance, path) < TOLERANCE
        assert instance.duration_ns is None


def test_what_the_accelerator_lacks_runs_on_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, f"lacks={LOGISTIC}")
    path = written(tmp_path, small_network())
    with loaded(on_nnapi(), path) as instance:
        assert (instance.coverage.nodes, instance.coverage.nodes_total) == (7, 8)
        assert instance.coverage.arithmetic == 1.0
        assert worst(instance, path) < TOLERANCE

    monkeypatch.setenv(SETTING, f"lacks={LOGISTIC},devices=npu")
    with pytest.raises(UnsupportedModel, match="no CPU for LOGISTIC"):
        on_nnapi().load(LoadRequest(path))


def test_too_little_on_the_accelerator_is_refused_with_both_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, f"lacks={CONV_2D}")
    path = written(tmp_path, small_network())
    with pytest.raises(UnsupportedModel) as caught:
        on_nnapi().load(LoadRequest(path))

    assert "6 of 8 nodes, 0.21 of the arithmetic runs on the device" in caught.value.text
    assert "CONV_2D (2)" in caught.value.text


def test_probe_falls_back_to_whole_numbers_only_where_floats_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert on_nnapi().probe().endswith("float32 convolution exact")

    monkeypatch.setenv(SETTING, "mode=lie")
    with pytest.raises(DriverError, match="wrong numbers"):
        on_nnapi().probe()

    monkeypatch.setenv(SETTING, f"lacks={CONV_2D}")
    with pytest.raises(DriverError, match="0 of 1 nodes") as caught:
        on_nnapi().probe()

    assert "in int8" in caught.value.text


@pytest.mark.parametrize("devices", ["none", "cpu"])
def test_without_an_accelerator_it_is_absent(
    devices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, f"devices={devices}")
    with pytest.raises(DriverError, match="no accelerator") as caught:
        on_nnapi()

    assert caught.value.name == "ENODEV"
    assert ("nnapi-reference (cpu)" in caught.value.text) == (devices == "cpu")


def test_a_device_by_its_name(tmp_path: Path) -> None:
    backend = on_nnapi(device="nnapi-reference")
    assert backend.identity()["device"] == "nnapi-reference (cpu)"
    path = written(tmp_path, small_network())
    with loaded(backend, path) as instance:
        assert worst(instance, path) < TOLERANCE

    with pytest.raises(DriverError, match="no device 'other'"):
        on_nnapi(device="other")


def once(path: str) -> None:
    with loaded(on_nnapi(), path) as instance:
        outputs_of(instance, inputs_of(instance.info, 1))


# In the order in which they are made.
CALLS = (
    "_getDeviceCount",
    "_getDevice",
    "Device_getName",
    "Device_getType",
    "Model_create",
    "Model_addOperand",
    "Model_setOperandValue",
    "Model_addOperation",
    "Model_identifyInputsAndOutputs",
    "Model_relaxComputationFloat32toFloat16",
    "Model_finish",
    "Model_getSupportedOperationsForDevices",
    "Compilation_createForDevices",
    "Compilation_setPreference",
    "Compilation_finish",
    "Execution_create",
    "Execution_setInput",
    "Execution_setOutput",
    "Execution_setMeasureTiming",
    "Execution_compute",
    "Execution_getDuration",
)


@pytest.mark.parametrize("code", sorted(RESULT_NAMES))
def test_each_code_of_each_call_is_the_error(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, small_network())
    for call in CALLS:
        monkeypatch.setenv(SETTING, f"{call}={code}")
        with pytest.raises(DriverError) as caught:
            once(path)

        error = caught.value
        assert (error.domain, error.code, error.name) == ("nnapi", code, RESULT_NAMES[code])
        assert error.text == f"ANeuralNetworks{call}"


def test_a_failed_run_leaves_the_next_one_to_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, small_network())
    with loaded(on_nnapi(), path) as instance:
        monkeypatch.setenv(SETTING, "Execution_compute=9")
        with pytest.raises(DriverError, match="nnapi:9 ANEURALNETWORKS_UNAVAILABLE_DEVICE"):
            worst(instance, path)

        monkeypatch.delenv(SETTING)
        assert worst(instance, path) < TOLERANCE


def test_after_the_death_of_the_drivers_process_it_compiles_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, small_network())
    cache = tmp_path / "cache"
    cache.mkdir()
    with loaded(on_nnapi(), path, cache=str(cache)) as instance:
        monkeypatch.setenv(SETTING, "Execution_compute=14")
        with pytest.raises(DriverError, match="nnapi:14 ANEURALNETWORKS_DEAD_OBJECT"):
            worst(instance, path)

        monkeypatch.setenv(SETTING, "Compilation_finish=14")
        with pytest.raises(DriverError, match="Compilation_finish"):
            worst(instance, path)

        monkeypatch.delenv(SETTING)
        assert worst(instance, path) < TOLERANCE
        assert worst(instance, path) < TOLERANCE

    (kept,) = cache.iterdir()
    assert kept.read_text().count("compiled") == 3


def test_the_cache_is_told_apart_by_precision(tmp_path: Path) -> None:
    path = written(tmp_path, small_network())
    cache = tmp_path / "cache"
    cache.mkdir()
    for precision in ("fp16", "fp32", "fp16"):
        with loaded(on_nnapi(), path, precision, cache=str(cache)):
            pass

    assert sorted(f.read_text().count("compiled") for f in cache.iterdir()) == [1, 2]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (generate.accumulator(2), "keeps variables"),
        (recurrent(), "keeps variables"),
        (generate.identity((2,), "int64"), "no tensor 'serving_default_x:0' of int64"),
        (generate.ramp(), "depends on the input"),
        (small_network("L2_NORMALIZATION"), "1 of the model's 9 operators: L2_NORMALIZATION"),
    ],
    ids=["state", "recurrent", "int64", "dynamic", "operator"],
)
def test_what_nnapi_has_not_is_refused_by_name(model: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        on_nnapi().load(LoadRequest(written(tmp_path, model)))

    assert said in caught.value.text


def test_other_shapes_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, generate.dynamic_batch())
    with pytest.raises(UnsupportedModel, match="no other"):
        on_nnapi().load(LoadRequest(path, "auto", {"x": (3, 4)}))

    with pytest.raises(BadShape):
        on_nnapi().load(LoadRequest(path, "auto", {"x": (3, 5)}))


def test_a_run_reads_the_slots_own_memory(tmp_path: Path) -> None:
    path = written(tmp_path, generate.two_inputs())
    with loaded(on_nnapi(), path) as instance:
        a, b = bytearray(16), bytearray(16)
        total, product = bytearray(16), bytearray(32)
        source = instance.attach_input([memoryview(a), memoryview(b)])
        # One has room to spare.
        target = instance.attach_output([memoryview(total), memoryview(product)])
        for value in (1.5, 2.5):
            np.frombuffer(a, np.float32)[:] = value
            np.frombuffer(b, np.float32)[:] = 2
            entries = instance.run(source, target)
            assert np.frombuffer(total, np.float32).tolist() == [value + 2] * 4
            assert np.frombuffer(product, np.float32)[:4].tolist() == [value * 2] * 4

        assert [entry.length for entry in entries] == [16, 16]
        with pytest.raises(ValueError, match="has 8 bytes"):
            instance.attach_input([memoryview(a)[:8], memoryview(b)])

        with pytest.raises(ValueError, match="has 8 bytes"):
            instance.attach_output([memoryview(total)[:8], memoryview(product)])


def test_no_library() -> None:
    with pytest.raises(DriverError, match="errno:2 ENOENT"):
        on_nnapi(library="/nonexistent/libneuralnetworks.so")


def test_a_library_of_an_older_android() -> None:
    with pytest.raises(DriverError, match="older than Android 10") as caught:
        on_nnapi(library=str(native_build.delegate()))

    assert caught.value.name == "ENOSYS"


def test_a_crash_and_a_hang_end_only_that_process(tmp_path: Path) -> None:
    path = written(tmp_path, small_network())
    steps: Steps = [["load", path, "auto", {}], ["run", 1]]
    options = {
        "provider": "nnapi",
        "library": str(native_build.library("stub_neuralnetworks")),
    }
    crashed = isolated("npu", steps, options=options, environment={SETTING: "mode=crash"})
    assert crashed.status == -6
    assert "test-npu: assertion failed" in crashed.stderr

    assert hangs_after(1, "npu", steps, options=options, environment={SETTING: "mode=hang"})
