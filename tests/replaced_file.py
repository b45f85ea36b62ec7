"""A file that is replaced as a whole: nobody finds a part of it."""

from __future__ import annotations

from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Puts a file in the place of what was there, if anything was."""
    aside = path.with_suffix(".new")
    aside.write_bytes(data)
    aside.rename(path)
