"""The disposable process that first meets a new model: it parses, allocates and runs it once.

A crafted file can crash or hang the parser, so this happens where nobody is served. The verdict
goes to stdout as one JSON object; the caller sets the time limit and kills.
"""

from __future__ import annotations

import argparse
import errno
import json
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic_ns
from typing import Any, Final

from switchgear.backends.contract import LoadRequest, ModelInfo
from switchgear.backends.cpu import CpuBackend, dynamic_capacity
from switchgear.backends.trial import first_run
from switchgear.backends.worker import failure
from switchgear.ipc.errors import BadShape, DriverError, SwitchgearError
from switchgear.ipc.process import JOB_SCORE, begin_child
from switchgear.ipc.slot import SlotEntry
from switchgear.ipc.worker import Packet, spec_to_json

MAX_OPERATOR_KINDS: Final = 256


def anonymous_bytes() -> int:
    """Anonymous memory of this process (RssAnon), in bytes."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024

    return 0


def with_output_sizes(info: ModelInfo, entries: Sequence[SlotEntry]) -> ModelInfo:
    """The model's description once a run has shown its outputs."""
    outputs = []
    for spec, entry in zip(info.outputs, entries, strict=True):
        if entry.length != spec.capacity_bytes or entry.shape != spec.shape or spec.dynamic:
            spec = replace(
                spec,
                shape=entry.shape,
                capacity_bytes=dynamic_capacity(entry.length),
                dynamic=True,
            )

        outputs.append(spec)

    return replace(info, outputs=tuple(outputs))


def describe(info: ModelInfo) -> Packet:
    operators = sorted(info.operators.items(), key=lambda item: (-item[1], item[0]))
    return {
        "inputs": [spec_to_json(spec) for spec in info.inputs],
        "outputs": [spec_to_json(spec) for spec in info.outputs],
        "names": info.names,
        "state": info.state,
        "operators": dict(operators[:MAX_OPERATOR_KINDS]),
    }


def validate(path: str, shapes: dict[str, tuple[int, ...]], options: dict[str, Any]) -> Packet:
    """Tries the model at `path`; the verdict as a packet.

    :raises DriverError: the engine refuses it.
    :raises SwitchgearError: a shape or a tensor is not one that can be served.
    """
    backend = CpuBackend(options)
    before = anonymous_bytes()
    begin_ns = monotonic_ns()
    instance = backend.load(LoadRequest(path, "auto", shapes))
    loaded_ns = monotonic_ns()
    entries = first_run(instance)
    first_ns = monotonic_ns()
    # Once more: the first run's time has the engine's own warm-up in it.
    first_run(instance)
    again_ns = monotonic_ns()
    info = with_output_sizes(instance.info, entries)
    return {
        "ok": True,
        "engine": backend.engine,
        "engine_version": backend.engine_version,
        "parse_us": (loaded_ns - begin_ns) // 1000,
        "first_run_us": (first_ns - loaded_ns) // 1000,
        "run_us": (again_ns - first_ns) // 1000,
        "instance_bytes": max(0, anonymous_bytes() - before),
        **describe(info),
    }


def too_large(limit_bytes: int, shapes: object) -> DriverError | BadShape:
    """The verdict on a model that did not fit; on the shapes, where some were chosen."""
    text = f"needs more than the {limit_bytes} bytes of memory of a trial"
    if shapes:
        return BadShape(f"the model {text} with these shapes")

    return DriverError("errno", errno.ENOMEM, "ENOMEM", f"the model {text}")


def refused(error: DriverError | SwitchgearError, *, lasting: bool) -> Packet:
    """A verdict that is kept only where it is `lasting`: another trial would end the same."""
    return {"ok": False, "lasting": lasting, **failure(error)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="switchgear-validator")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--shapes", type=json.loads, default={})
    parser.add_argument("--address-space", type=int, required=True)
    parser.add_argument("--cpu-seconds", type=int, required=True)
    parser.add_argument("--options", type=json.loads, default={})
    arguments = parser.parse_args()
    begin_child(arguments.parent, JOB_SCORE)
    limit = arguments.address_space
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    seconds = arguments.cpu_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    shapes = {str(name): tuple(shape) for name, shape in arguments.shapes.items()}
    try:
        verdict = validate(f"/proc/self/fd/{arguments.fd}", shapes, arguments.options)
    except MemoryError:
        verdict = refused(too_large(limit, shapes), lasting=False)
    except (DriverError, SwitchgearError) as error:
        of_system = isinstance(error, DriverError) and error.domain == "errno"
        short = of_system and error.name == "ENOMEM"
        cause = too_large(limit, shapes) if short else error
        verdict = refused(cause, lasting=not of_system)

    sys.stdout.write(json.dumps(verdict))
    return 0


if __name__ == "__main__":
    sys.exit(main())
