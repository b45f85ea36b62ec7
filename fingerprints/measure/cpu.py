"""The CPU test: MobileNet latency per thread count and cluster, and memory bandwidth."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from switchgear.fingerprints.measure.memory import MIB, available_bytes, largest_size
from switchgear.fingerprints.measure.mobilenet import (
    KINDS,
    Network,
    WrongOutput,
    engine,
    model,
)
from switchgear.fingerprints.measure.sampling import Contention, collect, drifted
from switchgear.fingerprints.measurement import (
    CPU,
    Measured,
    Report,
    Subject,
    own_failure,
    value_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from switchgear.fingerprints.measure.channel import Channel
    from switchgear.fingerprints.measure.options import Options

# With its copy above the last-level cache, so that the copy goes through memory.
COPY_BYTES: Final = 128 * MIB
_LEAST_COPY_BYTES: Final = 16 * MIB
_WARM_UP: Final = 3


def run(options: Options, channel: Channel) -> None:
    """Reports on the whole processor, then on each cluster where there is more than one."""
    name, version = engine()
    usable = sorted(os.sched_getaffinity(0))
    groups = clusters(Path(options.sysfs), usable)
    whole = Subject(
        api="cpu",
        name=processor_name(),
        driver_name=name,
        driver_version=version,
        device_type="cpu",
    )
    subjects = [(whole, usable, True)]
    if len(groups) > 1:
        for index, (capacity, cpus) in enumerate(groups, start=1):
            label = f"CPUs {ranges(cpus)}, capacity {capacity}"
            cluster = Subject(
                api="cpu",
                name=label,
                index=index,
                driver_name=name,
                driver_version=version,
                device_type="cluster",
            )
            subjects.append((cluster, cpus, False))

    for subject, cpus, memory in subjects:
        if subject.index in options.skip:
            continue

        channel.begin(subject)
        notes = [cluster_note(groups)] if memory else []
        started = time.monotonic()
        # Before any thread is made: the engine's threads run where their maker may.
        os.sched_setaffinity(0, cpus)
        values = _latencies(cpus, options, channel)
        if memory:
            channel.progress(0.9, "memory copy")
            values.append(_memory_copy(options))

        duration_s = time.monotonic() - started
        channel.report(Report(CPU, subject, tuple(values), tuple(notes), duration_s))


def clusters(sysfs: Path, usable: Iterable[int]) -> list[tuple[int, list[int]]]:
    """The usable CPUs by `cpu_capacity`, the largest first; one cluster of 0 where none tells.

    The kernel scales the capacity of the fastest core to 1024.
    """
    groups: dict[int, list[int]] = {}
    for cpu in usable:
        try:
            text = (sysfs / f"devices/system/cpu/cpu{cpu}/cpu_capacity").read_text()
            capacity = int(text)
        except (OSError, ValueError):
            capacity = 0

        groups.setdefault(capacity, []).append(cpu)

    return sorted(groups.items(), reverse=True)


def cluster_note(groups: list[tuple[int, list[int]]]) -> str:
    if len(groups) > 1:
        return f"{len(groups)} clusters of equal cpu_capacity"

    ((capacity, cpus),) = groups
    if capacity == 0:
        return f"one cluster, CPUs {ranges(cpus)}: the kernel tells no cpu_capacity"

    return f"one cluster, CPUs {ranges(cpus)}, all of capacity {capacity}"


def ranges(cpus: list[int]) -> str:
    """`0-3,6` from a sorted list, as the kernel writes sets of CPUs."""
    parts: list[list[int]] = []
    for cpu in cpus:
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])

    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def processor_name(root: Path = Path("/")) -> str:
    """The processor's model, or the board's where the processor has no name (Arm)."""
    try:
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            key, _, text = line.partition(":")
            if key.strip() in ("model name", "Hardware") and text.strip():
                return text.strip()
    except OSError:
        pass

    try:
        board = (root / "sys/firmware/devicetree/base/model").read_text()
        return board.rstrip("\0\n") or os.uname().machine
    except OSError:
        return os.uname().machine


def _latencies(cpus: list[int], options: Options, channel: Channel) -> list[Measured]:
    threads = {"1_thread": 1}
    if len(cpus) > 1:
        threads["all_threads"] = len(cpus)

    steps = len(KINDS) * len(threads)
    values: list[Measured] = []
    for kind in KINDS:
        channel.progress(0.85 * len(values) / steps, f"building MobileNet v1 ({kind})")
        content = model(kind)
        for label, count in threads.items():
            done = len(values) / steps

            def tick(share: float, done: float = done, text: str = f"{kind}, {label}") -> None:
                channel.progress(0.85 * (done + share / steps), text)

            values.append(_latency(f"{kind}_{label}_ms", content, count, options, tick))

    return values


def _latency(
    name: str, content: bytes, threads: int, options: Options, tick: Callable[[float], None]
) -> Measured:
    try:
        network = Network(content, threads)
        for _ in range(_WARM_UP):
            network.invoke()

        contention = Contention()
        samples = collect(
            network.invoke_ms,
            budget_s=options.budget_s / 5,
            minimum=11,
            maximum=201,
            tick=tick,
        )
        network.check()
    except ImportError as error:
        text = f"neither ai_edge_litert nor tflite_runtime can be loaded: {error}"
        return own_failure(name, "NoBackend", text)
    except (RuntimeError, ValueError, WrongOutput) as error:
        return own_failure(name, "BackendFailed", str(error))

    return value_of(
        name,
        samples,
        "ms",
        f"MobileNet v1 1.0 224 on LiteRT, {threads} threads, one inference at a time",
        disturbed=contention.disturbed or drifted(samples),
    )


def _memory_copy(options: Options) -> Measured:
    size = largest_size(COPY_BYTES, 2, available_bytes(), _LEAST_COPY_BYTES)
    source = np.ones(size, np.uint8)
    target = np.zeros(size, np.uint8)

    def sample() -> float:
        begin = time.perf_counter()
        np.copyto(target, source)
        return size / (time.perf_counter() - begin) / 1e6

    sample()
    contention = Contention()
    samples = collect(sample, budget_s=options.budget_s / 5, minimum=5, maximum=31)
    return value_of(
        "memory_copy_mb_s",
        samples,
        "MB/s",
        f"one thread copies {size // MIB} MiB; bytes copied, not read plus written",
        disturbed=contention.disturbed or drifted(samples),
    )
