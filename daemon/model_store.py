"""Takes models in: copies them from a client's descriptor and keeps their bytes by hash.

Up to 16 MiB a model lies in a sealed memfd, above that in a file of the state folder. Either
way its bytes cannot change any more."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Final

from switchgear.ipc.arena import (
    F_ADD_SEALS,
    F_SEAL_GROW,
    F_SEAL_SEAL,
    F_SEAL_SHRINK,
    F_SEAL_WRITE,
)
from switchgear.ipc.errors import (
    BadConfiguration,
    BadDescriptor,
    BadModel,
    Cancelled,
    ModelTooLarge,
    NoSpace,
)

MEMORY_LIMIT_BYTES: Final = 16 << 20
CHUNK_BYTES: Final = 1 << 20
SUFFIX: Final = ".tflite"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    """A model's bytes. `fd` is read-only and owned by whoever holds this; `path` is None in
    memory."""

    digest: str
    size_bytes: int
    fd: int
    path: Path | None
    copy_us: int
    hash_us: int

    @property
    def storage(self) -> str:
        return "memory" if self.path is None else "file"


class ModelStore:
    """The folder of large models; the small ones are memfds of their holders."""

    def __init__(self, folder: Path, limit_bytes: int, model_limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._model_limit_bytes = model_limit_bytes
        # What copies that are being made still need, and who may count it.
        self._promised_bytes = 0
        self._lock = threading.Lock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for leftover in folder.glob(".incoming-*"):
                leftover.unlink(missing_ok=True)
        except OSError as error:
            raise BadConfiguration(
                f"the folder of models {folder} is not usable: {error.strerror}"
            ) from None

    def check(self, fd: int) -> int:
        """The size of what a client sent; refuses what cannot be a model. Does not block.

        :raises BadDescriptor: it is no regular file or memfd.
        :raises ModelTooLarge: it is over the configured limit.
        """
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BadDescriptor(f"a model is a regular file or a memfd, not {_kind(status)}")

        if status.st_size > self._model_limit_bytes:
            raise ModelTooLarge(
                f"the model has {status.st_size} bytes, the limit is {self._model_limit_bytes}",
                bytes_needed=status.st_size,
            )

        if status.st_size == 0:
            raise BadModel("the model is empty")

        return status.st_size

    def take(
        self, fd: int, size_bytes: int, progress: Callable[[int], None], stop: threading.Event
    ) -> Stored:
        """Copies and hashes `size_bytes` from a client's descriptor; blocks: run it in a
        thread.

        The file may change or shrink meanwhile: it is read, never mapped. `progress` is called
        with the bytes done, from this thread.

        :raises BadDescriptor: it cannot be read, or shrank.
        :raises NoSpace: memory or disk is short.
        :raises Cancelled: `stop` was set.
        """
        if size_bytes <= MEMORY_LIMIT_BYTES:
            return self._take_to_memory(fd, size_bytes, progress, stop)

        return self._take_to_file(fd, size_bytes, progress, stop)

    def discard(self, stored: Stored) -> None:
        """Removes the file of a model that is of no use; descriptors of it stay good."""
        if stored.path is not None:
            stored.path.unlink(missing_ok=True)

    def _take_to_memory(
        self, fd: int, size_bytes: int, progress: Callable[[int], None], stop: threading.Event
    ) -> Stored:
        target = os.memfd_create("model", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            digest, copy_us, hash_us = _copy(fd, target, size_bytes, progress, stop)
            fcntl.fcntl(
                target,
                F_ADD_SEALS,
                F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL,
            )
        except BaseException:
            os.close(target)
            raise

        return Stored(digest, size_bytes, target, None, copy_us, hash_us)

    def _take_to_file(
        self, fd: int, size_bytes: int, progress: Callable[[int], None], stop: threading.Event
    ) -> Stored:
        with self._room(size_bytes):
            target, name = tempfile.mkstemp(prefix=".incoming-", dir=self._folder)
            temporary = Path(name)
            try:
                digest, copy_us, hash_us = _copy(fd, target, size_bytes, progress, stop)
                path = self._folder / f"{digest}{SUFFIX}"
                os.fchmod(target, 0o400)
                os.fsync(target)
                # A descriptor that cannot write: workers get copies of it.
                kept = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            finally:
                os.close(target)

            try:
                kept = self._settle(temporary, path, kept)
                _fsync_folder(self._folder)
            except BaseException:
                temporary.unlink(missing_ok=True)
                os.close(kept)
                raise

        return Stored(digest, size_bytes, kept, path, copy_us, hash_us)

    def _settle(self, temporary: Path, path: Path, fd: int) -> int:
        """Gives a complete copy its name; returns the descriptor to keep, in place of `fd`.

        The lock is held by whoever has a copy of the descriptor, workers included: a model that
        is in use is not removed, and the same bytes do not lie there twice.
        """
        with self._lock:
            fcntl.flock(fd, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                used = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                if not _lock_alone(used):
                    fcntl.flock(used, fcntl.LOCK_SH)
                    os.utime(path)
                    temporary.unlink()
                    os.close(fd)
                    return used

                os.close(used)

            temporary.rename(path)
            return fd

    @contextlib.contextmanager
    def _room(self, size_bytes: int) -> Iterator[None]:
        """Makes room for a copy, and keeps it from others until it is made.

        :raises NoSpace: the disk or the store's own bound has none.
        """
        with self._lock:
            self._make_room(size_bytes)
            self._promised_bytes += size_bytes

        try:
            yield
        finally:
            with self._lock:
                self._promised_bytes -= size_bytes

    def _make_room(self, size_bytes: int) -> None:
        """Checks the disk and the store's own bound; removes models not used for longest."""
        files = []
        for path in self._folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))

        files.sort()
        used = self._promised_bytes + sum(size for _, size, _ in files)
        for _, size, path in files:
            if used + size_bytes <= self._limit_bytes:
                break

            if _remove_unused(path):
                used -= size

        if used + size_bytes > self._limit_bytes:
            raise NoSpace(
                f"the model needs {size_bytes} bytes of the store, models that are loaded "
                f"hold {used} of {self._limit_bytes}",
                bytes_needed=size_bytes,
                bytes_free=max(0, self._limit_bytes - used),
            )

        space = os.statvfs(self._folder)
        free = space.f_bavail * space.f_frsize - self._promised_bytes
        if size_bytes > free:
            raise NoSpace(
                f"the model needs {size_bytes} bytes in {self._folder}, {free} are free",
                bytes_needed=size_bytes,
                bytes_free=max(0, free),
            )


