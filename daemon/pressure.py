"""Whether the machine is short of memory: what the kernel says of stalled tasks (PSI)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

MEMORY: Final = Path("/proc/pressure/memory")
# Tasks that waited for memory this share of the last 10 seconds, in percent: Linux calls it
# "some avg10". From 10 % on a person notices.
SHORT_PERCENT: Final = 10.0


def some_avg10(text: str) -> float:
    """The share in percent of a pressure file's first line; 0 where it is none."""
    for part in text.split("\n", 1)[0].split():
        name, _, value = part.partition("=")
        if name == "avg10":
            try:
                return float(value)
            except ValueError:
                return 0.0

    return 0.0


def memory_is_short(path: Path = MEMORY) -> bool:
    """Reads procfs, which does not block; a kernel without PSI is never short."""
    try:
        return some_avg10(path.read_text(encoding="ascii")) >= SHORT_PERCENT
    except (OSError, UnicodeDecodeError):
        return False
