"""`switchgear prewarm`: compiles and checks models on every backend now."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Final

from switchgear.daemon.cli import models, pairs
from switchgear.daemon.cli.command import (
    DONE,
    FAILED,
    Subparsers,
    UsageError,
    add_command,
    add_socket,
    connected,
    print_json,
    say,
)
from switchgear.daemon.cli.progress import ProgressLine

if TYPE_CHECKING:
    from switchgear.client import Client, Model
    from switchgear.client.models import Pair

# The bar of a search for faster kernels: 15 minutes.
TUNE_S: Final = 900


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "prewarm",
        run,
        "compile and check models on every backend now, and fill the caches",
        "switchgear prewarm",
        "switchgear prewarm face.tflite --backend opencl --tune",
    )
    parser.add_argument(
        "models", metavar="MODEL", nargs="*", help=f"{models.MODEL_HELP}; default: all loaded"
    )
    parser.add_argument(
        "--backend", action="append", metavar="NAME", help="only this one (may be repeated)"
    )
    parser.add_argument(
        "--precision",
        choices=("auto", "fp32", "fp16", "int8", "int4"),
        default="auto",
        help="default: what is usual for each backend",
    )
    parser.add_argument(
        "--tune", action="store_true", help="search for faster kernels, and keep what wins"
    )
    parser.add_argument(
        "--budget",
        type=int,
        metavar="SECONDS",
        help=f"time for the search, for each model and backend (default {TUNE_S})",
    )
    parser.add_argument(
        "--again", action="store_true", help="though it was done with the same driver"
    )
    add_socket(parser)


def run(options: argparse.Namespace) -> int:
    if options.budget is not None and (not options.tune or options.budget < 1):
        raise UsageError("--budget is a number of seconds above 0, and needs --tune")

    with connected(options) as client:
        wanted = [models.loaded(client, text) for text in options.models] or client.models()
        done = [_prepare(client, model, options) for model in wanted]

    if options.json:
        print_json([dataclasses.asdict(model) for model in done])
    elif not done:
        say("no model is loaded: `switchgear model load FILE` loads one")
    else:
        for model in done:
            print(model.name)
            print(pairs.summary(chosen(model, options.backend)))

    ready = all(any(p.state == "ready" for p in chosen(m, options.backend)) for m in done)
    return DONE if ready else FAILED


def _prepare(client: Client, model: Model, options: argparse.Namespace) -> Model:
    tune_s = (options.budget or TUNE_S) if options.tune else 0
    with ProgressLine("preparing") as line:
        return client.prepare_model(
            model,
            options.backend,
            options.precision,
            tune_s=tune_s,
            again=options.again,
            on_progress=line.job,
        )


def chosen(model: Model, backends: list[str] | None) -> list[Pair]:
    """The pairs of a model on these backends, None for all."""
    return [pair for pair in model.pairs if backends is None or pair.backend in backends]
