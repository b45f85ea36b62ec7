"""Every model on every backend: error, latency, first result cold and warm, CPU time.

    python benchmarks/engines.py [--models face,mobilenet] [--backends vulkan,opencl,npu]
        [--catalogue] [--cache DIR] [--delegate FILE] [--json FILE] [MODEL.tflite ...]

Each pair goes through the same disposable process as in the daemon, at the usual priority:
compiled with empty caches (cold), then loaded as a serving worker loads it (warm), both times
held against the CPU's answers. With `--cache` the folder is kept, and what is there already is
warm from the start. Without files the generated MobileNets and the examples' face detector are
taken; `--catalogue` takes every model that the tests know, which needs the network once.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from figures import ROOT

from switchgear.backends.driver_caches import environment, make_folders
from switchgear.backends.registry import installed

PAIRS: Final = (("vulkan", "auto"), ("opencl", "auto"), ("opencl", "int4"), ("npu", "auto"))
LIMIT_S: Final = 900.0
HEADINGS: Final = (
    *("model", "backend", "as", "verdict", "error", "limit", "run ms", "cpu ms", "on it"),
    *("cold s", "warm s", "why not"),
)


@dataclass(frozen=True, slots=True)
class Subject:
    """One model: its name and where its bytes lie."""

    name: str
    path: Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", metavar="MODEL.tflite", nargs="*", type=Path)
    parser.add_argument("--catalogue", action="store_true", help="every model the tests know")
    parser.add_argument("--models", help="only those whose names contain one of these words")
    parser.add_argument("--backends", help="only these, by comma; default all installed")
    parser.add_argument("--cache", type=Path, help="keep the prepared files and caches here")
    parser.add_argument("--delegate", help="a TFLite external delegate for the npu backend")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for each process")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.cache or Path(folder)
        make_folders(root)
        rows = []
        for subject in subjects(arguments, Path(folder)):
            cpu = on_the_cpu(subject)
            rows.append(cpu)
            print_row(cpu, first=len(rows) == 1)
            for backend, asked in PAIRS:
                if backend in wanted(arguments):
                    row = pair(root, subject, backend, asked, arguments)
                    rows.append(row)
                    print_row(row, first=False)

    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")

    # A pair that is refused with its reason is no failure; a wrong one is caught, and told.
    return 1 if any(row["verdict"] == "failed" for row in rows) else 0


def wanted(arguments: argparse.Namespace) -> set[str]:
    here = set(installed()) - {"cpu"}
    return here & set(arguments.backends.split(",")) if arguments.backends else here


def subjects(arguments: argparse.Namespace, folder: Path) -> list[Subject]:
    """The models, generated ones written to `folder`."""
    from switchgear.backends import generate

    found = [Subject(path.stem, path) for path in arguments.files]
    if not found:
        for name, quantised in (("mobilenet_v1", False), ("mobilenet_v1_int8", True)):
            path = folder / f"{name}.tflite"
            path.write_bytes(generate.mobilenet_v1(quantised))
            found.append(Subject(name, path))

        found += catalogue() if arguments.catalogue else [face()]

    words = (arguments.models or "").split(",")
    return [each for each in found if any(word in each.name for word in words)]


def face() -> Subject:
    sys.path.insert(0, str(ROOT / "examples"))
    from packages import FACE_MODEL, fetch

    return Subject("face_detection_short_range", fetch(FACE_MODEL))


def catalogue() -> list[Subject]:
    sys.path.insert(0, str(ROOT / "tests"))
    from model_catalogue import CATALOGUE

    return [Subject(each.name, each.fetch()) for each in CATALOGUE if not each.lacking]


def on_the_cpu(subject: Subject) -> dict[str, Any]:
    """The same measurement on the cpu backend, which is held against other kernels."""
    return {
        "model": subject.name,
        **row_of("cpu", "auto", *runs_of(None, subject, "cpu", "auto")),
    }


def pair(
    root: Path, subject: Subject, backend: str, asked: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if backend == "npu" and arguments.delegate:
        options = {"delegate": arguments.delegate}

    cold, warm = runs_of(root, subject, backend, asked, options, arguments.limit)
    return {"model": subject.name, **row_of(backend, asked, cold, warm)}


def runs_of(
    root: Path | None,
    subject: Subject,
    backend: str,
    asked: str,
    options: dict[str, Any] | None = None,
    limit_s: float = LIMIT_S,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of a cold and of a warm process; the warm one is empty after a refusal."""
    digest = hashlib.sha256(subject.path.read_bytes()).hexdigest()
    cache = "" if root is None else str(root / "models" / digest)
    command = [
        *(sys.executable, str(ROOT / "benchmarks" / "engines_child.py")),
        *(str(subject.path), backend, asked, cache, json.dumps(options or {})),
    ]
    surroundings = dict(os.environ) if root is None else {**os.environ, **environment(root)}
    cold = process([*command, "cold"], surroundings, limit_s)
    warm = process([*command, "warm"], surroundings, limit_s) if cold["ok"] else {}
    return cold, warm


def process(command: list[str], surroundings: dict[str, str], limit_s: float) -> dict[str, Any]:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=surroundings,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"ok": False, "verdict": "failed", "text": f"not done within {limit_s:g} s"}

    for line in reversed(done.stdout.splitlines()):
        with contextlib.suppress(ValueError):
            found: dict[str, Any] = json.loads(line)
            if "ok" in found:
                return found

    return {"ok": False, "verdict": "failed", "text": f"it ended with {done.returncode}"}


def row_of(
    backend: str, asked: str, cold: dict[str, Any], warm: dict[str, Any]
) -> dict[str, Any]:
    last = warm or cold
    coverage = last.get("coverage") or {}
    return {
        "backend": backend,
        "as": last.get("precision", asked),
        "verdict": "right" if last["ok"] else last.get("verdict", "failed"),
        "error": last.get("error"),
        "snr_db": last.get("snr_db"),
        "tolerance": last.get("tolerance"),
        "run_ms": scaled(last.get("run_us")),
        "cpu_ms": scaled(last.get("cpu_us")),
        "nodes": coverage.get("nodes"),
        "nodes_total": coverage.get("nodes_total"),
        "cold_s": first_result_s(cold),
        "warm_s": first_result_s(warm),
        "why_not": "" if last["ok"] else last.get("text", ""),
    }


def scaled(us: float | None) -> float | None:
    return None if us is None else us / 1000


def first_result_s(result: dict[str, Any]) -> float | None:
    if "load_us" not in result:
        return None

    return float(result["load_us"] + result["first_run_us"]) / 1e6


def print_row(row: dict[str, Any], *, first: bool) -> None:
    """One line of a table in Markdown."""
    if first:
        print("| " + " | ".join(HEADINGS) + " |")
        print("|" + "---|" * len(HEADINGS))

    error = "" if row["error"] is None else f"{row['error']:.1e}"
    limit = "" if row["tolerance"] is None else f"{row['tolerance']:.0e}"
    if row["as"] == "int4" and row["snr_db"] is not None:
        error, limit = f"{row['snr_db']:.0f} dB", "20 dB"

    cells = [
        *(row["model"], row["backend"], row["as"], row["verdict"], error, limit),
        *(number(row["run_ms"]), number(row["cpu_ms"])),
        "" if row["nodes"] is None else f"{row['nodes']}/{row['nodes_total']}",
        *(number(row["cold_s"]), number(row["warm_s"]), row["why_not"].split("\n")[0][:160]),
    ]
    print("| " + " | ".join(cells) + " |", flush=True)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
