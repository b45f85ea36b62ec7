"""The disposable process that prepares one (model, backend, precision, shapes).

    python -m switchgear.backends.preparer --fd N --parent PID --backend NAME [more]

It writes JSON lines to its standard output: a step as each begins, and the result last. It runs
only when nobody else wants the CPU, which cannot be taken back: so it never serves. The parent
sets the time limit and kills; drivers live in here, so it may crash or hang at any moment.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any, cast

from switchgear.backends.contract import Backend
from switchgear.backends.lowest_priority import run_when_idle
from switchgear.backends.preparation import Order, Preparation
from switchgear.backends.registry import open_backend
from switchgear.ipc.process import JOB_SCORE, begin_child


def main() -> int:
    arguments = _parser().parse_args()
    begin_child(arguments.parent, JOB_SCORE)
    # No limit of the address space: drivers reserve far more than they use.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Before a driver starts threads, which inherit it.
    run_when_idle()
    channel = _own_output()
    if arguments.cache:
        Path(arguments.cache).mkdir(mode=0o700, parents=True, exist_ok=True)

    order = Order(
        path=f"/proc/self/fd/{arguments.fd}",
        precision=arguments.precision,
        shapes={str(name): tuple(shape) for name, shape in arguments.shapes.items()},
        cache=arguments.cache,
        tune_s=arguments.tune,
        again=arguments.again,
        digest=arguments.digest,
        markers=Path(arguments.markers) if arguments.markers else None,
    )

    def said(packet: dict[str, Any]) -> None:
        line = memoryview(json.dumps(packet, allow_nan=False).encode() + b"\n")
        while line:
            line = line[os.write(channel, line) :]

    def opened() -> Backend:
        if not arguments.factory:
            return open_backend(arguments.backend, arguments.options)

        module, _, name = arguments.factory.partition(":")
        factory = getattr(importlib.import_module(module), name)
        return cast(Backend, factory(arguments.options))

    said(Preparation(opened, order, said).run())
    sys.stderr.flush()
    # Drivers register exit handlers that hang or crash: all is said, so leave.
    os._exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="switchgear-preparer")
    parser.add_argument("--fd", type=int, required=True, help="the model's descriptor")
    parser.add_argument("--parent", type=int, required=True, help="process to die with")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--factory", default="", help="module:callable, not the entry point")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--cache", default="", help="folder of the model's prepared files")
    parser.add_argument("--shapes", type=json.loads, default={})
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--tune", type=float, default=0.0, help="seconds of search for kernels")
    parser.add_argument("--again", action="store_true", help="load as a serving worker does")
    parser.add_argument("--digest", default="", help="the model's hash, for crash markers")
    parser.add_argument("--markers", default="", help="folder of crash markers")
    return parser


def _own_output() -> int:
    """A descriptor for our lines; what drivers print goes to standard error instead."""
    channel = os.dup(1)
    os.dup2(2, 1)
    return channel


if __name__ == "__main__":
    sys.exit(main())
