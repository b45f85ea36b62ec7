"""Our own blobs in the cache folder, and the bound on all that lies in it.

A blob (a pipeline cache, a program binary) goes to a driver that may crash on a damaged one, so
each file has a header of ours, checked in full before a byte is handed on (little-endian):

| offset | bytes | what |
|---|---|---|
| 0 | 8 | magic, `SWGRBLOB` |
| 8 | 4 | version, 1 |
| 12 | 4 | length of the key, at most 4096 |
| 16 | 8 | length of the blob, at most 256 MiB |
| 24 | 32 | SHA-256 of key and blob |
| 56 | | the key (JSON, sorted), then the blob |

A file that does not hold is deleted, and the lookup says why. The key names all that the blob
depends on; it is never a time. Standard library only; every call blocks on the disk.

The bound counts every file under the folder, the drivers' own caches and prepared models too.
What was used least recently goes first, in units: a driver's file or folder, a blob, a model's
folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import struct
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from switchgear.backends.atomic_file import TEMPORARY_SUFFIX, read_bounded, write_atomically
from switchgear.ipc.errors import DriverError, NoSpace

MAGIC: Final = b"SWGRBLOB"
VERSION: Final = 1
MAX_KEY_BYTES: Final = 4096
MAX_BLOB_BYTES: Final = 256 << 20
HEADER: Final = struct.Struct("<8sIIQ32s")
# Under the cache folder.
BLOBS: Final = "blobs"
DRIVERS: Final = "drivers"
# A temporary file that is older belongs to a process that died.
_STALE_S: Final = 3600.0

Key = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Lookup:
    """`state` is `hit`, `miss` or `corrupt`; `data` is there with a hit only.

    `reason` says what was wrong with a corrupt file; it has been deleted.
    """

    state: str
    data: bytes | None = None
    reason: str = ""


class CacheStore:
    """The blobs under `root`/blobs. Any number of processes may use it at once."""

    def __init__(self, root: Path) -> None:
        self._folder = root / BLOBS

    def get(self, key: Key) -> Lookup:
        """The blob of `key`. Never raises: a cache that cannot be read is a miss."""
        wanted = _encoded(key)
        path = self._path(wanted)
        try:
            content = read_bounded(path, HEADER.size + MAX_KEY_BYTES + MAX_BLOB_BYTES)
        except FileNotFoundError:
            return Lookup("miss")
        except OSError as error:
            return self._discard(path, error.strerror or str(error))

        data, problem = _checked(content, wanted)
        if problem:
            return self._discard(path, problem)

        # For the bound: the time of the last use, not of access, which a mount may not keep.
        with contextlib.suppress(OSError):
            os.utime(path)

        return Lookup("hit", data)

    def put(self, key: Key, data: bytes) -> None:
        """Keeps a blob; afterwards it is on disk.

        :raises NoSpace: the disk or the quota is full; what was there before still is.
        :raises DriverError: domain errno: the folder cannot be written.
        :raises ValueError: the key or the blob is too large.
        """
        encoded = _encoded(key)
        if len(data) > MAX_BLOB_BYTES:
            raise ValueError(f"a blob of {len(data)} bytes")

        digest = hashlib.sha256(encoded)
        digest.update(data)
        header = HEADER.pack(MAGIC, VERSION, len(encoded), len(data), digest.digest())
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(self._path(encoded), header, encoded, data)
        except OSError as error:
            raise _not_written(error, self._folder, len(data)) from None

    def drop(self, key: Key) -> None:
        """Deletes the blob of `key`, for one that a driver refused. Never raises."""
        with contextlib.suppress(OSError):
            self._path(_encoded(key)).unlink()

    def _path(self, encoded: bytes) -> Path:
        return self._folder / f"{hashlib.sha256(encoded).hexdigest()[:32]}.blob"

    def _discard(self, path: Path, reason: str) -> Lookup:
        with contextlib.suppress(OSError):
            path.unlink()

        return Lookup("corrupt", None, f"{path.name}: {reason}")


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What a bound did: bytes that were there, bytes that are, and what went."""

    before_bytes: int
    after_bytes: int
    removed: tuple[str, ...]


