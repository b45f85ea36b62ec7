"""`switchgear top`: a live screen of backends, queues, latencies and events."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

from switchgear.daemon.cli import metrics_answer
from switchgear.daemon.cli.command import (
    DONE,
    CommandError,
    Subparsers,
    UsageError,
    add_command,
    add_socket,
    print_json,
)
from switchgear.daemon.cli.metrics import family_json
from switchgear.ipc.errors import SwitchgearError

if TYPE_CHECKING:
    from switchgear.client import Status
    from switchgear.daemon.cli.top_picture import Picture
    from switchgear.daemon.telemetry.families import Family

INSTALL: str = "python -m pip install 'switchgear[screens]'"


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "top",
        run,
        "live screen of backends, queues, latencies and events",
        "switchgear top",
        "switchgear top --json",
    )
    add_socket(parser)


def run(options: argparse.Namespace) -> int:
    looker = Looker(options.socket)
    if options.json:
        print_json(looker.raw())
        return DONE

    try:
        from switchgear.daemon.cli.top_screen import TopScreen
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("textual", "rich"):
            raise

        raise CommandError(
            f"the screen needs {missing}, which is not installed: {INSTALL}"
            " (`switchgear status --watch` does without)"
        ) from None

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("top needs a terminal; `switchgear status` or --json does not")

    TopScreen(looker.look).run()
    return DONE


class Looker:
    """Asks the daemon, on a connection for each question: one that is gone may be back."""

    def __init__(self, socket: str | None) -> None:
        from switchgear.daemon.cli.top_picture import History

        self._socket = socket
        self._history = History()

    def look(self) -> Picture:
        """The next picture; blocks for 10 s at most. A daemon that is gone is a picture too."""
        clock = time.strftime("%H:%M:%S")
        try:
            status, families = self._ask()
        except SwitchgearError as error:
            return self._history.gone(error.text, clock)

        return self._history.add(status, families, time.monotonic(), clock)

    def raw(self) -> dict[str, Any]:
        """One answer of the daemon: its status and its metrics as JSON.

        :raises SwitchgearError: it does not answer.
        """
        status, families = self._ask()
        return {"status": status, "metrics": [family_json(one) for one in families]}

    def _ask(self) -> tuple[Status, list[Family]]:
        with closing(metrics_answer.reach(self._socket)) as control:
            reply = control.call("GetStatus", timeout_s=metrics_answer.ANSWER_LIMIT_S)
            text = metrics_answer.metrics_text(control)

        return cast("Status", reply.parameters), metrics_answer.read(text)
