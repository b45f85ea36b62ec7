"""Figures of the OpenCL backend: launches, replay, four bits, first results, the search.

    python benchmarks/opencl.py [--cache DIR] [--tune SECONDS] [--json FILE] [PART ...]

Parts: `launch` (what a launch costs beyond its kernel), `replay` (against tinygrad's own replay
of the same kernels), `int4` (4096x4096 fully connected, batch 1), `start` (first result of a
new process), `xnnpack` (the ratio to the CPU backend), `tune` (needs --tune; 900 is the budget
that its bar is for). Without parts: all. The model is MobileNet v1 1.0 224 unless --model names
another.

Compiling takes minutes; with --cache a second run does not compile again. Bars are those of the
project's goals; other programs on the machine spoil the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from figures import Figures

from switchgear.backends import generate
from switchgear.backends.contract import Instance, LoadRequest
from switchgear.backends.cpu import CpuBackend
from switchgear.backends.generate.dense import dense
from switchgear.backends.opencl.backend import OpenClBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PARTS: Final = ("launch", "replay", "int4", "start", "xnnpack", "tune")
RUNS: Final = 30
STARTS: Final = 5

# Prints when its first result is there, on the clock of the parent.
START: Final = """
import sys, time
from switchgear.backends.contract import LoadRequest
from switchgear.backends.opencl.backend import OpenClBackend
from switchgear.backends.trial import first_run

instance = OpenClBackend({}).load(LoadRequest(sys.argv[1], "fp32", cache=sys.argv[2]))
first_run(instance)
print(time.monotonic())
"""


class Bound:
    """An instance with an input and an output slot; inputs are random, always the same."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        rng = np.random.default_rng(1)
        sources = []
        for spec in instance.info.inputs:
            memory = aligned(spec.capacity_bytes)
            values = np.frombuffer(memory, spec.dtype)
            if values.dtype.kind == "f":
                values[:] = rng.uniform(-1, 1, values.shape)
            sources.append(memory)

        targets = [aligned(spec.capacity_bytes) for spec in instance.info.outputs]
        self._slots = instance.attach_input(sources), instance.attach_output(targets)

    def run(self) -> None:
        self.instance.run(*self._slots)


def aligned(size_bytes: int) -> memoryview:
    """Memory as an arena has it, at a multiple of 256."""
    array = np.zeros(size_bytes + 256, np.uint8)
    begin = -array.ctypes.data % 256
    return array[begin : begin + size_bytes].data


def times_ms(runs: Sequence[Callable[[], object]]) -> list[tuple[float, float]]:
    """For each: median wall time and median CPU time of the calling thread, in turns."""
    for run in runs:
        run()
        run()

    wall: list[list[float]] = [[] for _ in runs]
    cpu: list[list[float]] = [[] for _ in runs]
    for _ in range(RUNS):
        for number, run in enumerate(runs):
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            run()
            wall[number].append((time.perf_counter() - begin) * 1e3)
            cpu[number].append((time.thread_time() - begin_cpu) * 1e3)

    return [
        (statistics.median(w), statistics.median(c)) for w, c in zip(wall, cpu, strict=True)
    ]


def load(model: Path, cache: Path, precision: str = "fp32", tune_s: float = 0) -> Any:
    """An instance of the compiled model; compiles it where the cache does not have it."""
    cache.mkdir(parents=True, exist_ok=True)
    request = LoadRequest(str(model), precision, {}, str(cache), True, tune_s)
    return OpenClBackend({}).load(request)


