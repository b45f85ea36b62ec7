"""`switchgear status`: whether the daemon is fine, why not, and what it is doing."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import fill
from typing import TYPE_CHECKING, Final

from switchgear.client.models import model_from_json
from switchgear.daemon.cli import model
from switchgear.daemon.cli.command import (
    DONE,
    FAILED,
    Subparsers,
    add_command,
    add_socket,
    connected,
    finite,
    print_json,
)
from switchgear.daemon.cli.status_figures import ask_figures, breaker_faults, lines
from switchgear.daemon.cli.tables import (
    WIDTH,
    amount,
    bytes_text,
    cut,
    duration_text,
    table,
    wrap,
)
from switchgear.ipc.errors import SwitchgearError

if TYPE_CHECKING:
    from switchgear.client import Status
    from switchgear.daemon.cli.top_figures import Figures

_EVERY_S: Final = 1.0
_CLEAR: Final = "\x1b[2J"
_HOME: Final = "\x1b[H"
_END_OF_LINE: Final = "\x1b[K"
_BELOW: Final = "\x1b[J"
_HIDE_CURSOR: Final = "\x1b[?25l"
_SHOW_CURSOR: Final = "\x1b[?25h"


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "status",
        run,
        "whether the daemon is fine, and what it is doing",
        "switchgear status --watch",
    )
    parser.add_argument(
        "--watch", action="store_true", help="every second until Ctrl-C (--json: a line each)"
    )
    add_socket(parser)


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 when the daemon serves, else 1."""
    if options.watch:
        return _watch(options)

    with connected(options) as client:
        status = client.status()

    if options.json:
        print_json(status)
    else:
        print(render(status, ask_figures(options.socket)))

    return DONE if serves(status) else FAILED


def serves(status: Status) -> bool:
    """Whether it takes requests and a backend can run them."""
    return status["ready"] and any(b["state"] == "ready" for b in status["backends"])


def faults(status: Status, figures: Figures | None = None) -> list[str]:
    """What is not as it should be, the worst first; empty when all is fine."""
    found = []
    if not status["ready"]:
        found.append(f"the daemon is {status['state']}")

    found += [
        f"{backend['name']} is {backend['state']}: {backend['reason']}"
        for backend in status["backends"]
        # A device that this machine does not have is no fault.
        if backend["state"] not in ("ready", "absent", "off") or backend["name"] == "cpu"
        if backend["state"] != "ready"
    ]
    found += breaker_faults(figures) if figures is not None else []
    found += status["problems"]
    found += [
        f"model {entry['name']} is {entry['status']}"
        for entry in status["models"]
        if entry["status"] not in ("ready", "loading")
    ]
    found += [
        f"the {worker['backend']} {worker['lane']} worker is {worker['state']}"
        + (f" ({worker['last_end']})" if worker["last_end"] else "")
        for worker in status["workers"]
        if worker["state"] == "none" and worker["queued"]
    ]
    return found


def headline(status: Status, figures: Figures | None = None) -> str:
    """One line that says whether it is fine, and the first reason why not."""
    found = faults(status, figures)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        lead = "serves, but" if serves(status) else "NOT FINE"
        return cut(f"{lead}: {found[0]}{more}")

    ready = ", ".join(b["name"] for b in status["backends"] if b["state"] == "ready")
    return cut(
        f"fine: serving for {duration_text(status['uptime_s'])} on {ready};"
        f" {amount(len(status['models']), 'model')},"
        f" {amount(len(status['sessions']), 'session')}"
    )