def trim(root: Path, limit_bytes: int, keep: Collection[Path] = ()) -> Trimmed:
    """Deletes the least recently used units under `root` until it has `limit_bytes` at most.

    Units that are in `keep`, hold one of them or lie under one stay. Drivers take it well when
    a file of theirs goes: it is compiled again. Never raises. Two at once do no harm.
    """
    units = [(_last_use(unit), unit, _size(unit)) for unit in _units(root)]
    before = total = sum(size for _, _, size in units)
    removed = []
    for _, unit, size in sorted(units):
        if unit.name.endswith(TEMPORARY_SUFFIX):
            # Somebody is writing it, or died over it.
            if not _is_stale(unit):
                continue
        elif total <= limit_bytes:
            continue

        if any(_within(unit, each) or _within(each, unit) for each in keep):
            continue

        _remove(unit)
        total -= size
        removed.append(str(unit.relative_to(root)))

    return Trimmed(before, total, tuple(removed))


def size_of(path: Path) -> int:
    """Bytes of all files under a path, as they lie on disk; 0 where there is none."""
    return _size(path)


def _checked(content: bytes, wanted: bytes) -> tuple[bytes | None, str]:
    """The blob in a file, or what is wrong with it."""
    if len(content) < HEADER.size:
        return None, f"{len(content)} bytes, less than a header"

    magic, version, key_length, length, digest = HEADER.unpack_from(content)
    if magic != MAGIC:
        return None, "no file of ours"

    if version != VERSION:
        return None, f"of version {version}"

    if key_length > MAX_KEY_BYTES or HEADER.size + key_length + length != len(content):
        return None, f"{len(content)} bytes, but its header says otherwise"

    body = memoryview(content)[HEADER.size :]
    if hashlib.sha256(body).digest() != digest:
        return None, "its checksum does not hold"

    if body[:key_length] != wanted:
        return None, "made for another key"

    return bytes(body[key_length:]), ""


def _encoded(key: Key) -> bytes:
    encoded = json.dumps(dict(key), sort_keys=True, separators=(",", ":")).encode()
    if len(encoded) > MAX_KEY_BYTES:
        raise ValueError(f"a key of {len(encoded)} bytes")

    return encoded


def _not_written(error: OSError, folder: Path, needed: int) -> DriverError | NoSpace:
    number = error.errno or errno.EIO
    if number in (errno.ENOSPC, errno.EDQUOT):
        free = 0
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(folder).free

        text = f"{folder}: {needed} bytes are needed, {free} are free"
        return NoSpace(text, bytes_needed=needed, bytes_free=free)

    name = errno.errorcode.get(number, "EIO")
    return DriverError("errno", number, name, f"{folder}: {error.strerror}")


def _units(root: Path) -> Iterator[Path]:
    """What is deleted as one: entries two levels down, of `drivers` three."""
    for folder in _entries(root):
        if folder.name == DRIVERS:
            for driver in _entries(folder):
                yield from _entries(driver)
        elif folder.is_dir() and not folder.is_symlink():
            yield from _entries(folder)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _files(path: Path) -> Iterator[os.stat_result]:
    """The state of a file, or of all files under a folder; links are not followed."""
    with contextlib.suppress(OSError):
        state = path.lstat()
        if not path.is_dir() or path.is_symlink():
            yield state
            return

    for entry in _entries(path):
        yield from _files(entry)


def _size(path: Path) -> int:
    return sum(state.st_blocks * 512 for state in _files(path))


def _last_use(path: Path) -> float:
    return max((max(s.st_atime, s.st_mtime) for s in _files(path)), default=0.0)


def _is_stale(path: Path) -> bool:
    return time.time() - _last_use(path) > _STALE_S


def _within(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