def launch(figures: Figures, model: Path, cache: Path) -> None:
    instance = load(model, cache)
    Bound(instance).run()
    profiles = instance._replay.profiled_runs(RUNS)
    instance.close()
    count = len(profiles[0][1])
    # Between two kernels, and before the first and after the last; each by its own median, so
    # that what other programs do to one place of one run does not count.
    gaps = [
        statistics.median(spans[place + 1][0] - spans[place][1] for _, spans in profiles)
        for place in range(count - 1)
    ]
    ends = statistics.median(took - (spans[-1][1] - spans[0][0]) for took, spans in profiles)
    how = f"{model.stem}, {count} launches: time without a kernel, medians of {RUNS} runs"
    figures.add("launch_cost", (sum(gaps) + ends) / count / 1e3, "us", 10.0, how=how)
    whole = [took - sum(end - begin for begin, end in spans) for took, spans in profiles]
    how = "the same of whole runs: everything that disturbs counts"
    figures.add("launch_cost_disturbed", statistics.median(whole) / count / 1e3, "us", how=how)
    notes = instance.notes
    for name in ("naive", "planned", "lower_bound"):
        value = int(notes[f"memory_{name}_bytes"]) / 1e6
        figures.add(f"memory_{name}", value, "MB", how=f"intermediates of {model.stem}")


def replay(figures: Figures, model: Path, cache: Path) -> None:
    """In a process of its own: tinygrad is set up as it comes."""
    command = [sys.executable, __file__, "--child-replay", str(model)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"the replay's process failed:\n{result.stderr}")

    (theirs_ms, theirs_cpu), (ours_ms, ours_cpu) = json.loads(result.stdout.splitlines()[-1])
    instance = load(model, cache)
    [(own_ms, own_cpu)] = times_ms([Bound(instance).run])
    instance.close()
    figures.add("tinygrad_replay", theirs_ms, "ms", how=f"TinyJit of {model.stem}")
    how = "the same kernels by our replay, in turns with TinyJit"
    figures.add("replay_same_kernels", ours_ms, "ms", theirs_ms, how=how)
    figures.add("replay_own_products", own_ms, "ms", theirs_ms, how="as it is served")
    figures.add("tinygrad_replay_cpu", theirs_cpu, "ms", how="CPU time of the calling thread")
    figures.add("replay_same_kernels_cpu", ours_cpu, "ms", theirs_cpu, how="likewise")
    figures.add("replay_own_products_cpu", own_cpu, "ms", theirs_cpu, how="likewise")


def child_replay(model: Path) -> None:
    from switchgear.backends.opencl import tinygrad_jit
    from switchgear.backends.opencl.compiler import assemble
    from switchgear.backends.opencl.device import Device
    from switchgear.backends.opencl.model import read_subject
    from switchgear.backends.opencl.replay import Replay
    from switchgear.backends.opencl.runner import Runner, zeros

    device = Device()
    subject = read_subject(device, LoadRequest(str(model)))
    tinygrad_jit.open_device(
        str(device.device.name).strip(),
        str(device.device.driver_version).strip(),
        group_memory=True,
    )
    from tinygrad import Tensor, TinyJit

    from switchgear.backends.opencl.importer import build

    program = build(subject.graph)
    specs = subject.info.inputs
    captured = tinygrad_jit.capture(program, [(spec.shape, spec.dtype) for spec in specs])
    artefact = assemble(captured, subject.info, "fp32", {})
    runner = Runner(Replay(device, artefact), artefact)
    runner.run([zeros(spec) for spec in specs])

    inputs = [Tensor(zeros(spec)).realize() for spec in specs]
    jit = TinyJit(lambda *tensors: [each.contiguous().realize() for each in program(*tensors)])
    for _ in range(3):
        outputs = jit(*inputs)

    def theirs() -> None:
        jit(*inputs)
        # Waits for the device, as our replay does.
        outputs[0].numpy()

    print(json.dumps(times_ms([theirs, runner.again])))


def int4(figures: Figures, cache: Path) -> None:
    model = cache / "dense_4096.tflite"
    model.write_bytes(dense((4096, 4096)))
    try:
        four = load(model, cache / "dense", "int4")
    except Exception as error:
        raise SystemExit(f"int4 was refused: {error}") from None

    plain = load(model, cache / "dense")
    (four_ms, _), (plain_ms, _) = times_ms([Bound(four).run, Bound(plain).run])
    figures.add("dense_4096_fp32", plain_ms, "ms", how="our own artefact, batch 1")
    figures.add("dense_4096_int4", four_ms, "ms", how=f"{four.notes['int4_snr_db']} dB")
    ratio = plain_ms / four_ms
    figures.add("dense_4096_ratio", ratio, "times", 3.0, ratio >= 3, "fp32 / int4")
    kernels = [sum(each._replay.launch_times_ns(RUNS)) for each in (plain, four)]
    how = "the same by the kernels' own events, the least of each"
    figures.add("dense_4096_kernels_ratio", kernels[0] / kernels[1], "times", how=how)


