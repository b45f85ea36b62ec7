"""The resident memory of a child, though /proc hides it."""

from __future__ import annotations

import os
from typing import Final

_PAGE_MIB: Final = os.sysconf("SC_PAGE_SIZE") / (1 << 20)
# Seven numbers in one line.
_MAX_BYTES: Final = 256


class ResidentMemory:
    """Made right after a child's start, and kept: once the child is not dumpable, a /proc that
    is mounted with `hidepid` shows it to nobody, and what was opened before goes on working.

    Owns one descriptor until `close`.
    """

    def __init__(self, pid: int) -> None:
        try:
            self._fd = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            # It has ended already, or no descriptor is free.
            self._fd = -1

    def mib(self) -> float:
        """In MiB; 0 where it is not known, or the child is gone."""
        if self._fd < 0:
            return 0.0

        try:
            fields = os.pread(self._fd, _MAX_BYTES, 0).split()
        except ProcessLookupError:
            return 0.0

        return int(fields[1]) * _PAGE_MIB if len(fields) > 1 else 0.0

    def close(self) -> None:
        """Twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
