"""`switchgear metrics`: what the daemon counts, as Prometheus text or as JSON."""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import Any, Final

from switchgear.client.control import Control
from switchgear.client.paths import default_socket
from switchgear.daemon.cli.command import DONE, Subparsers, add_command, add_socket, print_json
from switchgear.daemon.telemetry.exposition import parse
from switchgear.daemon.telemetry.families import Distribution, Family
from switchgear.ipc.errors import ProtocolError

ANSWER_LIMIT_S: Final = 10.0


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "metrics",
        run,
        "what the daemon counts: requests, latencies, breakers, temperatures",
        "switchgear metrics",
        "switchgear metrics --json",
    )
    add_socket(parser)


def run(options: argparse.Namespace) -> int:
    with closing(reach(options.socket)) as control:
        text = metrics_text(control)

    if options.json:
        print_json([family_json(family) for family in read(text)])
    else:
        print(text, end="")

    return DONE


def reach(socket: str | None) -> Control:
    """A connection to the daemon on that socket, or on the usual one; the caller closes it.

    :raises NotRunning: no daemon answers.
    :raises PermissionDenied: this user may not connect.
    """
    return Control(socket or default_socket(), ANSWER_LIMIT_S)


def metrics_text(control: Control) -> str:
    """The daemon's metrics as Prometheus text; blocks.

    :raises SwitchgearError: what the daemon answered, or that it went away.
    """
    reply = control.call("GetMetrics", timeout_s=ANSWER_LIMIT_S)
    text = reply.parameters.get("text")
    if not isinstance(text, str):
        raise ProtocolError("GetMetrics answered no text")

    return text


def read(text: str) -> list[Family]:
    """The families of a daemon's answer.

    :raises ProtocolError: it is of another format.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise ProtocolError(f"the daemon's metrics cannot be read: {error}") from None


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