def start(figures: Figures, model: Path, cache: Path) -> None:
    load(model, cache).close()
    took = []
    for _ in range(STARTS):
        begin = time.monotonic()
        result = subprocess.run(
            [sys.executable, "-c", START, str(model), str(cache)],
            capture_output=True,
            text=True,
            check=True,
        )
        took.append(float(result.stdout.splitlines()[-1]) - begin)

    how = f"{model.stem} in a new process, caches warm, median of {STARTS}"
    figures.add("first_result", statistics.median(took), "s", 0.5, how=how)


def xnnpack(figures: Figures, model: Path, cache: Path) -> None:
    instance = load(model, cache)
    threads = len(os.sched_getaffinity(0))
    cpu = CpuBackend({"threads": threads}).load(LoadRequest(str(model)))
    (ours_ms, _), (theirs_ms, _) = times_ms([Bound(instance).run, Bound(cpu).run])
    instance.close()
    cpu.close()
    figures.add("opencl_fp32", ours_ms, "ms", how=model.stem)
    figures.add("xnnpack", theirs_ms, "ms", how=f"{model.stem}, {threads} threads")
    figures.add("ratio_to_xnnpack", ours_ms / theirs_ms, "times", how="not judged")


def tune(figures: Figures, model: Path, cache: Path, tune_s: float) -> None:
    begin = time.monotonic()
    instance = load(model, cache / "tuned", tune_s=tune_s)
    took_s = time.monotonic() - begin
    instance.close()
    notes = instance.notes
    untuned_ms, tuned_ms = float(notes["untuned_ms"]), float(notes["tuned_ms"])
    how = f"{model.stem}, {notes['tune_tried']} kernels tried, {notes['tune_changed']} changed"
    figures.add("untuned", untuned_ms, "ms", how=model.stem)
    figures.add("tuned", tuned_ms, "ms", untuned_ms, tuned_ms < untuned_ms, how)
    how = "with compiling; 0 where the cache had it"
    figures.add("tune_took", took_s, "s", tune_s * 1.1, how=how)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="example: python benchmarks/opencl.py --cache /tmp/opencl launch int4",
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--model", type=Path, help="default: MobileNet v1 1.0 224, generated")
    parser.add_argument("--cache", type=Path, help="keeps what was compiled")
    parser.add_argument("--tune", type=float, default=0, metavar="S", help="the search's time")
    parser.add_argument("--json", metavar="FILE", help="writes the figures there too")
    parser.add_argument("--child-replay", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child_replay:
        child_replay(options.child_replay)
        return 0

    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}")

    with contextlib.ExitStack() as stack:
        cache = options.cache
        if cache is None:
            cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="opencl-")))

        cache.mkdir(parents=True, exist_ok=True)
        model = options.model
        if model is None:
            model = cache / "mobilenet_v1.tflite"
            model.write_bytes(generate.mobilenet_v1())

        figures = Figures()
        calls: dict[str, Callable[[], None]] = {
            "launch": lambda: launch(figures, model, cache),
            "replay": lambda: replay(figures, model, cache),
            "int4": lambda: int4(figures, cache),
            "start": lambda: start(figures, model, cache),
            "xnnpack": lambda: xnnpack(figures, model, cache),
        }
        if options.tune:
            calls["tune"] = lambda: tune(figures, model, cache, options.tune)

        for part in options.parts or calls:
            if part not in calls:
                parser.error("the part tune needs --tune SECONDS")

            calls[part]()

        return figures.finish(options.json)


if __name__ == "__main__":
    raise SystemExit(main())
