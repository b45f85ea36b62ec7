"""What an engine writes to standard error while it works.

LiteRT's exceptions name a file and a line; the reason is on descriptor 2. So that descriptor
leads to a memory file around each call. A process that is killed within a call takes its last
words with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

# More than this of one call is not read back.
MAX_SAID_BYTES: Final = 1 << 20
_NOISE: Final = re.compile(
    r"INFO: |I\d{4} |WARNING: Logging before|=== Source Location|third_party/|\s*$|\s+at \w+ \("
    r"|Warning: maxDynamic|\W*Loading|WARNING: \[npu_registry"
    r"|WARNING: .*unknown SDK version"
)
# What libraries put before a message: a level, a time, a thread, a place in their source.
_PREFIX: Final = re.compile(
    r"^(?:[EWF]\d{4} [\d:.]+\s+\d+ \S+\] |(?:ERROR|WARNING|Warning): (?:\[\S+\] ?)?)"
)
_SERIOUS: Final = re.compile(r"E\d{4} |F\d{4} |ERROR|Warning: |WARNING: ")
MAX_REASONS: Final = 6


class Said:
    """Collects what is written to descriptor 2 inside `with said.listening()`.

    One for a process; `close` gives its two descriptors back. Not for several threads.
    """

    def __init__(self) -> None:
        self._memory = os.memfd_create("stderr", os.MFD_CLOEXEC)
        self._own = os.dup(2)
        os.set_inheritable(self._own, False)
        self._passed_on: set[str] = set()

    def close(self) -> None:
        os.close(self._memory)
        os.close(self._own)

    def begin(self) -> None:
        """From here on descriptor 2 is ours; costs about a microsecond."""
        os.dup2(self._memory, 2)

    def end(self) -> bool:
        """Gives descriptor 2 back; whether anything was written."""
        os.dup2(self._own, 2)
        return os.lseek(self._memory, 0, os.SEEK_CUR) > 0

    def take(self) -> str:
        """The text since the last `take`, which also goes on to the true standard error.

        Notes of the engine's own progress do not, and a warning goes on once.
        """
        size = min(os.lseek(self._memory, 0, os.SEEK_CUR), MAX_SAID_BYTES)
        text = os.pread(self._memory, size, 0).decode(errors="replace") if size else ""
        os.lseek(self._memory, 0, os.SEEK_SET)
        os.ftruncate(self._memory, 0)
        for line in text.splitlines():
            message = _PREFIX.sub("", line)
            if _NOISE.match(line) or message in self._passed_on:
                continue

            self._passed_on.add(message)
            with contextlib.suppress(OSError):
                os.write(self._own, line.encode() + b"\n")

        return text

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Collects what is said inside; `take` returns it."""
        sys.stderr.flush()
        self.begin()
        try:
            yield
        finally:
            sys.stderr.flush()
            self.end()


def reasons(text: str) -> list[str]:
    """The messages of a text that say why something failed, each once, in their order.

    The first ones are the cause, what follows are its consequences.
    """
    found: dict[str, None] = {}
    for line in text.splitlines():
        if _NOISE.match(line) or not _SERIOUS.match(line):
            continue

        message = _PREFIX.sub("", line).strip()
        if message:
            found.setdefault(message)

    return list(found)[:MAX_REASONS]
