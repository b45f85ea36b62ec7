"""Files that are whole or not there: written aside, synchronised, renamed; read bounded."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

# Of files that are not finished; a process that dies leaves one behind.
TEMPORARY_SUFFIX: Final = ".part"


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Replaces `path` by the parts, one behind the other; readable by the owner only.

    Afterwards the content and the name are on disk. Blocks. The folder has to exist.

    :raises OSError: it is not written; what was there before still is.
    """
    fd, name = tempfile.mkstemp(TEMPORARY_SUFFIX, f".{path.name}.", path.parent)
    try:
        try:
            _write_all(fd, parts)
            os.fsync(fd)
        finally:
            os.close(fd)

        os.rename(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)

        raise

    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Puts the names in a folder on disk.

    :raises OSError: it could not.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_bounded(path: Path, limit_bytes: int) -> bytes:
    """The content of a regular file of at most `limit_bytes`; no link is followed.

    :raises OSError: EFBIG where it is larger, EINVAL where it is no regular file, and others.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))

        if state.st_size > limit_bytes:
            raise OSError(errno.EFBIG, f"larger than {limit_bytes} bytes", str(path))

        # One more than it has: a file that grows meanwhile is seen.
        data = bytearray()
        while len(data) <= state.st_size:
            piece = os.read(fd, state.st_size + 1 - len(data))
            if not piece:
                break

            data += piece

        return bytes(data)
    finally:
        os.close(fd)


def _write_all(fd: int, parts: Iterable[bytes | memoryview]) -> None:
    for part in parts:
        view = memoryview(part).cast("B")
        while view:
            view = view[os.write(fd, view) :]