def render(status: Status, figures: Figures | None = None) -> str:
    """The whole status for people, at most 80 columns wide."""
    parts = [headline(status, figures)]
    parts += [cut(f"  {fault}") for fault in faults(status, figures)[1:]]
    parts.append(
        f"daemon {status['version']}, pid {status['pid']}, {status['rss_mb']:.0f} MB;"
        f" {amount(status['connections'], 'connection')}, {status['idle_connections']} idle"
    )
    parts.append("\nbackends")
    for backend in status["backends"]:
        lead = f"  {backend['name']:<8} {backend['state']:<9} "
        parts.append(cut(f"{lead}{backend['reason']}"))
        if again := backend.get("again"):
            indent = " " * len(lead)
            parts.append(fill(again, WIDTH, initial_indent=indent, subsequent_indent=indent))

    if status["devices"]:
        parts.append("\ndevices")
        parts.append(_devices(status))

    parts.append("\nworkers" if status["workers"] else "\nworkers: none")
    if status["workers"]:
        parts.append(_workers(status))

    parts.append("\nmodels" if status["models"] else "\nmodels: none")
    if status["models"]:
        parts.append(model.listing(model_from_json(entry) for entry in status["models"]))

    parts.append("\nsessions" if status["sessions"] else "\nsessions: none")
    if status["sessions"]:
        parts.append(_sessions(status))

    if status["jobs"]:
        parts.append("\njobs")
        parts += [
            cut(
                f"  {job['job']} {job['kind']} {job['subject']}: {job['state']}, {job['phase']}"
            )
            for job in status["jobs"]
        ]

    if figures is not None:
        parts += lines(figures)

    parts.append("\nsince the start")
    parts.append(
        wrap(f"{name.replace('_', ' ')} {value}" for name, value in status["counters"].items())
    )
    return "\n".join(parts)


def _devices(status: Status) -> str:
    rows = []
    for device in status["devices"]:
        temperature = device.get("temperature_c")
        reading = device["reading"]
        told = "no sensor" if reading == "none" else f"sensor {reading}"
        if temperature is not None:
            told = f"{temperature:.1f} C" + ("" if reading == "measured" else f" ({reading})")

        limits = f"{device['recover_c']:g} / {device['trip_c']:g} C ({device['limit_source']})"
        used_by = ", ".join(device["backends"])
        rows.append((device["name"], device["state"], told, limits, used_by))

    return table(("DEVICE", "STATE", "TEMPERATURE", "RECOVER / TRIP", "USED BY"), rows)


def _workers(status: Status) -> str:
    return table(
        ("BACKEND", "LANE", "PID", "STATE", "MB", "QUEUED", "RUNNING", "RESTARTS", "LAST END"),
        [
            (
                worker["backend"],
                worker["lane"],
                worker["pid"] or "-",
                worker["state"],
                round(worker["rss_mb"]),
                worker["queued"],
                worker["running"],
                worker["restarts"],
                worker["last_end"],
            )
            for worker in status["workers"]
        ],
    )


def _sessions(status: Status) -> str:
    return table(
        ("ID", "UID", "PID", "SLOTS", "IN USE", "ANSWERED", "PRIORITY", "ARENA", "MODEL"),
        [
            (
                session["session"],
                session["uid"],
                session["pid"],
                session["slots"],
                session["in_flight"],
                session["answered"],
                session["priority"],
                bytes_text(session["arena_bytes"]),
                session["model"],
            )
            for session in status["sessions"]
        ],
    )


def _watch(options: argparse.Namespace) -> int:
    screen = sys.stdout.isatty() and not options.json
    try:
        with _screen() if screen else _no_screen():
            while True:
                text = _look(options)
                _paint(text) if screen else print(text, flush=True)
                time.sleep(_EVERY_S)
    except KeyboardInterrupt:
        return DONE


def _look(options: argparse.Namespace) -> str:
    """What there is to show now; a daemon that is gone is shown, for it may come back."""
    try:
        with connected(options) as client:
            status = client.status()
    except SwitchgearError as error:
        if options.json:
            return json.dumps({"error": error.name, "message": error.text})

        return cut(f"NOT FINE: {error.text}")

    if options.json:
        return json.dumps(finite(status))

    return render(status, ask_figures(options.socket)) + "\n"


@contextmanager
def _screen() -> Iterator[None]:
    sys.stdout.write(_CLEAR + _HIDE_CURSOR)
    try:
        yield
    finally:
        sys.stdout.write(_SHOW_CURSOR)
        sys.stdout.flush()


@contextmanager
def _no_screen() -> Iterator[None]:
    yield


def _paint(text: str) -> None:
    """Overwrites the screen in one write: each line in place, then what is below it."""
    size = shutil.get_terminal_size()
    rows = text.split("\n")
    if len(rows) >= size.lines:
        # Rather close together than cut off.
        rows = [row for row in rows if row]

    lines = [line[: size.columns] for line in rows[: size.lines - 1]]
    sys.stdout.write(_HOME + "".join(f"{line}{_END_OF_LINE}\n" for line in lines) + _BELOW)
    sys.stdout.flush()
