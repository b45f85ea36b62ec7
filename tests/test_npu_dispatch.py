"""LiteRT's NPU path through Intel's plugin, where that is installed, and its absence.

On a machine without an NPU the plugin's CPU device does the arithmetic: that shows the path and
accelerates nothing. `SWITCHGEAR_TEST_INTEL_PYTHON` names a Python whose packages are
`ai-edge-litert`, `ai-edge-litert-sdk-intel` and `openvino` of versions that belong together.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import isolated_backend
import pytest
from npu_helpers import written
from small_network import small_network

from switchgear.backends import generate
from switchgear.backends.npu.backend import NpuBackend
from switchgear.backends.npu.dispatch import find_plugins
from switchgear.ipc.errors import DriverError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]
SOURCE = Path(__file__).parent.parent / "src"
ON_CPU = {"provider": "dispatch", "vendor": "intel_openvino", "device": "CPU"}


def intel_python() -> str:
    """A Python that has the plugin and all that it needs; skips the test without one."""
    python = os.environ.get("SWITCHGEAR_TEST_INTEL_PYTHON", sys.executable)
    found = subprocess.run(
        [python, "-c", "import openvino, ai_edge_litert_sdk_intel"],
        capture_output=True,
        text=True,
    )
    if found.returncode:
        said = found.stderr.strip().splitlines()[-1]
        pytest.skip(
            f"{said}; the path is tested with ai-edge-litert==2.3.0 "
            "ai-edge-litert-sdk-intel==2.3.0 openvino==2026.3.1"
        )

    return python


def on_intel(steps: isolated_backend.Steps, options: dict[str, Any]) -> list[Any]:
    done = subprocess.run(
        [intel_python(), isolated_backend.__file__, json.dumps(["npu", options, steps])],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith(">")]


def test_the_path_works_and_says_that_it_accelerates_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, small_network())
    steps: isolated_backend.Steps = [
        ["identity"],
        ["probe"],
        ["load", path, "auto", {}],
        ["run", 1],
        ["run", 2],
    ]
    identity, probe, loaded, *shares = on_intel(steps, ON_CPU)

    assert "CPU device, no acceleration" in identity["device"]
    assert identity["driver"].startswith("OpenVINO ")
    assert identity["library"].endswith("libLiteRtDispatch_IntelOpenvino.so")
    assert "no acceleration" in probe
    assert "convolution exact" in probe
    assert "no acceleration" in loaded["engine"]
    assert loaded["coverage"] == [8, 8, 1.0]
    assert loaded["same_info"]
    for share in shares:
        # It computes in bfloat16 where the processor can.
        assert max(share.values()) < 3e-2


def test_a_model_that_the_plugin_does_not_take_whole_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, small_network("ZEROS_LIKE"))
    (refused,) = on_intel([["load", path, "auto", {}]], ON_CPU)

    assert refused["error"][2] == "UnsupportedModel"
    assert "8 of 9 nodes" in refused["error"][3]


def test_state_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, generate.accumulator(2))
    (refused,) = on_intel([["load", path, "auto", {}]], ON_CPU)

    assert refused["error"][2] == "UnsupportedModel"


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    answer, *_ = on_intel([["probe"]], {"provider": "dispatch", "vendor": "intel_openvino"})
    if "error" not in answer:
        pytest.skip("this machine has an Intel NPU")

    assert answer["error"][:3] == ["errno", 19, "ENODEV"]
    assert "no device NPU here" in answer["error"][3]


def test_without_the_vendors_libraries_the_reason_is_told() -> None:
    if importlib.util.find_spec("openvino") is not None:
        pytest.skip("openvino is installed")

    with pytest.raises(DriverError, match="ENODEV") as caught:
        NpuBackend(ON_CPU)

    assert "openvino: No module named 'openvino'" in caught.value.text


def test_a_vendor_that_the_package_has_not() -> None:
    with pytest.raises(DriverError, match="no plugin acme for this processor"):
        NpuBackend({"provider": "dispatch", "vendor": "acme"})


def test_plugins_are_those_with_both_libraries(tmp_path: Path) -> None:
    names = {"compiler": "libLiteRtCompilerPlugin_X.so", "dispatch": "libLiteRtDispatch_X.so"}
    for vendor, kinds in {"a": ["compiler"], "b": ["compiler", "dispatch"], "c": []}.items():
        (tmp_path / "vendors" / vendor).mkdir(parents=True)
        for kind in kinds:
            folder = tmp_path / "vendors" / vendor / kind
            folder.mkdir()
            (folder / names[kind]).touch()

    (plugin,) = find_plugins(str(tmp_path))
    assert plugin.folder == "b"
    assert plugin.compiler.endswith("b/compiler/libLiteRtCompilerPlugin_X.so")
    assert find_plugins(str(tmp_path / "none")) == []
