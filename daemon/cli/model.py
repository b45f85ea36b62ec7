"""`switchgear model`: loads, lists, checks and unloads models."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from switchgear.daemon.cli import models, pairs
from switchgear.daemon.cli.command import (
    DONE,
    FAILED,
    Subparsers,
    add_command,
    add_socket,
    connected,
    print_json,
    say,
)
from switchgear.daemon.cli.progress import ProgressLine
from switchgear.daemon.cli.tables import bytes_text, cut, shape_text, table, wrap
from switchgear.ipc.dtypes import DTYPES
from switchgear.ipc.errors import NoBackend, SwitchgearError

if TYPE_CHECKING:
    from switchgear.client import Client, LoadStep, Model, Tensor

_CHECK_RUNS: Final = 5
_BAR_CELLS: Final = 24


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "model",
        help="load, list, check or unload models",
        description="Loads, lists, checks and unloads the daemon's models.",
        epilog="example:\n  switchgear model load face.tflite --name face",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    load = add_command(
        verbs,
        "load",
        _load,
        "hand a model to the daemon; it stays loaded until it is unloaded",
        "switchgear model load face.tflite --name face",
        "switchgear model load generated:mobilenet_v1",
    )
    load.add_argument("file", metavar="FILE", help="a .tflite file, or generated:NAME")
    load.add_argument("--name", help="what to call it (default: the file's stem)")

    listing = add_command(verbs, "list", _list, "list the models", "switchgear model list")
    check = add_command(
        verbs,
        "check",
        _check,
        "try a loaded model again, on each backend",
        "switchgear model check face",
    )
    check.add_argument("model", metavar="MODEL", help="a name or hash")
    check.add_argument(
        "--again", action="store_true", help="compile and check anew, though it was done"
    )
    unload = add_command(
        verbs, "unload", _unload, "unload a model", "switchgear model unload face"
    )
    unload.add_argument("model", metavar="MODEL", help="a name or hash")
    unload.add_argument("--force", action="store_true", help="end the sessions that use it")
    for verb in (load, listing, check, unload):
        add_socket(verb)


def _load(options: argparse.Namespace) -> int:
    with connected(options) as client:
        model = models.load(client, options.file, options.name)

    if options.json:
        print_json(as_json(model))
        return DONE

    print(cut(f"{model.name} serves; {model.hash[:12]}, {_size(model)}"))
    print(_signature(model))
    print(timeline(model.timeline))
    return DONE


def _list(options: argparse.Namespace) -> int:
    with connected(options) as client:
        found = client.models()

    if options.json:
        print_json([as_json(model) for model in found])
    elif found:
        print(listing(found))
    else:
        say("no model is loaded: `switchgear model load FILE` loads one")

    return DONE


def _check(options: argparse.Namespace) -> int:
    with connected(options) as client, ProgressLine(f"checking {options.model}") as line:
        model = client.check_model(options.model, line.job)
        with contextlib.suppress(NoBackend):
            model = client.prepare_model(model, again=options.again, on_progress=line.job)

        outcomes = []
        for backend in client.status()["backends"]:
            line.update(f"running on {backend['name']}")
            outcomes.append(_try(client, model, backend["name"]))

    if options.json:
        print_json({"model": as_json(model), "backends": outcomes})
    else:
        print(cut(f"{model.name}: {model.hash[:12]}, {_size(model)}"))
        print(
            table(
                ("BACKEND", "RUNS", "RUN MS", "TOTAL MS", "PRECISION", "WHY NOT"),
                [
                    (
                        outcome["backend"],
                        "yes" if outcome["runs"] else "no",
                        outcome.get("run_ms", "-"),
                        outcome.get("total_ms", "-"),
                        outcome.get("precision", "-"),
                        outcome.get("why_not", ""),
                    )
                    for outcome in outcomes
                ],
            )
        )
        if model.pairs:
            print("\nagainst the CPU's answers, each in a process of its own")
            print(pairs.summary(model.pairs))

        for pair in model.pairs:
            if pair.timeline:
                print(f"\n{pair.backend} {pair.precision or pair.asked}")
                print(timeline(pair.timeline))

    return DONE if any(outcome["runs"] for outcome in outcomes) else FAILED


def _try(client: Client, model: Model, backend: str) -> dict[str, Any]:
    """Runs a few frames of zeros on one backend; medians without the first."""
    inputs = {tensor.name: bytes(tensor_bytes(tensor)) for tensor in model.inputs}
    run_ms, total_ms = [], []
    try:
        with client.open_session(model, 1, backends=[backend], strict=True) as session:
            for _ in range(1 + _CHECK_RUNS):
                result = session.run(inputs)
                run_ms.append(result.run_ms)
                total_ms.append(result.total_ms)
    except SwitchgearError as error:
        return {"backend": backend, "runs": False, "why_not": f"{error.name}: {error.text}"}

    return {
        "backend": backend,
        "runs": True,
        "run_ms": round(median(run_ms[1:]), 3),
        "total_ms": round(median(total_ms[1:]), 3),
        "precision": result.precision,
    }


def _unload(options: argparse.Namespace) -> int:
    with connected(options) as client:
        model = client.describe(options.model)
        client.unload_model(model, options.force)

    if options.json:
        print_json({"model": model.hash, "name": model.name})
    else:
        print(f"{model.name} is unloaded")

    return DONE


def as_json(model: Model) -> dict[str, Any]:
    return dataclasses.asdict(model)


def tensor_bytes(tensor: Tensor) -> int:
    size = DTYPES[tensor.dtype].size_bytes
    for dim in tensor.shape:
        size *= dim

    return size


def listing(found: Iterable[Model]) -> str:
    """The models as a table."""
    return table(
        ("NAME", "HASH", "SIZE", "STATUS", "RUN MS", "SESSIONS", "BACKENDS"),
        [
            (
                cut(model.name, 24) + (" (resident)" if model.resident else ""),
                model.hash[:8],
                bytes_text(model.size_bytes),
                model.status,
                model.run_ms,
                model.sessions,
                ", ".join(f"{name} {state}" for name, state in model.backends.items()),
            )
            for model in found
        ],
    )


def timeline(steps: Iterable[LoadStep]) -> str:
    """Where the time of a load went: a line for each step, with its place in the whole."""
    steps = list(steps)
    end_ms = max((step.start_ms + step.duration_ms for step in steps), default=0.0) or 1.0
    rows = []
    for step in steps:
        first = min(int(step.start_ms / end_ms * _BAR_CELLS), _BAR_CELLS - 1)
        length = max(1, round(step.duration_ms / end_ms * _BAR_CELLS))
        place = ("." * first + "#" * length)[:_BAR_CELLS].ljust(_BAR_CELLS, ".")
        rows.append((step.name, step.start_ms, step.duration_ms, place))

    return table(("STEP", "AT MS", "TOOK MS", ""), rows)


def _size(model: Model) -> str:
    where = "in memory" if model.storage == "memory" else "on disk"
    state = ", keeps a state" if model.state else ""
    return f"{bytes_text(model.size_bytes)} {where}{state}, checked in {model.run_ms:.2f} ms"


def _signature(model: Model) -> str:
    lines = []
    for label, tensors in (("in", model.inputs), ("out", model.outputs)):
        for tensor in tensors:
            shape = "size depends on the input" if tensor.dynamic else ""
            shape = shape or shape_text(tensor.signature)
            lines.append(cut(f"  {label:<3}  {tensor.name}: {tensor.dtype} {shape}"))

    return "\n".join([*lines, wrap(sorted(model.operators))])
