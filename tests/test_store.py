"""The profile's file: every kind of bad file and folder, two processes, migration."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from profile_helpers import profile
from store_files import WHOLE, content, sealed

from switchgear.fingerprints import store as store_module
from switchgear.fingerprints.store import (
    BAD_FILES_KEPT,
    FILE_BYTES_AT_MOST,
    FILE_NAME,
    LOCK_NAME,
    ProfileStore,
)


def bad_files() -> dict[str, tuple[bytes, str]]:
    flipped = bytearray(WHOLE)
    place = WHOLE.index(b"6000.0")
    flipped[place] ^= 1
    extra = content()
    extra["surprise"] = 1
    missing = content()
    del missing["devices"]
    wrong_type = content()
    wrong_type["measurements"][0]["values"][0]["samples"] = "20"
    infinite = content()
    infinite["measurements"][0]["values"][0]["median"] = float("inf")
    absurd = content()
    absurd["devices"][0]["threshold"]["throttle_c"] = 900.0
    return {
        "empty": (b"", "empty"),
        "NUL-filled": (bytes(len(WHOLE)), "corrupt"),
        "half": (WHOLE[: len(WHOLE) // 2], "corrupt"),
        "all but the end": (WHOLE[:-3], "corrupt"),
        "NUL-filled end": (WHOLE[:-400] + bytes(400), "corrupt"),
        "one bit flipped": (bytes(flipped), "checksum"),
        "garbage": (os.urandom(4096), "corrupt"),
        "text": (b"hello\n", "corrupt"),
        "another JSON": (b'{"version": 1}', "corrupt"),
        "a list": (b"[]", "corrupt"),
        "deep nesting": (b"[" * 100_000, "corrupt"),
        "a long integer": (b'{"format": ' + b"9" * 6000 + b"}", "corrupt"),
        "not a number": (WHOLE.replace(b"6000.0", b"NaN"), "corrupt"),
        "infinite": (sealed(2, infinite).replace(b"Infinity", b"1e999"), "corrupt"),
        "future schema": (sealed(3, content()), "future_schema"),
        "far future": (sealed(10**18, content()), "future_schema"),
        "schema 0": (sealed(0, content()), "old_schema"),
        "no schema": (sealed(None, content()), "corrupt"),
        "schema true": (sealed(True, content()), "corrupt"),
        "checksum of another": (sealed(2, content(), sha256="0" * 64), "checksum"),
        "no checksum": (sealed(2, content(), sha256=None), "checksum"),
        "null profile": (sealed(2, None), "corrupt"),
        "extra key": (sealed(2, extra), "corrupt"),
        "missing key": (sealed(2, missing), "corrupt"),
        "wrong type": (sealed(2, wrong_type), "corrupt"),
        "absurd threshold": (sealed(2, absurd), "corrupt"),
        "schema 1 of schema 2": (sealed(1, content()), "corrupt"),
        "too large": (WHOLE + b" " * FILE_BYTES_AT_MOST, "too_large"),
    }


BAD_FILES = bad_files()


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "made" / "for it")
    assert store.load().profile is None
    assert store.load().problem is None
    assert store.save(profile()) is None
    loaded = store.load()
    assert loaded.profile == profile()
    assert (loaded.problem, loaded.migrated_from) == (None, None)
    assert store.path.stat().st_mode & 0o777 == 0o644


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    assert store.save(profile()) is None
    envelope = json.loads(store.path.read_text())
    assert (envelope["schema"], envelope["profile"]["schema_version"]) == (2, 2)


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_told_set_aside_and_measured_again(tmp_path: Path, name: str) -> None:
    data, kind = BAD_FILES[name]
    store = ProfileStore(tmp_path, clock=lambda: 1234.5)
    store.path.write_bytes(data)
    loaded = store.load()
    assert loaded.profile is None
    assert loaded.problem is not None
    assert loaded.problem.kind == kind, loaded.problem
    aside = tmp_path / f"{FILE_NAME}.bad-1234"
    assert loaded.problem.set_aside == str(aside)
    assert aside.read_bytes() == data
    # The next start finds no file, which is a first start and no loop.
    assert store.load().problem is None
    assert store.save(profile()) is None
    assert store.load().profile == profile()


@pytest.mark.parametrize("make", ["folder", "full folder", "pipe", "link", "dangling link"])
def test_something_else_in_the_files_place(tmp_path: Path, make: str) -> None:
    store = ProfileStore(tmp_path)
    if make.endswith("folder"):
        store.path.mkdir()
        if make.startswith("full"):
            (store.path / "inside").write_text("x")
    elif make == "pipe":
        os.mkfifo(store.path)
    else:
        target = tmp_path / "elsewhere.json"
        if make == "link":
            target.write_bytes(WHOLE)

        store.path.symlink_to(target)

    loaded = store.load()
    assert loaded.problem is not None
    assert loaded.problem.kind == "not_a_file"
    assert store.save(profile()) is None
    assert store.load().profile == profile()


def test_bad_files_do_not_pile_up(tmp_path: Path) -> None:
    moments = iter(range(100, 200))
    store = ProfileStore(tmp_path, clock=lambda: float(next(moments) // 2))
    for number in range(12):
        store.path.write_text(f"bad {number}")
        assert store.load().problem is not None

    kept = sorted(name for name in os.listdir(tmp_path) if ".bad-" in name)
    assert len(kept) == BAD_FILES_KEPT
    assert {(tmp_path / name).read_text() for name in kept} == {"bad 9", "bad 10", "bad 11"}


def refuse_writes(monkeypatch: pytest.MonkeyPatch, folder: Path, code: int) -> None:
    """What the kernel answers on a read-only or full file system; root gets past mode bits."""
    real_open, real_mkdir = os.open, Path.mkdir

    def open_(path: Any, flags: int, mode: int = 0o777) -> int:
        if str(path).startswith(str(folder)) and flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            raise OSError(code, os.strerror(code))

        return real_open(path, flags, mode)

    def mkdir(path: Path, **keywords: Any) -> None:
        if not path.exists():
            raise OSError(code, os.strerror(code))

        real_mkdir(path, **keywords)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(Path, "mkdir", mkdir)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EROFS, "read_only"),
        (errno.EACCES, "read_only"),
        (errno.ENOSPC, "no_space"),
        (errno.EIO, "not_stored"),
    ],
)
def test_a_folder_that_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: str
) -> None:
    store = ProfileStore(tmp_path)
    assert store.save(profile()) is None
    refuse_writes(monkeypatch, tmp_path, code)
    problem = store.save(profile(2.0))
    assert problem is not None
    assert (problem.kind, problem.errno) == (kind, code)
    assert store.load().profile == profile()
    with store.measuring() as mine:
        assert mine

    # A bad file in it is told each time and stays where it is.
    monkeypatch.undo()
    store.path.write_bytes(b"bad")
    refuse_writes(monkeypatch, tmp_path, code)
    for _ in range(3):
        loaded = store.load()
        assert loaded.problem is not None
        assert (loaded.problem.kind, loaded.problem.set_aside) == ("corrupt", "")

    missing = ProfileStore(tmp_path / "not there")
    assert missing.load().problem is None
    assert missing.save(profile()) is not None


def test_a_write_that_fails_in_the_middle_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ProfileStore(tmp_path)
    assert store.save(profile()) is None
    real_write = os.write

    def write(descriptor: int, data: Any) -> int:
        if len(data) > 2000:
            return real_write(descriptor, data[:1000])

        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)
    problem = store.save(profile(2.0))
    monkeypatch.undo()
    assert problem is not None
    assert problem.kind == "no_space"
    assert store.load().profile == profile()
    assert sorted(os.listdir(tmp_path)) == [FILE_NAME, LOCK_NAME]


def test_an_unreadable_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ProfileStore(tmp_path)
    assert store.save(profile()) is None

    def read(descriptor: int, size: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "read", read)
    problem = store.load().problem
    assert problem is not None
    assert (problem.kind, problem.errno) == ("unreadable", errno.EIO)


def test_a_held_lock_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "LOCK_LIMIT_S", 0.05)
    store = ProfileStore(tmp_path)
    holder = os.open(tmp_path / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        problem = store.save(profile())
        assert problem is not None
        assert problem.kind == "locked"
        store.path.write_bytes(b"bad")
        loaded = store.load()
        assert loaded.problem is not None
        assert loaded.problem.set_aside == ""
    finally:
        os.close(holder)

    assert store.save(profile()) is None


def test_a_good_file_is_never_set_aside_for_a_bad_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another daemon repairs the file between our look at it and our lock."""
    store, other = ProfileStore(tmp_path), ProfileStore(tmp_path)
    store.path.write_bytes(b"bad")
    real_judge = ProfileStore._judge_again

    def judge(self: ProfileStore, bad: Any) -> Any:
        assert other.save(profile()) is None
        return real_judge(self, bad)

    monkeypatch.setattr(ProfileStore, "_judge_again", judge)
    loaded = store.load()
    assert loaded.profile == profile()
    assert loaded.problem is None


