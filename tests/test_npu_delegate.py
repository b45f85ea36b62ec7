"""The NPU backend on a real external delegate that this project builds for itself."""

from __future__ import annotations

import gc
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import native_build
import pytest
from isolated_backend import Steps, hangs_after, isolated
from npu_helpers import TOLERANCE, loaded, on_delegate, worst, written
from small_network import small_network

from switchgear.backends import generate
from switchgear.backends.contract import LoadRequest
from switchgear.backends.npu.backend import NpuBackend
from switchgear.backends.npu.delegate import KNOWN_DELEGATES, find_delegate, usual_folders
from switchgear.ipc.errors import BadConfiguration, BadShape, DriverError, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """A caught error's traceback holds the interpreter, and that the model's descriptor."""
    yield
    gc.collect()


def options(**own: str) -> dict[str, Any]:
    return {"delegate": str(native_build.delegate()), "delegate_options": own}


def test_what_is_left_runs_on_the_cpu(tmp_path: Path) -> None:
    path = written(tmp_path, small_network())
    with loaded(on_delegate(), path) as instance:
        coverage = instance.coverage
        assert (coverage.nodes, coverage.nodes_total) == (4, 8)
        # All but the fully connected layer: 80 of 22608 multiply-adds.
        assert coverage.arithmetic == pytest.approx(1 - 80 / 22608)
        assert instance.precision == "fp32"
        assert max(worst(instance, path, seed) for seed in (1, 2, 3)) < TOLERANCE


def test_mobilenet_runs_on_it(tmp_path: Path) -> None:
    path = written(tmp_path, generate.mobilenet_v1())
    with loaded(on_delegate(), path) as instance:
        coverage = instance.coverage
        # All 28 convolutions; pooling and reshape are left to the CPU.
        assert (coverage.nodes, coverage.nodes_total, coverage.arithmetic) == (28, 30, 1.0)
        assert worst(instance, path) < TOLERANCE


def test_too_little_on_the_device_is_refused_with_both_figures(tmp_path: Path) -> None:
    path = written(tmp_path, small_network())
    with pytest.raises(UnsupportedModel) as caught, loaded(on_delegate(mode="add_only"), path):
        pytest.fail("it was loaded")

    text = caught.value.text
    assert "1 of 8 nodes, 0.00 of the arithmetic runs on the device; 0.8 is wanted" in text
    assert "CONV_2D (2)" in text


def test_the_wanted_share_is_an_option(tmp_path: Path) -> None:
    path = written(tmp_path, small_network())
    backend = NpuBackend({**options(max_nodes="1"), "min_arithmetic": 0.5})
    with loaded(backend, path) as instance:
        assert instance.coverage.nodes == 1
        assert 0.5 < instance.coverage.arithmetic < 0.8

    backend = NpuBackend({**options(max_nodes="1"), "min_arithmetic": 0.7})
    with pytest.raises(UnsupportedModel, match=r"0\.7 is wanted"), loaded(backend, path):
        pytest.fail("it was loaded")


def test_nothing_on_the_device_is_refused_whatever_is_wanted(tmp_path: Path) -> None:
    path = written(tmp_path, small_network())
    backend = NpuBackend({**options(mode="none"), "min_arithmetic": 0})
    with pytest.raises(UnsupportedModel, match="0 of 8 nodes"), loaded(backend, path):
        pytest.fail("it was loaded")


def test_identity_changes_with_the_librarys_bytes(tmp_path: Path) -> None:
    first = on_delegate().identity()
    assert first["provider"] == "delegate"
    assert first["library"] == str(native_build.delegate())
    assert first["device"] == "test_delegate.so"

    other = tmp_path / "test_delegate.so"
    shutil.copy(native_build.delegate(), other)
    with other.open("ab") as file:
        file.write(b"\0")

    second = isolated("npu", [["identity"]], options={"delegate": str(other)}).answers[0]
    assert second["library"] == str(other)
    assert second["driver"] != first["driver"]


def test_probe_is_a_convolution_with_a_known_answer() -> None:
    assert on_delegate().probe().endswith("float32 convolution exact")

    with pytest.raises(DriverError, match="wrong numbers") as caught:
        on_delegate(mode="lie").probe()

    assert caught.value.domain == "delegate"

    with pytest.raises(DriverError, match="0 of 1 nodes") as caught:
        on_delegate(mode="none").probe()

    assert caught.value.name == "UnsupportedModel"


def test_a_device_that_lies_is_seen_in_the_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, small_network())
    with loaded(on_delegate(mode="lie"), path) as instance:
        assert worst(instance, path) > 0.05


def test_a_slow_device_is_slow(tmp_path: Path) -> None:
    path = written(tmp_path, small_network())
    steps: Steps = [["load", path, "auto", {}], ["time", 1, 3]]
    _, taken = isolated("npu", steps, options=options(latency_us="50000")).answers

    assert min(taken) >= 50


