"""The command line that the canaries share."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from switchgear.ipc.errors import DriverError, NoBackend
from switchgear.ipc.process import begin_child

if TYPE_CHECKING:
    from collections.abc import Callable


class Result(Protocol):
    """What a canary found."""

    @property
    def ok(self) -> bool: ...

    def to_json(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=Result)


def run_command(
    prog: str,
    description: str,
    place: str,
    run: Callable[[Path | None, int], R],
    in_words: Callable[[R], str],
) -> int:
    """Reads the arguments, runs a canary and prints what it found; the exit status. Blocks.

    `place` says what the number of a device counts, `in_words` gives the text for people.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--cache", type=Path, help="the cache folder; none keeps nothing")
    parser.add_argument("--device", type=int, default=0, help=place)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--parent", type=int, help="a process to end with")
    arguments = parser.parse_args()
    if arguments.parent:
        begin_child(arguments.parent)

    try:
        result = run(arguments.cache, arguments.device)
    except (DriverError, NoBackend) as error:
        sys.stderr.write(f"{error}\n")
        return 1

    text = json.dumps(result.to_json()) if arguments.json else in_words(result)
    sys.stdout.write(text + "\n")
    return 0 if result.ok else 1