def save_often(folder: str, scale: float) -> None:
    store = ProfileStore(Path(folder))
    # The other one may stand still, or wait for a slow disk, while it has the lock.
    with patch.object(store_module, "LOCK_LIMIT_S", 15.0):
        for _ in range(30):
            problem = store.save(profile(scale))
            assert problem is None, problem


# Sixty writes that wait for the disk.
@pytest.mark.timeout(60)
def test_two_daemons_do_not_trample_each_other(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    assert store.save(profile(1.0)) is None
    code = "import sys, test_store; test_store.save_often(sys.argv[1], float(sys.argv[2]))"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), scale], cwd=Path(__file__).parent
        )
        for scale in ("1.0", "2.0")
    ]
    done = threading.Event()
    bad: list[object] = []

    def watch() -> None:
        while not done.is_set():
            loaded = store.load()
            if loaded.profile not in (profile(1.0), profile(2.0)):
                bad.append(loaded)

    watcher = threading.Thread(target=watch)
    watcher.start()
    exits = [writer.wait() for writer in writers]
    done.set()
    watcher.join()
    assert exits == [0, 0]
    assert bad == []
    assert sorted(os.listdir(tmp_path)) == [FILE_NAME, LOCK_NAME]


def test_only_one_measures_at_a_time(tmp_path: Path) -> None:
    one, other = ProfileStore(tmp_path), ProfileStore(tmp_path)
    with one.measuring() as mine:
        assert mine
        with other.measuring() as theirs:
            assert not theirs

    with other.measuring() as theirs:
        assert theirs
