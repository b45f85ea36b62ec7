"""What the commands share: their options, their errors, the way to the daemon."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from switchgear.client import Client

DONE: Final = 0
FAILED: Final = 1
WRONG_USAGE: Final = 2

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Run: TypeAlias = Callable[[argparse.Namespace], int]


class CommandError(Exception):
    """The command cannot do its work; the text is the sentence for people. Exit status 1."""


class UsageError(Exception):
    """What was typed does not fit; the text says what would. Exit status 2."""


def add_command(
    subparsers: Subparsers, name: str, run: Run, text: str, *examples: str
) -> argparse.ArgumentParser:
    """Adds a command (or a verb of one) with `--json`, its help and its examples."""
    heading = "example:" if len(examples) == 1 else "examples:"
    parser = subparsers.add_parser(
        name,
        help=text,
        description=text[:1].upper() + text[1:] + ".",
        epilog="\n  ".join([heading, *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def add_socket(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--socket", metavar="PATH", help="the daemon's socket")


def connected(options: argparse.Namespace) -> Client:
    """A client of the daemon that the options name; it does not wait for one to come back.

    :raises NotRunning: no daemon answers.
    """
    from switchgear.client import connect

    return connect(options.socket, reconnect=False)


def say(text: str) -> None:
    """A message for people: to stderr."""
    print(text, file=sys.stderr)


def print_json(value: object) -> None:
    """One JSON value, indented; what JSON cannot say of a number becomes its name as text."""
    print(json.dumps(finite(value), indent=2))


def finite(value: Any) -> Any:
    """The value with "nan", "inf" and "-inf" for the numbers that JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)

    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}

    if isinstance(value, list | tuple):
        return [finite(item) for item in value]

    return value
