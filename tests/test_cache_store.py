"""The cache of blobs: damaged files, full and read-only disks, two at once, the bound."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_disk import full_disk, read_only_disk

from switchgear.backends.cache_store import (
    HEADER,
    MAX_BLOB_BYTES,
    CacheStore,
    Lookup,
    size_of,
    trim,
)
from switchgear.ipc.errors import DriverError, NoSpace

KEY = {"what": "pipelines", "driver": "Mesa 25.0.7", "model": "ab" * 32}
BLOB = bytes(range(256)) * 9


@pytest.fixture
def store(tmp_path: Path) -> CacheStore:
    return CacheStore(tmp_path)


def only_file(root: Path) -> Path:
    (path,) = (root / "blobs").iterdir()
    return path


def test_a_blob_comes_back_in_a_new_store(tmp_path: Path, store: CacheStore) -> None:
    assert store.get(KEY) == Lookup("miss")
    store.put(KEY, BLOB)
    assert CacheStore(tmp_path).get(dict(reversed(KEY.items()))) == Lookup("hit", BLOB)
    assert only_file(tmp_path).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "blobs").stat().st_mode & 0o777 == 0o700


def test_an_empty_blob_is_one(store: CacheStore) -> None:
    store.put(KEY, b"")
    assert store.get(KEY) == Lookup("hit", b"")


def test_every_part_of_the_key_counts(store: CacheStore) -> None:
    store.put(KEY, BLOB)
    for name in KEY:
        assert store.get({**KEY, name: "other"}).state == "miss"

    assert store.get({**KEY, "more": ""}).state == "miss"


def test_a_blob_is_replaced_and_dropped(tmp_path: Path, store: CacheStore) -> None:
    store.put(KEY, BLOB)
    store.put(KEY, b"newer")
    assert store.get(KEY).data == b"newer"
    assert len(list((tmp_path / "blobs").iterdir())) == 1
    store.drop(KEY)
    store.drop(KEY)
    assert store.get(KEY).state == "miss"


@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60
)
@given(cut=st.integers(0, HEADER.size + len(BLOB)))
def test_a_truncated_file_is_reported_and_deleted(tmp_path: Path, cut: int) -> None:
    store = CacheStore(tmp_path)
    store.put(KEY, BLOB)
    path = only_file(tmp_path)
    path.write_bytes(path.read_bytes()[:cut])
    found = store.get(KEY)
    assert (found.state, found.data) == ("corrupt", None)
    assert path.name in found.reason
    assert store.get(KEY) == Lookup("miss")


@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200
)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, data: st.DataObject) -> None:
    store = CacheStore(tmp_path)
    store.put(KEY, BLOB)
    path = only_file(tmp_path)
    content = bytearray(path.read_bytes())
    # Half of the flips go into the header: it is the smaller part.
    last = len(content) - 1 if data.draw(st.booleans()) else HEADER.size - 1
    content[data.draw(st.integers(0, last))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    assert store.get(KEY).state == "corrupt"
    assert not path.exists()


def test_bytes_behind_the_blob_are_found(tmp_path: Path, store: CacheStore) -> None:
    store.put(KEY, BLOB)
    with only_file(tmp_path).open("ab") as file:
        file.write(b"\0")

    assert "its header says otherwise" in store.get(KEY).reason


def test_another_drivers_blob_under_this_name_is_not_used(
    tmp_path: Path, store: CacheStore
) -> None:
    store.put(KEY, BLOB)
    path = only_file(tmp_path)
    other = {**KEY, "driver": "Mesa 22.3.6"}
    path.rename(tmp_path / "kept")
    store.put(other, b"made by the other")
    only_file(tmp_path).rename(path)
    found = store.get(KEY)
    assert found.state == "corrupt"
    assert "another key" in found.reason


def test_a_length_beyond_the_bound_is_not_allocated(tmp_path: Path, store: CacheStore) -> None:
    store.put(KEY, BLOB)
    path = only_file(tmp_path)
    with path.open("r+b") as file:
        # Sparse: as long as its header claims, and a lot more than is ever read.
        header = HEADER.pack(b"SWGRBLOB", 1, 0, 1 << 40, bytes(32))
        file.write(header)
        file.truncate(MAX_BLOB_BYTES * 4)

    assert "larger than" in store.get(KEY).reason
    assert not path.exists()


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_what_is_no_file_is_not_read(tmp_path: Path, store: CacheStore, kind: str) -> None:
    store.put(KEY, BLOB)
    path = only_file(tmp_path)
    content = path.read_bytes()
    path.unlink()
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()

    assert store.get(KEY).state == "corrupt"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_bytes(b"a file")
    store = CacheStore(tmp_path)
    with pytest.raises(DriverError) as caught:
        store.put(KEY, BLOB)

    assert (caught.value.domain, caught.value.name) == ("errno", "EEXIST")
    assert str(tmp_path / "blobs") in caught.value.text
    assert store.get(KEY).data is None


def test_a_read_only_disk(tmp_path: Path) -> None:
    with read_only_disk(tmp_path / "disk") as disk:
        store = CacheStore(disk)
        with pytest.raises(DriverError) as caught:
            store.put(KEY, BLOB)

        assert caught.value.name == "EROFS"
        assert store.get(KEY) == Lookup("miss")


def test_a_full_disk_says_how_much_is_missing(tmp_path: Path) -> None:
    with full_disk(tmp_path / "disk", 64, free_kib=16) as disk:
        store = CacheStore(disk)
        store.put(KEY, b"small")
        with pytest.raises(NoSpace) as caught:
            store.put(KEY, bytes(40_000))

        assert caught.value.details["bytes_needed"] == 40_000
        free = caught.value.details["bytes_free"]
        assert isinstance(free, int)
        assert free < 40_000
        # What was there before still is, and nothing half-written beside it.
        assert store.get(KEY).data == b"small"
        assert [path.suffix for path in (disk / "blobs").iterdir()] == [".blob"]


def test_too_large_is_refused_before_anything_is_written(
    tmp_path: Path, store: CacheStore
) -> None:
    with pytest.raises(ValueError):
        store.put({"key": "k" * 5000}, b"")

    assert not (tmp_path / "blobs").exists()


def test_two_processes_at_once(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("cache_writer.py"))
    writers = [
        subprocess.Popen(
            [sys.executable, script, str(tmp_path), str(number)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in (1, 2)
    ]
    assert [writer.communicate()[0] for writer in writers] == ["0\n", "0\n"]
    assert [p for p in (tmp_path / "blobs").iterdir() if p.suffix != ".blob"] == []


# The bound


def aged(path: Path, age_s: int, size: int = 8192) -> Path:
    """A file last used that many seconds ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    now = 1_700_000_000
    os.utime(path, (now - age_s, now - age_s))
    return path


