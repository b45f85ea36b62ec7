"""Folders that cannot be written: a full disk, a read-only one. Root only."""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def full_disk(folder: Path, size_kib: int = 64, free_kib: int = 0) -> Iterator[Path]:
    """A file system of `size_kib` at `folder` with `free_kib` left; skips without root."""
    with _mounted(folder, f"size={size_kib}k"):
        with open(folder / "filling", "wb", buffering=0) as file, contextlib.suppress(OSError):
            for _ in range(size_kib - free_kib):
                file.write(b"x" * 1024)

        yield folder


@contextlib.contextmanager
def read_only_disk(folder: Path) -> Iterator[Path]:
    """An empty read-only file system at `folder`; skips without root."""
    with _mounted(folder, "ro"):
        yield folder


@contextlib.contextmanager
def _mounted(folder: Path, options: str) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")

    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this place does not let root mount a file system")

    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
