"""Vulkan drivers that fail: each its own reason, within its limit, the others measured."""

from __future__ import annotations

from pathlib import Path

import native_build
import pytest
from measure_helpers import fault, lavapipe, measure, number, plan, vulkan_drivers

from switchgear.fingerprints.child import Limits
from switchgear.fingerprints.measurement import VULKAN_MATMUL, Report


def with_layer(wanted: str, limits: Limits | None = None) -> list[Report]:
    environment = {
        **vulkan_drivers(lavapipe()),
        **native_build.vulkan_fault_layer(),
        "SWITCHGEAR_TEST_FAULT": wanted,
    }
    return measure(plan(VULKAN_MATMUL, environment, limits=limits or Limits(15, 10)))


def with_stub(mode: str, *others: Path, limits: Limits | None = None) -> list[Report]:
    environment = {
        **vulkan_drivers(native_build.stub_vulkan_driver(), *others),
        "SWITCHGEAR_TEST_VULKAN_DRIVER": mode,
    }
    return measure(plan(VULKAN_MATMUL, environment, limits=limits or Limits(15, 10)))


def test_no_loader(tmp_path: Path) -> None:
    (tmp_path / "libvulkan.so.1").write_bytes(b"")
    (report,) = measure(plan(VULKAN_MATMUL, {"LD_LIBRARY_PATH": str(tmp_path)}))
    failure = fault(report, VULKAN_MATMUL)
    assert report.subject is None
    assert (failure.domain, failure.code, failure.code_name) == ("switchgear", 400, "NoBackend")
    assert "libvulkan.so.1: file too short" in failure.text


def test_no_driver(tmp_path: Path) -> None:
    (report,) = measure(plan(VULKAN_MATMUL, vulkan_drivers(tmp_path)))
    failure = fault(report, VULKAN_MATMUL)
    assert (failure.domain, failure.code) == ("vulkan", -9)
    assert failure.code_name == "VK_ERROR_INCOMPATIBLE_DRIVER"
    assert failure.text == "vkCreateInstance"
    assert Path(failure.library).name.startswith("libvulkan.so")


@pytest.mark.parametrize(
    ("wanted", "code", "name", "call"),
    [
        ("submit:lost:4", -4, "VK_ERROR_DEVICE_LOST", "vkQueueSubmit"),
        ("wait:lost:4", -4, "VK_ERROR_DEVICE_LOST", "vkWaitForFences"),
        ("memory:out:1", -2, "VK_ERROR_OUT_OF_DEVICE_MEMORY", "vkAllocateMemory"),
    ],
)
def test_driver_errors_keep_their_code(wanted: str, code: int, name: str, call: str) -> None:
    (report,) = with_layer(wanted)
    failure = fault(report, VULKAN_MATMUL)
    assert report.subject is not None
    assert (failure.domain, failure.code, failure.code_name) == ("vulkan", code, name)
    assert failure.text == call
    assert Path(failure.library).name == "libvulkan_lvp.so"


def test_device_lost_later_keeps_what_was_measured() -> None:
    """At most 2 uploads, 2 warm-ups, 31 samples, 1 download: then hundreds of empty submits."""
    (report,) = with_layer("wait:lost:40")
    assert number(report, "matmul_ms").samples >= 5
    assert fault(report, VULKAN_MATMUL).code_name == "VK_ERROR_DEVICE_LOST"


def test_driver_that_does_nothing_is_found_out() -> None:
    (report,) = with_layer("submit:skip:2")
    assert "the product is wrong" in fault(report, "matmul_ms").text
    assert "other bytes" in fault(report, "host_pointer_import_us").text
    assert fault(report, "matmul_ms").code_name == "BackendFailed"


def test_crash_while_a_device_is_made() -> None:
    (report,) = with_layer("device:crash")
    failure = fault(report, VULKAN_MATMUL)
    assert report.subject is not None
    assert report.subject.driver_name == "llvmpipe"
    assert (failure.domain, failure.code, failure.code_name) == ("signal", 6, "SIGABRT")
    assert "assertion failed in vkCreateDevice" in failure.text
    assert Path(failure.library).name == "libvulkan_lvp.so"


def test_hang_in_a_wait_ends_at_the_limit() -> None:
    (report,) = with_layer("wait:hang:3", Limits(total_s=4, silence_s=10))
    failure = fault(report, VULKAN_MATMUL)
    assert report.subject is not None
    assert (failure.domain, failure.code, failure.code_name) == ("switchgear", 407, "TimedOut")
    assert "longer than 4 s at: compiling the kernel" in failure.text
    assert Path(failure.library).name == "libvulkan_lvp.so"


def test_crash_with_every_driver_is_one_failure() -> None:
    (report,) = with_layer("instance:crash")
    assert report.subject is None
    assert fault(report, VULKAN_MATMUL).code_name == "SIGABRT"


@pytest.mark.parametrize(
    ("mode", "code", "name"), [("crash", 6, "SIGABRT"), ("segfault", 11, "SIGSEGV")]
)
def test_one_driver_crashes_the_other_is_measured(mode: str, code: int, name: str) -> None:
    stub, real = with_stub(mode, lavapipe())
    failure = fault(stub, VULKAN_MATMUL)
    assert stub.subject is not None
    assert real.subject is not None
    assert stub.subject.name == "stub_vulkan_driver"
    assert (failure.domain, failure.code, failure.code_name) == ("signal", code, name)
    assert failure.library == str(native_build.library("stub_vulkan_driver", "vulkan/vk_icd.h"))
    assert number(real, "matmul_ms").median > 0
    assert stub.subject.index != real.subject.index


def test_one_driver_hangs_the_other_is_measured() -> None:
    stub, real = with_stub("hang", lavapipe(), limits=Limits(total_s=15, silence_s=1.5))
    failure = fault(stub, VULKAN_MATMUL)
    assert (failure.code_name, failure.code) == ("TimedOut", 407)
    assert "no sign of life for 1.5 s" in failure.text
    assert number(real, "matmul_ms").median > 0


def test_one_driver_without_memory_the_other_is_measured() -> None:
    stub, real = with_stub("out_of_memory", lavapipe())
    failure = fault(stub, VULKAN_MATMUL)
    assert (failure.domain, failure.code) == ("vulkan", -1)
    assert failure.code_name == "VK_ERROR_OUT_OF_HOST_MEMORY"
    assert failure.text == "vkEnumeratePhysicalDevices"
    assert failure.library.endswith("stub_vulkan_driver.so")
    assert number(real, "matmul_ms").median > 0


def test_driver_that_writes_into_our_pipe() -> None:
    (report,) = with_stub("scribble")
    failure = fault(report, VULKAN_MATMUL)
    assert (failure.domain, failure.code_name) == ("switchgear", "ProtocolError")
    assert "debug: instance made" in failure.text


def test_driver_that_floods_our_pipe() -> None:
    (report,) = with_stub("flood")
    failure = fault(report, VULKAN_MATMUL)
    assert failure.code_name == "ProtocolError"
    assert "a line of more than" in failure.text


def test_driver_that_exits() -> None:
    (report,) = with_stub("exit")
    failure = fault(report, VULKAN_MATMUL)
    assert (failure.domain, failure.code_name) == ("switchgear", "WorkerDied")
    assert "exited with status 3" in failure.text


def test_driver_without_a_device() -> None:
    (report,) = with_stub("none")
    failure = fault(report, VULKAN_MATMUL)
    assert report.subject is None
    assert failure.domain == "vulkan"
    assert failure.text == "vkEnumeratePhysicalDevices"
