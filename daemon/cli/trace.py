"""`switchgear trace`: what happens to requests, as a file that ui.perfetto.dev opens."""

from __future__ import annotations

import argparse
import importlib
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from switchgear.client.control import Control
from switchgear.daemon.cli.command import (
    DONE,
    CommandError,
    Subparsers,
    add_command,
    add_socket,
    print_json,
    say,
)
from switchgear.daemon.cli.metrics_answer import ANSWER_LIMIT_S, reach
from switchgear.daemon.cli.progress import ProgressLine
from switchgear.daemon.cli.trace_file import write_trace
from switchgear.daemon.cli.trace_rows import Rows

DEFAULT_S: Final = 10
INSTALL: Final = "python -m pip install 'switchgear[trace]'"
SCHEMA: Final = "perfetto.protos.perfetto.trace.perfetto_trace_pb2"


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "trace",
        run,
        "record what happens to requests; ui.perfetto.dev opens the file",
        "switchgear trace --seconds 10 -o switchgear.pftrace",
    )
    parser.add_argument(
        "--seconds", type=int, default=DEFAULT_S, help=f"1 to 3600, default {DEFAULT_S}"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("switchgear.pftrace"),
        metavar="FILE",
        help="default switchgear.pftrace",
    )
    add_socket(parser)


def run(options: argparse.Namespace) -> int:
    schema = _schema()
    with closing(reach(options.socket)) as control:
        rows = record(control, options.seconds)

    data = write_trace(rows, schema)
    try:
        options.output.write_bytes(data)
    except OSError as error:
        raise CommandError(f"{options.output}: {error.strerror}") from None

    outcomes = Counter(request.outcome for request in rows.requests)
    if options.json:
        print_json(
            {
                "file": str(options.output),
                "bytes": len(data),
                "requests": dict(outcomes),
                "sessions": len(rows.sessions),
                "workers": len(rows.lanes),
                "events": len(rows.events),
                "dropped": rows.dropped,
            }
        )
        return DONE

    told = ", ".join(f"{count} {name}" for name, count in outcomes.most_common()) or "none"
    print(f"{options.output}: {len(data)} bytes; requests: {told}")
    if rows.dropped:
        say(f"switchgear: {rows.dropped} rows came faster than they could be read")

    print("open it at https://ui.perfetto.dev")
    return DONE


def record(control: Control, seconds: int) -> Rows:
    """Watches the daemon for that long; Ctrl-C ends it earlier with what there is.

    :raises SwitchgearError: what the daemon answered, or that it went away.
    """
    rows = Rows()
    begin = time.monotonic()
    with ProgressLine("trace") as line:
        try:
            reply = control.call(
                "WatchTrace", {"seconds": seconds}, more=True, timeout_s=ANSWER_LIMIT_S
            )
            rows.add(reply.parameters)
            while reply.continues:
                line.update("recording", time.monotonic() - begin, seconds)
                reply = control.next(timeout_s=seconds + 2 * ANSWER_LIMIT_S)
                rows.add(reply.parameters)
        except KeyboardInterrupt:
            say("switchgear: interrupted; the file has what came until now")

    return rows


def _schema() -> Any:
    """Perfetto's messages; found before anything is recorded.

    :raises CommandError: the package is not installed.
    """
    try:
        return importlib.import_module(SCHEMA)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("perfetto", "google"):
            raise

        raise CommandError(
            f"a trace needs the package perfetto, which is not installed: {INSTALL}"
        ) from None
