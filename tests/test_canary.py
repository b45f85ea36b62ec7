"""The canaries on the software drivers: right, warm the second time, and who lies is seen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import native_build
import numpy as np
import pytest
from devices import require_glslang, require_opencl, require_vulkan
from measure_helpers import lavapipe, vulkan_drivers

from switchgear.backends.cache_store import HEADER, CacheStore
from switchgear.backends.canary_numbers import ROWS, TOLERANCE, numbers, relative_error
from switchgear.backends.driver_caches import environment, make_folders

if TYPE_CHECKING:
    from collections.abc import Iterator

# A driver's first compilation takes 4 s of CPU here, which a busy machine makes four times as
# long; any of these tests may be the first.
pytestmark = pytest.mark.timeout(60)
SHADERS = Path(__file__).parent.parent / "backends" / "shaders"
KERNELS = ["dot", "exp", "reduce_sum", "attention"]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Its `drivers` are filled by the first test that needs them: compiling is dear."""
    root = tmp_path_factory.mktemp("warm")
    make_folders(root)
    yield root
    shutil.rmtree(root)


def start(
    root: Path, drivers: Path, module: str = "canary", **more: str
) -> subprocess.CompletedProcess[str]:
    """Runs a canary that keeps its blobs under `root`, drivers theirs under `drivers`."""
    return subprocess.run(
        [sys.executable, "-m", f"switchgear.backends.{module}", "--cache", str(root), "--json"],
        env={**os.environ, **environment(drivers), **more},
        capture_output=True,
        text=True,
    )


def result_of(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def blob(root: Path) -> Path:
    (path,) = (root / "blobs").iterdir()
    return path


def test_the_numbers_feed_each_other() -> None:
    known = numbers()
    assert list(known.answers) == KERNELS
    assert np.allclose(known.answers["exp"].sum(axis=1), known.answers["reduce_sum"], rtol=1e-5)
    # Each row of the attention is a mean of the rows of v.
    assert np.abs(known.answers["attention"]).max() < np.abs(known.v).max()
    assert relative_error(known.answers["dot"], known.answers["dot"]) == 0
    spoilt = known.answers["dot"].copy()
    spoilt[3, 5] += 0.01
    assert relative_error(spoilt, known.answers["dot"]) > TOLERANCE
    spoilt[3, 5] = np.nan
    assert relative_error(spoilt, known.answers["dot"]) == float("inf")


def test_vulkan_is_right_and_its_cache_comes_back(tmp_path: Path, warm: Path) -> None:
    drivers = vulkan_drivers(lavapipe())
    first = result_of(start(tmp_path, warm, **drivers))
    assert first["ok"]
    assert [each["name"] for each in first["kernels"]] == KERNELS
    for each in first["kernels"]:
        assert 0 <= each["error"] <= TOLERANCE
        assert each["first_us"] > 0

    assert first["chain_error"] <= TOLERANCE
    assert first["device"]["driver_name"] == "llvmpipe"
    assert first["cache_state"] == "miss"
    assert first["cache_written_bytes"] >= 32

    second = result_of(start(tmp_path, warm, **drivers))
    assert second["ok"]
    assert second["cache_state"] == "hit"
    assert second["cache_read_bytes"] == first["cache_written_bytes"]
    assert second["cache_written_bytes"] == 0


# Checks until its descriptors and threads have settled, then twice more.
AGAIN = """
import contextlib, os, pathlib, sys
from switchgear.backends.canary import Canary

def held():
    targets = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink("/proc/self/fd/" + number))

    # The driver writes its own cache in a thread, of which nobody hears when it is done.
    return sum(not target.startswith(sys.argv[2]) for target in targets)

canary = Canary(pathlib.Path(sys.argv[1]))
results = []
for _ in range(3):
    results.append(canary.check())
    print(held())

assert all(each.ok for each in results)
assert [each.cache_written_bytes > 0 for each in results] == [True, False, False]
canary.close()
"""


def test_one_canary_checks_again_and_again(tmp_path: Path, warm: Path) -> None:
    """As the probe of a device that tripped."""
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, str(tmp_path), str(warm)],
        env={**os.environ, **environment(warm), **vulkan_drivers(lavapipe())},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, second, third = map(int, done.stdout.split())
    assert first >= second == third


