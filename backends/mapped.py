"""Which file a piece of code came from: the path of a driver, as the kernel mapped it."""

from __future__ import annotations


def library_at(address: int) -> str:
    """The file mapped at an address of this process, empty where there is none."""
    for start, end, path in _mappings():
        if start <= address < end:
            return path

    return ""


def library_named(part: str) -> str:
    """The first mapped file whose name contains `part`, empty where there is none."""
    return next((path for _, _, path in _mappings() if part in path.rpartition("/")[2]), "")


def _mappings() -> list[tuple[int, int, str]]:
    found = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            words = line.rstrip("\n").split(maxsplit=5)
            if len(words) == 6 and words[5].startswith("/"):
                start, _, end = words[0].partition("-")
                found.append((int(start, 16), int(end, 16), words[5]))

    return found