def _lock_alone(fd: int) -> bool:
    """Takes the lock that says that a model is in use; False when somebody else has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False

    return True


def _remove_unused(path: Path) -> bool:
    """Removes a model unless somebody uses it; True when it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True

    try:
        if not _lock_alone(fd):
            return False

        path.unlink(missing_ok=True)
    finally:
        os.close(fd)

    return True


def _copy(
    source: int,
    target: int,
    size_bytes: int,
    progress: Callable[[int], None],
    stop: threading.Event,
) -> tuple[str, int, int]:
    """Copies and hashes in chunks; returns the hash and the time of each, in microseconds."""
    digest = hashlib.sha256()
    offset = copy_ns = hash_ns = 0
    while offset < size_bytes:
        if stop.is_set():
            raise Cancelled("loading was cancelled")

        begin_ns = monotonic_ns()
        try:
            chunk = os.pread(source, min(CHUNK_BYTES, size_bytes - offset), offset)
        except OSError as error:
            raise BadDescriptor(f"the model cannot be read: {error.strerror}") from None

        if not chunk:
            raise BadDescriptor(f"the model shrank from {size_bytes} to {offset} bytes")

        _write(target, chunk, size_bytes)
        read_ns = monotonic_ns()
        digest.update(chunk)
        hash_ns += monotonic_ns() - read_ns
        copy_ns += read_ns - begin_ns
        offset += len(chunk)
        progress(offset)

    return digest.hexdigest(), copy_ns // 1000, hash_ns // 1000


def _write(target: int, chunk: bytes, size_bytes: int) -> None:
    view = memoryview(chunk)
    while view:
        try:
            view = view[os.write(target, view) :]
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
                raise NoSpace(
                    f"no room for the model: {error.strerror}", bytes_needed=size_bytes
                ) from None

            raise


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _kind(status: os.stat_result) -> str:
    kinds = (
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
        (stat.S_ISLNK, "a symbolic link"),
    )
    for test, name in kinds:
        if test(status.st_mode):
            return name

    return "something without a file behind it"