@pytest.mark.parametrize("damage", ["truncated", "flipped", "another driver's"])
def test_a_damaged_pipeline_cache_never_reaches_the_driver(
    tmp_path: Path, warm: Path, damage: str
) -> None:
    drivers = vulkan_drivers(lavapipe())
    result_of(start(tmp_path, warm, **drivers))
    path = blob(tmp_path)
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(content[:-7])
    elif damage == "flipped":
        content[-1] ^= 0x10
        path.write_bytes(content)
    else:
        key = json.JSONDecoder().raw_decode(content[HEADER.size :].decode("latin-1"))[0]
        path.unlink()
        CacheStore(tmp_path).put({**key, "driver_info": "Mesa 22.3.6"}, bytes(32))
        blob(tmp_path).rename(path)

    again = result_of(start(tmp_path, warm, **drivers))
    assert again["ok"]
    assert again["cache_state"] == "corrupt"
    assert path.name in again["cache_reason"]
    assert again["cache_read_bytes"] == 0
    assert again["cache_written_bytes"] >= 32
    assert result_of(start(tmp_path, warm, **drivers))["cache_state"] == "hit"


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path: Path, warm: Path) -> None:
    (tmp_path / "blobs").write_text("a file")
    done = start(tmp_path, warm, **vulkan_drivers(lavapipe()))
    assert result_of(done)["ok"]
    assert "the pipeline cache is not kept: errno:17 EEXIST" in done.stderr


def test_a_driver_that_does_nothing_is_found_out(tmp_path: Path, warm: Path) -> None:
    done = start(
        tmp_path,
        warm,
        **vulkan_drivers(lavapipe()),
        **native_build.vulkan_fault_layer(),
        SWITCHGEAR_TEST_FAULT="submit:skip",
    )
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert not result["ok"]
    assert [each["error"] for each in result["kernels"]] == [None] * 4
    assert result["chain_error"] is None


def test_a_driver_that_goes_wrong_later_is_found_out(tmp_path: Path, warm: Path) -> None:
    """Each kernel is run six times by itself: the fault meets the chain only."""
    done = start(
        tmp_path,
        warm,
        **vulkan_drivers(lavapipe()),
        **native_build.vulkan_fault_layer(),
        SWITCHGEAR_TEST_FAULT="submit:skip:24",
    )
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert all(each["error"] <= TOLERANCE for each in result["kernels"])
    assert result["chain_error"] is None


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("wait:lost:2", "vulkan:-4 VK_ERROR_DEVICE_LOST: vkWaitForFences"),
        ("memory:out:1", "vulkan:-2 VK_ERROR_OUT_OF_DEVICE_MEMORY: vkAllocateMemory"),
    ],
)
def test_a_driver_that_fails_keeps_its_code(
    tmp_path: Path, warm: Path, fault: str, said: str
) -> None:
    done = start(
        tmp_path,
        warm,
        **vulkan_drivers(lavapipe()),
        **native_build.vulkan_fault_layer(),
        SWITCHGEAR_TEST_FAULT=fault,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == said


def test_no_vulkan_device_is_a_reason(tmp_path: Path) -> None:
    require_vulkan()
    done = start(tmp_path, tmp_path, **vulkan_drivers(tmp_path))
    assert done.returncode == 1
    assert "VK_ERROR_INCOMPATIBLE_DRIVER" in done.stderr


def test_opencl_is_right_and_its_program_comes_back(tmp_path: Path, warm: Path) -> None:
    require_opencl()
    first = result_of(start(tmp_path, warm, "canary_opencl"))
    assert first["ok"]
    assert [each["name"] for each in first["kernels"]] == KERNELS
    assert (first["cache_state"], first["cache_written_bytes"] > 0) == ("miss", True)
    second = result_of(start(tmp_path, warm, "canary_opencl"))
    assert second["ok"]
    assert second["cache_state"] == "hit"


def test_a_truncated_program_never_reaches_the_driver(tmp_path: Path, warm: Path) -> None:
    """PoCL aborts on one."""
    require_opencl()
    result_of(start(tmp_path, warm, "canary_opencl"))
    path = blob(tmp_path)
    path.write_bytes(path.read_bytes()[:-1000])
    again = result_of(start(tmp_path, warm, "canary_opencl"))
    assert again["ok"]
    assert again["cache_state"] == "corrupt"
    assert again["cache_written_bytes"] > 1000


def test_no_opencl_device_is_a_reason(tmp_path: Path) -> None:
    require_opencl()
    done = start(tmp_path, tmp_path, "canary_opencl", OCL_ICD_VENDORS=str(tmp_path))
    assert done.returncode == 1
    assert "opencl:-1001 CL_PLATFORM_NOT_FOUND_KHR" in done.stderr


def test_spirv_is_built_from_the_source_beside_it(tmp_path: Path) -> None:
    require_glslang()
    subprocess.run([str(SHADERS / "build.sh"), str(tmp_path)], check=True)
    built = {path.stem: path.read_bytes() for path in tmp_path.glob("*.spv")}
    kept = {path.stem: path.read_bytes() for path in SHADERS.glob("*.spv")}
    assert sorted(built) == sorted(kept) == sorted(KERNELS)
    for name, spirv in built.items():
        # The third word names the compiler and its version, which may differ.
        assert spirv[:8] + spirv[12:] == kept[name][:8] + kept[name][12:], name


def test_the_sizes_in_the_shaders_are_the_numbers() -> None:
    for name in ("dot", "attention"):
        assert f"WIDTH = {ROWS};" in (SHADERS / f"{name}.comp").read_text()