def test_other_shapes_of_a_model_that_allows_them(tmp_path: Path) -> None:
    path = written(tmp_path, generate.dynamic_batch())
    backend = NpuBackend({**options(), "min_arithmetic": 0})
    # Its addition is of two shapes, which this delegate leaves alone.
    with pytest.raises(UnsupportedModel, match="0 of 2 nodes"):
        backend.load(LoadRequest(path, "auto", {"x": (3, 4)}))

    with pytest.raises(BadShape):
        backend.load(LoadRequest(path, "auto", {"x": (3, 5)}))


def test_a_precision_that_it_has_not(tmp_path: Path) -> None:
    path = written(tmp_path, small_network())
    with pytest.raises(UnsupportedModel, match="not int4"):
        on_delegate().load(LoadRequest(path, "int4"))


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("fail_create", "cannot open /dev/testnpu0: No such device"),
        ("wrong", "unknown mode"),
    ],
)
def test_a_delegate_that_cannot_be_created_is_absent(mode: str, said: str) -> None:
    with pytest.raises(DriverError, match="delegate:2 kTfLiteDelegateError") as caught:
        on_delegate(mode=mode)

    assert said in caught.value.text


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("fail_prepare", "firmware not loaded"),
        ("fail_allocate", "no memory on the device"),
    ],
)
def test_a_refusal_at_prepare_has_the_plugins_words(
    mode: str, said: str, tmp_path: Path
) -> None:
    path = written(tmp_path, small_network())
    with pytest.raises(DriverError, match="delegate:2 kTfLiteDelegateError") as caught:
        on_delegate(mode=mode).load(LoadRequest(path))

    assert said in caught.value.text


def test_a_failed_run_is_an_error_and_never_the_cpus_result(tmp_path: Path) -> None:
    path = written(tmp_path, small_network())
    with loaded(on_delegate(mode="fail_invoke", fail_after="1"), path) as instance:
        assert worst(instance, path) < TOLERANCE
        for run in (2, 3):
            with pytest.raises(DriverError, match="delegate:1 kTfLiteError") as caught:
                worst(instance, path)

            assert f"device lost in run {run}" in caught.value.text


def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    path = str(tmp_path / "libnone.so")
    with pytest.raises(DriverError, match="errno:2 ENOENT") as caught:
        NpuBackend({"delegate": path})

    assert path in caught.value.text


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / "libnone.so"
    path.write_bytes(b"no library at all\n")
    with pytest.raises(DriverError, match="errno:8 ENOEXEC"):
        NpuBackend({"delegate": str(path)})


def test_a_library_whose_own_libraries_are_missing(tmp_path: Path) -> None:
    source = tmp_path / "needed.c"
    source.write_text("int needed(void) { return 1; }\n")
    build = ["cc", "-shared", "-fPIC", "-o"]
    needed = tmp_path / "libvendor_runtime.so"
    subprocess.run([*build, str(needed), str(source)], check=True)
    path = tmp_path / "libvendor_delegate.so"
    link = ["-Wl,--no-as-needed", f"-L{tmp_path}", "-lvendor_runtime"]
    subprocess.run([*build, str(path), str(source), *link], check=True)
    needed.unlink()
    with pytest.raises(DriverError, match="ELIBACC") as caught:
        NpuBackend({"delegate": str(path)})

    assert "libvendor_runtime.so" in caught.value.text


def test_a_library_that_is_no_delegate() -> None:
    path = str(native_build.library("stub_neuralnetworks"))
    with pytest.raises(DriverError, match="delegate:1 kTfLiteError") as caught:
        NpuBackend({"delegate": path})

    assert "is no TFLite external delegate" in caught.value.text


@pytest.mark.parametrize(
    "own", [{"mode": "abort_prepare"}, {"abort_after": "0"}], ids=["prepare", "run"]
)
def test_a_crash_ends_only_that_process(own: dict[str, str], tmp_path: Path) -> None:
    path = written(tmp_path, small_network())
    steps: Steps = [["load", path, "auto", {}], ["run", 1]]
    result = isolated("npu", steps, options=options(**own))

    assert result.status == -6
    assert len(result.answers) == (0 if "mode" in own else 1)
    # Its last words are the supervisor's to read.
    assert "assertion failed" in result.stderr


def test_a_hang_is_ended_from_outside(tmp_path: Path) -> None:
    path = written(tmp_path, small_network())
    steps: Steps = [["load", path, "auto", {}], ["run", 1]]
    assert hangs_after(1, "npu", steps, options=options(mode="hang"))


def test_the_first_known_delegate_of_the_usual_places(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    folders = (str(first), str(second))
    assert find_delegate(folders) == ""

    (second / KNOWN_DELEGATES[0]).touch()
    assert find_delegate(folders) == str(second / KNOWN_DELEGATES[0])

    (first / KNOWN_DELEGATES[2]).touch()
    assert find_delegate(folders) == str(first / KNOWN_DELEGATES[2])
    assert "/vendor/lib64" in usual_folders()


@pytest.mark.parametrize(
    "wrong",
    [
        {"delegate": 7},
        {"delegate_options": ["a"]},
        {"threads": 0},
        {"min_arithmetic": 1.5},
        {"min_arithmetic": True},
        {"provider": "magic"},
    ],
)
def test_options_of_a_wrong_kind(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadConfiguration):
        NpuBackend({**options(), **wrong})
