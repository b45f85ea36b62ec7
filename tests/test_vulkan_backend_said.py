"""What the engine says of itself, taken apart: reasons, codes, the device, the proof."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from switchgear.backends.contract import ModelInfo
from switchgear.backends.litert.compiled import places, refusal
from switchgear.backends.litert.said import Said, reasons
from switchgear.backends.litert.status import driver_error, own_words
from switchgear.backends.vulkan.adapter import check_on_gpu, identity_of, selected
from switchgear.ipc.errors import DriverError, UnsupportedModel
from switchgear.ipc.slot import TensorSpec

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine

NO_ADAPTER = """\
INFO: [delegate_webgpu.cc:342] Create WebGPU environment (use_low_power=0)
Warning: vkCreateInstance: Found no drivers!
Warning: vkCreateInstance failed with VK_ERROR_INCOMPATIBLE_DRIVER
    at CheckVkSuccessImpl (third_party/dawn/src/dawn/native/vulkan/VulkanError.cpp:106)

ERROR: [delegate_webgpu.cc:359] Failed to initialize WebGPU environment: No adapters found
WARNING: Logging before InitGoogle() is written to STDERR
E0000 00:00:1795979730.465526   31113 delegate_webgpu.cc:736] Failed to get the environment
=== Source Location Trace: ===
third_party/odml/litert/ml_drift/delegate/delegate_webgpu.cc:432
"""
OLD_MESA = """\
E0000 00:00:1.5   7 environment.cc:99] shaderUniformBufferArrayDynamicIndexing required
ERROR: [delegate_webgpu.cc:359] Failed to initialize: INTERNAL: No adapters found
"""
UNSUPPORTED = """\
ERROR: Following operations are not supported by GPU delegate:
DENSIFY: Operation is not supported.
REVERSE_V2: Only one axis
2 operations will run on the GPU, and the remaining 2 operations will run on the CPU.
"""
ADAPTER = (
    "I0000 00:00:1795979619.847098   29856 environment.cc:532] Selected adapter: "
    "Some GPU (R) 3000, rev 2, arch=gen-9, vendor=acme, backend={api}, "
    "adapterType=Discrete GPU\n"
)
COMPILED = "ERROR: [./litert/cc/litert_compiled_model.h:1961]\n└ "


def test_reasons_are_what_is_serious_once_and_in_order() -> None:
    assert reasons(NO_ADAPTER) == [
        "vkCreateInstance: Found no drivers!",
        "vkCreateInstance failed with VK_ERROR_INCOMPATIBLE_DRIVER",
        "Failed to initialize WebGPU environment: No adapters found",
        "Failed to get the environment",
    ]
    assert reasons(NO_ADAPTER * 2) == reasons(NO_ADAPTER)
    assert reasons("INFO: all is well\nI0000 00:00:1.5   7 a.cc:1] fine\n") == []


def test_a_drivers_own_code_is_the_error() -> None:
    failed = driver_error(RuntimeError(f"{COMPILED}ERROR: [a.cc:1036]"), NO_ADAPTER)

    assert (failed.domain, failed.code) == ("vulkan", -9)
    assert failed.name == "VK_ERROR_INCOMPATIBLE_DRIVER"
    assert "No adapters found" in failed.text
    assert ".cc:" not in failed.text


def test_without_one_it_is_the_engines() -> None:
    failed = driver_error(RuntimeError(f"{COMPILED}ERROR: [a.cc:1036]"), OLD_MESA)
    assert (failed.domain, failed.code) == ("litert", 3)
    assert "DynamicIndexing required" in failed.text

    text = "TensorBufferWrapper error: code=7, message=ERROR: [a.h:6]\n└ Failed to lock."
    failed = driver_error(RuntimeError(text), "")
    assert (failed.code, failed.name) == (7, "kLiteRtStatusErrorTimeoutExpired")
    assert failed.text == "Failed to lock."

    failed = driver_error(RuntimeError("kLiteRtStatusErrorInvalidFlatbuffer"), "")
    assert (failed.domain, failed.code) == ("litert", 501)

    failed = driver_error(ValueError("ERROR: [a.h:6]"), "")
    assert failed.text == "ERROR: [a.h:6]"


def test_own_words_leave_places_out() -> None:
    assert own_words(RuntimeError(f"{COMPILED}Some ops are left.")) == ["Some ops are left."]


def test_operators_that_are_left_are_named() -> None:
    error = RuntimeError(f"{COMPILED}Some ops are not accelerated. Add the CPU.")
    refused = refusal(error, UNSUPPORTED)

    assert isinstance(refused, UnsupportedModel)
    assert "DENSIFY (Operation is not supported.); REVERSE_V2 (Only one axis)" in refused.text

    refused = refusal(error, "Partitioned subgraph<0>, selected 3 ops, from a total of 9 ops.")
    assert isinstance(refused, UnsupportedModel)
    assert refused.text == "3 of 9 nodes run on the accelerator"

    failed = refusal(
        error, "INFO: [a:1] 0 compiler plugins were applied successfully: \nERROR: x"
    )
    assert isinstance(failed, DriverError)
    assert (failed.code, failed.text) == (504, "x")


def test_the_adapter_that_it_took() -> None:
    assert selected(ADAPTER.format(api="Vulkan")) == "Some GPU (R) 3000, rev 2"
    assert selected("nothing of the kind") == ""
    with pytest.raises(DriverError, match="through OpenGLES, not Vulkan"):
        selected(ADAPTER.format(api="OpenGLES"))


def test_a_device_that_vulkan_does_not_list() -> None:
    with pytest.raises(DriverError) as caught:
        identity_of("no such device")

    assert caught.value.name in {"ENODEV", "ENOENT", "VK_ERROR_INCOMPATIBLE_DRIVER"}


def info_of(dtype: str) -> ModelInfo:
    spec = TensorSpec("x", dtype, (4,), (4,), 16)
    return ModelInfo((spec,), (spec,), "signature", False, {})


def test_the_proof_that_a_model_is_on_the_gpu() -> None:
    taken = "I0000 00:00:1.5   7 delegate.cc:984] Initializing WebGPU-based API from graph.\n"
    check_on_gpu({26}, "", info_of("float32"))
    check_on_gpu({1}, taken, info_of("int8"))
    for types, said, dtype in (
        ({1}, taken, "float32"),
        ({1, 26}, taken, "float32"),
        (set[int](), taken, "float32"),
        ({1}, "", "int8"),
    ):
        with pytest.raises(DriverError, match="not on the GPU"):
            check_on_gpu(types, said, info_of(dtype))


def test_tensors_are_found_by_their_numbers_and_differences_refused() -> None:
    specs = [TensorSpec(name, "float32", (2, 3), (2, 3), 24) for name in ("late", "early")]
    details = {
        "a": {"index": 7, "dtype": "float32", "shape": [2, 3]},
        "b": {"index": 4, "dtype": "float32", "shape": [2, 3]},
    }
    assert places(["a", "b"], details, specs, [4, 7]) == [1, 0]
    with pytest.raises(UnsupportedModel, match=r"sees the tensors \['a', 'b'\]"):
        places(["a", "b"], details, specs, [4, 8])

    with pytest.raises(UnsupportedModel, match="sees the tensors"):
        places(["a"], details, specs[:1], [4])

    details["b"] = {"index": 4, "dtype": "float32", "shape": [3, 2]}
    with pytest.raises(UnsupportedModel, match=r"'late' as float32 \[3, 2\], the CPU"):
        places(["a", "b"], details, specs, [4, 7])

    details["b"] = {"index": 4, "dtype": "int8", "shape": [2, 3]}
    with pytest.raises(UnsupportedModel, match="'late' as int8"):
        places(["a", "b"], details, specs, [4, 7])


def test_what_is_said_is_kept_and_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    said = Said()
    try:
        for _ in range(2):
            with said.listening():
                os.write(2, b"INFO: [a.cc:1] progress\nERROR: [a.cc:2] no device\n")

            text = said.take()
            assert "progress" in text

        assert said.take() == ""
        os.write(2, b"outside\n")
        assert said.take() == ""
    finally:
        said.close()

    # Once each, and the engine's progress not at all.
    passed_on = capfd.readouterr().err.splitlines()
    assert passed_on == ["ERROR: [a.cc:2] no device", "outside"]


def test_an_error_inside_gives_the_descriptor_back(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = os.listdir("/proc/self/fd")
    said = Said()
    with pytest.raises(FileNotFoundError), said.listening():
        (tmp_path / "none").read_text()

    os.write(2, b"after\n")
    said.close()
    assert capfd.readouterr().err == "after\n"
    assert os.listdir("/proc/self/fd") == before
