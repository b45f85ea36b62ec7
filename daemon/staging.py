"""A copy of a model's prepared files, in which they are made anew while the others are in use.

What a preparer leaves there takes their place file by file, once it was checked.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

_SUFFIX: Final = ".new"


def stage(folder: Path) -> Path:
    """A copy of `folder` beside it; blocks. One that is there is made anew.

    Copies, not links: drivers may write into files that they keep there.

    :raises OSError: it cannot be made; what there is of it is left to `discard`.
    """
    staged = folder.with_name(folder.name + _SUFFIX)
    discard(staged)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copytree(folder, staged)
    return staged


def publish(staged: Path, folder: Path) -> None:
    """Moves what is new or changed in a staged copy to its place; blocks.

    Each file is replaced at once: whoever opens one gets the old or the new.

    :raises OSError: a file could not be moved; the others were.
    """
    for path, _, names in os.walk(staged):
        target = folder / Path(path).relative_to(staged)
        target.mkdir(mode=0o700, exist_ok=True)
        for name in names:
            if _mark(Path(path, name)) != _mark(target / name):
                os.replace(Path(path, name), target / name)


def discard(staged: Path) -> None:
    """Removes a staged copy; blocks, never raises."""
    shutil.rmtree(staged, ignore_errors=True)


def _mark(path: Path) -> tuple[int, int] | None:
    """What a copy has of its original, and a file that was written later has not."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return None

    return state.st_size, state.st_mtime_ns
