"""Forks writers of profiles that a test kills: one process, so that each costs a fork only.

Run as `store_writer.py FOLDER`; commands come on standard input, one line each:

- `fault N`: a writer that kills itself just before its Nth system call of the write (at an odd
N
  a `write` is done by half first). Answers `killed` or `done`.
- `loop`: a writer that stores one profile after the other. Answers its pid.
- `reap`: waits for that writer, which the test has killed. Answers `reaped`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profile_helpers import profile

from switchgear.fingerprints.store import ProfileStore

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS = ("open", "write", "fsync", "rename", "close", "unlink")


def arm(fatal: int) -> None:
    """Makes the process kill itself before its call number `fatal`, counted from 0."""
    count = 0

    def wrap(name: str) -> None:
        real: Callable[..., Any] = getattr(os, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            if count == fatal:
                if name == "write" and fatal % 2:
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])

                os.kill(os.getpid(), signal.SIGKILL)

            count += 1
            return real(*arguments, **keywords)

        setattr(os, name, call)

    for name in CALLS:
        wrap(name)


def main() -> None:
    store = ProfileStore(Path(sys.argv[1]))
    one, other = profile(1.0), profile(2.0)
    looping = 0
    for line in sys.stdin:
        command, _, number = line.strip().partition(" ")
        if command == "reap":
            os.waitpid(looping, 0)
            print("reaped", flush=True)
            continue

        child = os.fork()
        if child == 0:
            if command == "fault":
                arm(int(number))
                store.save(other)
                os._exit(0)

            while True:
                store.save(one)
                store.save(other)

        if command == "fault":
            _, status = os.waitpid(child, 0)
            print("killed" if os.WIFSIGNALED(status) else "done", flush=True)
        else:
            looping = child
            print(child, flush=True)


if __name__ == "__main__":
    main()
