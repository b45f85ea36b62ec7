"""First launches and first results, cold against warm, each in a new process.

    python benchmarks/prewarm.py [--only raw,vulkan,opencl] [--runs N] [--model F] [--json F]

Cold: every cache folder is empty. Warm: one process has filled them before. The raw kernel is
our attention-like Vulkan kernel; the whole model is face_detection_short_range unless named. A
cold compile of it takes 20 s of CPU on a software driver, and is done once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any

from figures import ROOT, Figures

from switchgear.backends.driver_caches import environment, make_folders

CHILD = Path(__file__).with_name("prewarm_child.py")
# From the field report: the first launch went from 1820 to 210 ms.
RAW_SHARE = 1 / 8.7
MODEL_SHARE = 1 / 50
OPENCL_FIRST_S = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="raw,vulkan,opencl", help="which parts, by comma")
    parser.add_argument("--runs", type=int, default=5, help="new processes for each median")
    parser.add_argument("--model", type=Path, help="a .tflite file for the whole-model parts")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    figures = Figures()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if "raw" in parts:
            add_raw(figures, root / "raw", arguments.runs)

        if "vulkan" in parts:
            add_vulkan(figures, root / "vulkan", arguments.model or face(), arguments.runs)

        if "opencl" in parts:
            add_opencl(figures, root / "opencl", arguments.model or face(), arguments.runs)

    return figures.finish(arguments.json)


def add_raw(figures: Figures, root: Path, runs: int) -> None:
    """SPIR-V to first result of the attention-like kernel, by `switchgear.backends.canary`."""
    cold = [canary_ms(root / f"cold{run}") for run in range(runs)]
    warm_root = root / "warm"
    canary_ms(warm_root)
    warm = [canary_ms(warm_root) for _ in range(runs)]
    cold_ms, warm_ms = statistics.median(cold), statistics.median(warm)
    how = f"median of {runs} new processes"
    figures.add("raw_cold_ms", cold_ms, "ms", how=f"{how}, every cache empty")
    figures.add("raw_warm_ms", warm_ms, "ms", how=f"{how}, caches filled by one before")
    figures.add("raw_warm_share", warm_ms / cold_ms, "ratio", RAW_SHARE, how="warm to cold")


def canary_ms(root: Path) -> float:
    done = started(root, [sys.executable, "-m", "switchgear.backends.canary", "--json"], True)
    result = json.loads(done.stdout)
    if not result["ok"]:
        raise SystemExit(f"the canary is wrong: {result}")

    return float(
        next(k["first_us"] for k in result["kernels"] if k["name"] == "attention") / 1e3
    )


def add_vulkan(figures: Figures, root: Path, model: Path, runs: int) -> None:
    """Load and first result of a whole model in fp32, as a serving worker does it."""
    cold = child(root, "vulkan", model, "fp32", compiling=True)
    warm = [child(root, "vulkan", model, "fp32") for _ in range(runs)]
    cold_s = cold["load_s"] + cold["first_run_s"]
    warm_s = statistics.median(each["load_s"] + each["first_run_s"] for each in warm)
    figures.add("vulkan_cold_s", cold_s, "s", how=f"{model.stem}, fp32, one process, no cache")
    figures.add("vulkan_warm_s", warm_s, "s", how=f"median of {runs} new processes")
    figures.add("vulkan_warm_share", warm_s / cold_s, "ratio", MODEL_SHARE, how="warm to cold")


def add_opencl(figures: Figures, root: Path, model: Path, runs: int) -> None:
    """From opening the backend to the first result, from an artefact and its binaries."""
    cold = child(root, "opencl", model, "fp32", compiling=True)
    warm = [child(root, "opencl", model, "fp32") for _ in range(runs)]
    figures.add(
        "opencl_cold_s", cold["first_result_s"], "s", how=f"{model.stem}, one process, no cache"
    )
    figures.add(
        "opencl_warm_s",
        statistics.median(each["first_result_s"] for each in warm),
        "s",
        OPENCL_FIRST_S,
        how=f"backend opened, loaded, first result; median of {runs} new processes",
    )
    figures.add(
        "opencl_warm_cpu_s",
        statistics.median(each["cpu_s"] for each in warm),
        "s",
        how="the CPU time of it, all threads: what is left on a busy machine",
    )
    figures.add(
        "opencl_process_s",
        statistics.median(each["process_s"] for each in warm),
        "s",
        how="the same with the start of Python and its imports",
    )


def child(
    root: Path, backend: str, model: Path, precision: str, *, compiling: bool = False
) -> dict[str, Any]:
    cache = root / "model"
    cache.mkdir(parents=True, exist_ok=True)
    arguments = [sys.executable, str(CHILD), backend, str(model), precision, str(cache)]
    begin = monotonic()
    done = started(root, [*arguments, *(["--compile"] if compiling else [])])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    result["process_s"] = result["at_s"] - begin
    return result


def started(
    root: Path, command: list[str], own_cache: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end with every driver's cache under `root`."""
    make_folders(root)
    done = subprocess.run(
        [*command, *(["--cache", str(root)] if own_cache else [])],
        env={**os.environ, **environment(root)},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")

    return done


def face() -> Path:
    """The model of the example; `./dev run` fetches it."""
    path = ROOT / ".cache" / "examples" / "face_detection_short_range.tflite"
    if not path.exists():
        raise SystemExit("no model: name one with --model, or run ./dev run once")

    return path


if __name__ == "__main__":
    sys.exit(main())
