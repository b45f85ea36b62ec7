"""Text for people: columns that fit a terminal, and numbers with their units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

WIDTH: Final = 80
_GAP: Final = "  "


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], indent: int = 2) -> str:
    """Columns under headings, numbers to the right; the last column is cut at 80 characters.

    Returns lines without a newline at the end; only the headings where there are no rows.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    right = [
        bool(cells) and all(_is_number(row[column]) for row in cells)
        for column in range(len(headings))
    ]
    everything = [list(headings), *cells]
    widths = [max(len(row[column]) for row in everything) for column in range(len(headings))]
    lines = []
    for row in everything:
        parts = [
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append(cut(" " * indent + _GAP.join(parts).rstrip()))

    return "\n".join(lines)


def cut(line: str, width: int = WIDTH) -> str:
    """A line of at most `width` characters; a cut one ends with `...`."""
    return line if len(line) <= width else line[: width - 3] + "..."


def wrap(words: Iterable[str], indent: int = 2, separator: str = ", ") -> str:
    """Words in lines of at most 80 characters, with a separator between them."""
    lines = [" " * indent]
    for number, word in enumerate(words):
        lead = separator if number else ""
        if len(lines[-1]) + len(lead) + len(word) > WIDTH - 1 and lines[-1].strip():
            lines[-1] += lead.rstrip()
            lines.append(" " * indent + word)
        else:
            lines[-1] += lead + word

    return "\n".join(lines)


def amount(count: int, noun: str) -> str:
    """`1 model`, `2 models`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def bytes_text(size: float) -> str:
    """`17 B`, `1.5 KiB`, `16.1 MiB`."""
    if size < 1024:
        return f"{size:.0f} B"

    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"

    return f"{size / 1024:.1f} GiB"


def duration_text(seconds: float) -> str:
    """`4.2 s`, `3 min 5 s`, `2 h 3 min`, `5 d 4 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"

    for small, big, factor in (("s", "min", 60), ("min", "h", 60), ("h", "d", 24)):
        first, rest = divmod(int(seconds), factor)
        limit = {"min": 60, "h": 24, "d": 10**9}[big]
        if first < limit:
            return f"{first} {big} {rest} {small}"

        seconds = first

    raise AssertionError("days have no bound")


def shape_text(shape: Iterable[int]) -> str:
    return "[" + ", ".join(str(dim) for dim in shape) + "]"


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _is_number(text: str) -> bool:
    return text == "-" or text.replace(".", "", 1).replace("-", "", 1).isdigit()