def test_the_least_recently_used_goes_first_whoever_it_belongs_to(tmp_path: Path) -> None:
    old_model = aged(tmp_path / "models" / "one" / "opencl" / "kernels", 500)
    old_driver = aged(tmp_path / "drivers" / "pocl" / "IF" / "program", 400)
    new_driver = aged(tmp_path / "drivers" / "pocl" / "GH" / "program", 100)
    blob = aged(tmp_path / "blobs" / "a.blob", 300)
    new_model = aged(tmp_path / "models" / "two" / "opencl" / "kernels", 50)
    done = trim(tmp_path, 3 * 8192)
    assert done.removed == ("models/one", "drivers/pocl/IF")
    assert (done.before_bytes, done.after_bytes) == (5 * 8192, 3 * 8192)
    assert size_of(tmp_path) == 3 * 8192
    assert not old_model.exists()
    assert not old_driver.exists()
    assert all(path.exists() for path in (new_driver, blob, new_model))


def test_a_unit_is_as_young_as_its_youngest_file(tmp_path: Path) -> None:
    aged(tmp_path / "models" / "one" / "weights", 500)
    fresh = aged(tmp_path / "models" / "one" / "kernels", 10)
    other = aged(tmp_path / "models" / "two" / "kernels", 200)
    trim(tmp_path, 2 * 8192)
    assert fresh.exists()
    assert not other.exists()


def test_reading_a_blob_counts_as_use(tmp_path: Path, store: CacheStore) -> None:
    store.put(KEY, BLOB)
    os.utime(only_file(tmp_path), (1, 1))
    aged(tmp_path / "blobs" / "other.blob", 10)
    assert store.get(KEY).data == BLOB
    trim(tmp_path, 8192)
    assert store.get(KEY).data == BLOB
    assert not (tmp_path / "blobs" / "other.blob").exists()


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    used = aged(tmp_path / "models" / "one" / "opencl" / "kernels", 500)
    idle = aged(tmp_path / "models" / "two" / "opencl" / "kernels", 5)
    done = trim(tmp_path, 0, keep=[used.parent])
    assert used.exists()
    assert not idle.exists()
    assert done.after_bytes == 8192


def test_unfinished_files_of_dead_processes_go(tmp_path: Path) -> None:
    left = aged(tmp_path / "blobs" / ".a.blob.xyz.part", 100_000)
    writing = tmp_path / "blobs" / ".b.blob.xyz.part"
    writing.write_bytes(b"now")
    trim(tmp_path, 1 << 30)
    assert not left.exists()
    assert writing.exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = aged(tmp_path / "outside" / "precious", 500)
    cache = tmp_path / "cache"
    (cache / "models").mkdir(parents=True)
    (cache / "models" / "link").symlink_to(outside.parent)
    trim(cache, 0)
    assert outside.exists()
    assert not (cache / "models" / "link").is_symlink()


def test_no_folder_is_nothing_to_do(tmp_path: Path) -> None:
    assert trim(tmp_path / "absent", 0).removed == ()
    assert size_of(tmp_path / "absent") == 0
