"""`switchgear explain`: why a request ran where it ran."""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from switchgear.daemon.cli.command import (
    DONE,
    FAILED,
    CommandError,
    Subparsers,
    UsageError,
    add_command,
    add_socket,
    connected,
    print_json,
    say,
)
from switchgear.daemon.cli.tables import WIDTH
from switchgear.daemon.routing import ring


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
    parser.add_argument(
        "--dump", type=Path, metavar="FILE", help="write what went into the decisions there"
    )
    parser.add_argument(
        "--replay", type=Path, metavar="FILE", help="decide a dump's decisions again"
    )
    add_socket(parser)


def run(options: argparse.Namespace) -> int:
    if options.last is not None and not 1 <= options.last <= 256:
        raise UsageError("--last is 1 to 256")

    if options.replay is not None:
        return replay(options)

    session, request = parse(options.request)
    with connected(options) as client:
        found = client.explain(options.last or 1, session=session, request=request)

    if options.dump is not None:
        write(options.dump, found)
        say(f"{len(found)} decisions in {options.dump}")
    elif options.json:
        print_json(found)
    elif found:
        print("\n\n".join(in_words(decision) for decision in found))
    else:
        say("no such decision is known: the ring keeps the newest 4096")

    return DONE if found else FAILED


def write(path: Path, found: list[dict[str, Any]]) -> None:
    """A dump that `--replay` reads: JSON lines, the head first."""
    lines = [*ring.dump([]), *(json.dumps(decision["record"]) for decision in found)]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None


def replay(options: argparse.Namespace) -> int:
    """Decides each decision of a dump again; exit status 1 when one comes out differently."""
    try:
        with options.replay.open(encoding="utf-8") as file:
            entries = list(ring.load(file))
            different = [e.sequence for e in entries if ring.replay(e) != e.verdict]
    except (OSError, ValueError) as error:
        raise CommandError(f"{options.replay}: {error}") from None

    if options.json:
        print_json({"decisions": len(entries), "different": different})
    else:
        print(f"{len(entries)} decisions, {len(different)} come out differently")

    return FAILED if different else DONE


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
