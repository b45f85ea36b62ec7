"""`switchgear explain`: why a request ran where it ran."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

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
from switchgear.daemon.cli.tables import WIDTH


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "explain",
        run,
        "why a request ran where it ran",
        "switchgear explain --last 5",
        "switchgear explain 12/345",
    )
    parser.add_argument(
        "request",
        metavar="REQUEST",
        nargs="?",
        help="SESSION/REQUEST, or SESSION for its newest ones; default: the newest of all",
    )
    parser.add_argument("--last", type=int, metavar="N", help="how many (1 to 256, default 1)")
    add_socket(parser)


def run(options: argparse.Namespace) -> int:
    if options.last is not None and not 1 <= options.last <= 256:
        raise UsageError("--last is 1 to 256")

    session, request = parse(options.request)
    with connected(options) as client:
        found = client.explain(options.last or 1, session=session, request=request)

    if options.json:
        print_json(found)
    elif found:
        print("\n\n".join(in_words(decision) for decision in found))
    else:
        say("no such decision is known: the ring keeps the newest 4096")

    return DONE if found else FAILED


def parse(text: str | None) -> tuple[int | None, int | None]:
    """:raises UsageError: it is not SESSION/REQUEST in numbers."""
    if text is None:
        return None, None

    first, slash, second = text.partition("/")
    if not first.isdigit() or (slash and not second.isdigit()):
        raise UsageError(f"{text!r} is not SESSION/REQUEST, such as 12/345")

    return int(first), int(second) if slash else None


def in_words(decision: dict[str, Any]) -> str:
    head = f"{decision['session']}/{decision['request']}, {decision['ago_s']:.1f} s ago"
    body = [
        textwrap.fill(
            line,
            WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
        for line in decision["text"].splitlines()
    ]
    return "\n".join([head, *body])
