"""A process that loads a model on a backend once, runs it once, and says how long that took.

    python benchmarks/prewarm_child.py BACKEND MODEL PRECISION CACHE [--compile]

As a serving worker does it, without the lowered priority of a preparer. One JSON line.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from time import monotonic, perf_counter, process_time
from typing import Any

from switchgear.backends.contract import LoadRequest
from switchgear.backends.known_answer.reference import Array, run_once

FACTORIES = {
    "vulkan": "switchgear.backends.vulkan.backend:VulkanBackend",
    "opencl": "switchgear.backends.opencl.backend:OpenClBackend",
}


def main() -> None:
    name, path, precision, cache = sys.argv[1:5]
    inputs = _inputs()
    module, _, factory = FACTORIES[name].partition(":")
    cpu_begin = process_time()
    begin = perf_counter()
    backend: Any = getattr(import_module(module), factory)({})
    opened = perf_counter()
    request = LoadRequest(path, precision, {}, cache, compile="--compile" in sys.argv)
    instance = backend.load(request)
    loaded = perf_counter()
    run_once(instance, inputs(instance))
    ended = perf_counter()
    figures = {
        "open_s": opened - begin,
        "load_s": loaded - opened,
        "first_run_s": ended - loaded,
        "first_result_s": ended - begin,
        "cpu_s": process_time() - cpu_begin,
        "at_s": monotonic(),
    }
    print(json.dumps(figures), flush=True)
    # Drivers may hang in their exit handlers.
    os._exit(0)


def _inputs() -> Any:
    import numpy as np

    def inputs(instance: Any) -> list[Array]:
        return [
            np.random.default_rng(1).uniform(0, 1, spec.shape).astype(spec.dtype)
            for spec in instance.info.inputs
        ]

    return inputs


if __name__ == "__main__":
    main()
