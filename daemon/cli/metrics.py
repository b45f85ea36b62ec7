"""`switchgear metrics`: what the daemon counts, as Prometheus text or as JSON."""

from __future__ import annotations

import argparse
import math
from contextlib import closing
from typing import Any

from switchgear.daemon.cli.command import (
    DONE,
    Subparsers,
    UsageError,
    add_command,
    add_socket,
    print_json,
)
from switchgear.daemon.cli.metrics_answer import metrics_text, reach, read
from switchgear.daemon.telemetry.families import Distribution, Family


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "metrics",
        run,
        "what the daemon counts: requests, latencies, breakers, temperatures",
        "switchgear metrics",
        "switchgear metrics --otlp http://127.0.0.1:4318/v1/metrics",
    )
    parser.add_argument(
        "--otlp", metavar="URL", help="send them to an OpenTelemetry collector until Ctrl-C"
    )
    parser.add_argument(
        "--every", type=float, default=10.0, metavar="S", help="seconds, default 10"
    )
    add_socket(parser)


def run(options: argparse.Namespace) -> int:
    if options.otlp:
        return _send(options)

    with closing(reach(options.socket)) as control:
        text = metrics_text(control)

    if options.json:
        print_json([family_json(family) for family in read(text)])
    else:
        print(text, end="")

    return DONE


def _send(options: argparse.Namespace) -> int:
    # Its packages take a second to import, and are an extra.
    from switchgear.daemon.cli.metrics_otlp import Sender, follow

    if not (math.isfinite(options.every) and options.every > 0):
        raise UsageError("--every needs a time in seconds above 0")

    if not options.otlp.startswith(("http://", "https://")):
        raise UsageError("--otlp needs a URL, http:// or https://")

    try:
        follow(Sender(options.socket, options.otlp), options.every)
    except KeyboardInterrupt:
        pass

    return DONE


def family_json(family: Family) -> dict[str, Any]:
    return {
        "name": family.name,
        "kind": family.kind,
        "text": family.text,
        "samples": [
            {"labels": dict(zip(family.labels, values, strict=True)), **_value_json(value)}
            for values, value in family.samples.items()
        ],
    }


def _value_json(value: float | Distribution) -> dict[str, Any]:
    if isinstance(value, Distribution):
        return {
            "bounds": list(value.bounds),
            "counts": list(value.counts),
            "sum": value.total,
            "count": value.count,
        }

    return {"value": value}
