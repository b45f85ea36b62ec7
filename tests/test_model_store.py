"""The store takes bytes in once, by copying, and nobody can change them afterwards."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from switchgear.daemon import model_store
from switchgear.daemon.model_store import MEMORY_LIMIT_BYTES, ModelStore, Stored
from switchgear.ipc.arena import F_ADD_SEALS, F_SEAL_WRITE
from switchgear.ipc.errors import (
    BadConfiguration,
    BadDescriptor,
    BadModel,
    Cancelled,
    ModelTooLarge,
    NoSpace,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 1 << 20
LARGE = MEMORY_LIMIT_BYTES + 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models"


def content(size: int, seed: int = 0) -> bytes:
    return seed.to_bytes(8, "little") + bytes(size - 8)


@contextlib.contextmanager
def source(data: bytes) -> Iterator[int]:
    fd = os.memfd_create("source")
    try:
        os.write(fd, data)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def taken(store: ModelStore, data: bytes) -> Iterator[Stored]:
    with source(data) as fd:
        stored = store.take(fd, store.check(fd), lambda _: None, threading.Event())

    try:
        yield stored
    finally:
        os.close(stored.fd)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_small_model_lies_in_a_sealed_memfd(folder: Path) -> None:
    data = content(1000)
    with taken(ModelStore(folder, MIB, MIB), data) as stored:
        assert stored.digest == hashlib.sha256(data).hexdigest()
        assert (stored.storage, stored.path, stored.size_bytes) == ("memory", None, 1000)
        assert os.pread(stored.fd, 2000, 0) == data
        for change in (
            lambda: os.pwrite(stored.fd, b"x", 0),
            lambda: os.ftruncate(stored.fd, 10),
            lambda: os.ftruncate(stored.fd, 2000),
            lambda: fcntl.fcntl(stored.fd, F_ADD_SEALS, F_SEAL_WRITE),
        ):
            with pytest.raises(PermissionError):
                change()

    assert names(folder) == []


def test_a_large_model_lies_in_a_file_by_its_hash(folder: Path) -> None:
    data = content(LARGE)
    progress: list[int] = []
    store = ModelStore(folder, 100 * MIB, 100 * MIB)
    with source(data) as fd:
        stored = store.take(fd, LARGE, progress.append, threading.Event())

    try:
        assert names(folder) == [f"{hashlib.sha256(data).hexdigest()}.tflite"]
        assert stored.storage == "file"
        assert os.pread(stored.fd, 8, 0) == data[:8]
        assert os.fstat(stored.fd).st_size == LARGE
        assert os.fstat(stored.fd).st_mode & 0o777 == 0o400
        assert fcntl.fcntl(stored.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(stored.fd, b"x")

        assert progress == [*range(MIB, LARGE, MIB), LARGE]
    finally:
        os.close(stored.fd)


def test_the_border_is_at_16_mib(folder: Path) -> None:
    store = ModelStore(folder, 100 * MIB, 100 * MIB)
    with taken(store, content(16 * MIB)) as at, taken(store, content(16 * MIB + 1)) as above:
        assert (at.storage, above.storage) == ("memory", "file")


def test_it_is_copied_not_shared(folder: Path) -> None:
    store = ModelStore(folder, 100 * MIB, 100 * MIB)
    for size in (1000, LARGE):
        with source(content(size)) as fd:
            stored = store.take(fd, size, lambda _: None, threading.Event())
            os.pwrite(fd, b"changed!", 0)

        try:
            assert os.pread(stored.fd, 8, 0) == bytes(8)
        finally:
            os.close(stored.fd)


def test_the_model_used_longest_ago_makes_room(folder: Path) -> None:
    store = ModelStore(folder, 3 * LARGE, LARGE)
    digests = []
    for number in range(4):
        with taken(store, content(LARGE, number)) as stored:
            digests.append(f"{stored.digest}.tflite")

        # Clocks of file systems are coarse.
        os.utime(folder / digests[-1], ns=(number, number))

    assert names(folder) == sorted(digests[1:])

    # Taken again, the second one is the newest.
    with taken(store, content(LARGE, 1)), taken(store, content(LARGE, 5)) as fifth:
        assert digests[1] in names(folder)
        assert f"{fifth.digest}.tflite" in names(folder)
        assert digests[2] not in names(folder)


def test_a_model_that_is_in_use_is_not_removed(folder: Path) -> None:
    store = ModelStore(folder, 2 * LARGE, LARGE)
    with taken(store, content(LARGE, 1)) as one:
        # A worker's copy of the descriptor holds it as well.
        copy = os.dup(one.fd)

    with taken(store, content(LARGE, 2)) as two:
        with pytest.raises(NoSpace) as caught, taken(store, content(LARGE, 3)):
            pytest.fail("there was room")

        assert caught.value.details == {"bytes_needed": LARGE, "bytes_free": 0}
        assert names(folder) == sorted(f"{s.digest}.tflite" for s in (one, two))
        os.close(copy)
        with taken(store, content(LARGE, 3)) as three:
            assert names(folder) == sorted(f"{s.digest}.tflite" for s in (two, three))


def test_the_same_bytes_do_not_lie_there_twice(folder: Path) -> None:
    store = ModelStore(folder, 2 * LARGE, LARGE)
    with taken(store, content(LARGE)) as one, taken(store, content(LARGE)) as two:
        assert os.fstat(one.fd).st_ino == os.fstat(two.fd).st_ino
        assert one.digest == two.digest
        assert len(names(folder)) == 1


def test_copies_that_are_being_made_count(folder: Path) -> None:
    store = ModelStore(folder, 2 * LARGE, LARGE)
    refused: list[BaseException] = []

    def another(done: int) -> None:
        if done == LARGE:
            with contextlib.ExitStack() as stack:
                stack.enter_context(taken(store, content(LARGE, 8)))
                try:
                    stack.enter_context(taken(store, content(LARGE, 9)))
                except NoSpace as error:
                    refused.append(error)

    with source(content(LARGE, 7)) as fd:
        stored = store.take(fd, LARGE, another, threading.Event())
        os.close(stored.fd)

    assert len(refused) == 1
    with taken(store, content(LARGE, 9)):
        pass


def test_a_model_larger_than_the_store(folder: Path) -> None:
    store = ModelStore(folder, LARGE - 1, 100 * MIB)
    with pytest.raises(NoSpace) as caught, taken(store, content(LARGE)):
        pytest.fail("there was room")

    assert caught.value.details == {"bytes_needed": LARGE, "bytes_free": LARGE - 1}


def test_a_full_disk_is_said_before_and_while_it_fills(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ModelStore(folder, 1 << 60, 1 << 60)
    with source(b"") as fd:
        os.truncate(fd, 1 << 55)
        with pytest.raises(NoSpace) as caught:
            store.take(fd, 1 << 55, lambda _: None, threading.Event())

    assert caught.value.details["bytes_needed"] == 1 << 55
    free = caught.value.details["bytes_free"]
    assert isinstance(free, int)
    assert 0 < free < 1 << 55

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(model_store.os, "write", full)  # type: ignore[attr-defined]
    with open(folder.parent / "model", "w+b") as file:
        file.truncate(LARGE)
        for size in (1000, LARGE):
            with pytest.raises(NoSpace, match="No space left"):
                store.take(file.fileno(), size, lambda _: None, threading.Event())

    assert names(folder) == []


def test_leftovers_of_a_killed_daemon_are_removed(folder: Path) -> None:
    folder.mkdir()
    (folder / ".incoming-abc").write_bytes(b"half")
    (folder / f"{'0' * 64}.tflite").write_bytes(b"whole")
    ModelStore(folder, MIB, MIB)

    assert names(folder) == [f"{'0' * 64}.tflite"]


def test_a_folder_that_cannot_be_made_is_a_bad_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BadConfiguration, match="Not a directory"):
        ModelStore(tmp_path / "file" / "models", MIB, MIB)


def a_pipe() -> tuple[int, ...]:
    return os.pipe()


def a_socket() -> tuple[int, ...]:
    return tuple(end.detach() for end in socket.socketpair())


def a_folder() -> tuple[int, ...]:
    return (os.open("/", os.O_RDONLY),)


def a_device() -> tuple[int, ...]:
    return (os.open("/dev/zero", os.O_RDONLY),)


def an_event() -> tuple[int, ...]:
    return (os.eventfd(0),)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (a_pipe, "not a pipe"),
        (a_socket, "not a socket"),
        (a_folder, "not a folder"),
        (a_device, "not a character device"),
        (an_event, "not something without a file"),
    ],
)
def test_other_kinds_of_descriptors_are_refused(
    make: Callable[[], tuple[int, ...]], said: str, folder: Path
) -> None:
    fds = make()
    try:
        with pytest.raises(BadDescriptor, match=said):
            ModelStore(folder, MIB, MIB).check(fds[0])
    finally:
        for fd in fds:
            os.close(fd)


def test_size_is_checked_before_anything_is_read(folder: Path) -> None:
    store = ModelStore(folder, MIB, MIB)
    with source(b"") as fd:
        with pytest.raises(BadModel, match="empty"):
            store.check(fd)

        os.truncate(fd, MIB + 1)
        with pytest.raises(ModelTooLarge) as caught:
            store.check(fd)

        assert caught.value.details == {"bytes_needed": MIB + 1}
        os.truncate(fd, MIB)
        assert store.check(fd) == MIB


@pytest.mark.parametrize("size", [1000, LARGE])
def test_a_file_that_shrinks_meanwhile(size: int, folder: Path) -> None:
    store = ModelStore(folder, 100 * MIB, 100 * MIB)
    with source(content(size)) as fd:
        os.truncate(fd, size - 1)
        with pytest.raises(BadDescriptor, match=f"shrank from {size} to {size - 1} bytes"):
            store.take(fd, size, lambda _: None, threading.Event())

    assert names(folder) == []


def test_a_descriptor_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "written", os.O_WRONLY | os.O_CREAT)
    try:
        os.write(fd, b"model")
        store = ModelStore(folder, MIB, MIB)
        with pytest.raises(BadDescriptor, match="cannot be read"):
            store.take(fd, store.check(fd), lambda _: None, threading.Event())
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", [3 * MIB, LARGE])
def test_a_copy_may_be_stopped(size: int, folder: Path) -> None:
    store = ModelStore(folder, 100 * MIB, 100 * MIB)
    stop = threading.Event()
    progress: list[int] = []

    def after_one(done: int) -> None:
        progress.append(done)
        stop.set()

    with source(content(size)) as fd, pytest.raises(Cancelled):
        store.take(fd, size, after_one, stop)

    assert progress == [MIB]
    assert names(folder) == []
