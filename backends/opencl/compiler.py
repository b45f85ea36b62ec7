"""A traced function becomes an artefact: one program, planned memory, the driver's binary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from switchgear.backends.contract import Coverage, ModelInfo
from switchgear.backends.opencl.artefact import Artefact, Buffer, BufferKind, Launch
from switchgear.backends.opencl.plan import LiveRange, Plan, aligned, plan_memory
from switchgear.backends.opencl.replay import Replay
from switchgear.backends.opencl.tinygrad_jit import Captured
from switchgear.ipc.errors import UnsupportedModel


def assemble(
    captured: Captured,
    info: ModelInfo,
    precision: str,
    key: Mapping[str, str],
    notes: Mapping[str, str] | None = None,
) -> Artefact:
    """The artefact of a traced function, still without a binary.

    :raises UnsupportedModel: its outputs are not those of `info`.
    """
    for what, indices, specs in (
        ("input", captured.inputs, info.inputs),
        ("output", captured.outputs, info.outputs),
    ):
        sizes = [captured.buffers[i].size_bytes for i in indices]
        if sizes != [spec.capacity_bytes for spec in specs]:
            raise UnsupportedModel(f"an {what} has another size than the model says")

    source, names, kernels = _program(captured)
    buffers, constants, plan = _place(captured)
    facts = {
        "memory_naive_bytes": str(plan.naive_bytes),
        "memory_planned_bytes": str(plan.planned_bytes),
        "memory_lower_bound_bytes": str(plan.lower_bound_bytes),
    }
    nodes = sum(info.operators.values())
    launches = tuple(
        Launch(kernel, launch.global_size, launch.local_size, launch.arguments)
        for kernel, launch in zip(kernels, captured.launches, strict=True)
    )
    return Artefact(
        key=dict(key),
        notes={**facts, **(notes or {})},
        info=info,
        precision=precision,
        coverage=Coverage(nodes, nodes, 1.0),
        source=source,
        binary=b"",
        kernels=names,
        buffers=buffers,
        launches=launches,
        inputs=captured.inputs,
        outputs=captured.outputs,
        scratch_bytes=plan.planned_bytes,
        constants=constants,
    )


def with_binary(artefact: Artefact, replay: Replay) -> Artefact:
    """The same with the program as the driver built it for a replay that has run once."""
    return replace(artefact, binary=replay.program_binary())


def _program(captured: Captured) -> tuple[str, tuple[str, ...], list[int]]:
    """All kernels as one program; their names, and the number of each launch's."""
    numbers: dict[tuple[str, str], int] = {}
    kernels = [
        numbers.setdefault((launch.name, launch.source), len(numbers))
        for launch in captured.launches
    ]
    parts = []
    names = []
    for (name, source), number in numbers.items():
        # Two kernels of one shape have one name.
        new = f"k{number}_{name}"
        parts.append(re.sub(rf"\b{re.escape(name)}\b", new, source))
        names.append(new)

    return "\n".join(parts), tuple(names), kernels


def _place(captured: Captured) -> tuple[tuple[Buffer, ...], memoryview, Plan]:
    used: dict[int, tuple[int, int]] = {}
    for number, launch in enumerate(captured.launches):
        for index in launch.arguments:
            used[index] = (used.get(index, (number, number))[0], number)

    kinds = dict.fromkeys(captured.inputs, BufferKind.INPUT)
    for index, buffer in enumerate(captured.buffers):
        if buffer.data is not None:
            kinds[index] = BufferKind.CONSTANT

    for index in captured.outputs:
        kinds.setdefault(index, BufferKind.OUTPUT)

    scratch = [i for i in range(len(captured.buffers)) if i not in kinds]
    plan = plan_memory([LiveRange(captured.buffers[i].size_bytes, *used[i]) for i in scratch])
    offsets = dict(zip(scratch, plan.offsets, strict=True))
    constants = bytearray()
    for index, buffer in enumerate(captured.buffers):
        if buffer.data is not None:
            offsets[index] = aligned(len(constants))
            constants += bytes(offsets[index] - len(constants))
            constants += buffer.data

    buffers = tuple(
        Buffer(
            kinds.get(index, BufferKind.SCRATCH),
            buffer.size_bytes,
            offsets.get(index, 0),
            *used.get(index, (0, 0)),
        )
        for index, buffer in enumerate(captured.buffers)
    )
    return buffers, memoryview(constants), plan
