"""The artefact's file: what was written is read, and nothing else is believed."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import struct
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opencl_helpers import SIZE_BYTES, spec, sum_twice

from switchgear.backends.contract import Coverage, ModelInfo
from switchgear.backends.opencl import artefact as files
from switchgear.backends.opencl.artefact import (
    Artefact,
    BadArtefactError,
    Buffer,
    BufferKind,
    Launch,
    from_memory,
    to_bytes,
)
from switchgear.backends.opencl.fields import FieldReader, FieldWriter

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

MAGIC_BYTES = 8
DIGEST_OFFSET = 32


def packed(artefact: Artefact) -> bytearray:
    return bytearray(to_bytes(artefact)) + artefact.constants


def resealed(data: bytearray) -> bytearray:
    """The same with a checksum that fits: what a careful forger would write."""
    header = bytes(data[:DIGEST_OFFSET]) + bytes(32)
    (tables_bytes,) = struct.unpack_from("<Q", data, 16)
    begin = -(-(128 + tables_bytes) // files.CONSTANTS_ALIGNMENT_BYTES)
    begin *= files.CONSTANTS_ALIGNMENT_BYTES
    digest = hashlib.sha256(header)
    digest.update(data[128 : 128 + tables_bytes])
    digest.update(data[begin:])
    data[DIGEST_OFFSET : DIGEST_OFFSET + 32] = digest.digest()
    return data


def same(one: Artefact, other: Artefact) -> bool:
    plain = (dataclasses.replace(each, constants=memoryview(b"")) for each in (one, other))
    first, second = plain
    return first == second and bytes(one.constants) == bytes(other.constants)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    artefact = dataclasses.replace(sum_twice(3), binary=b"\x00\x01 any bytes")
    path = str(tmp_path / "model.clart")
    files.write(artefact, path)
    assert same(files.read(path), artefact)
    assert os.listdir(tmp_path) == ["model.clart"]


def test_constants_can_be_mapped(tmp_path: Path) -> None:
    path = tmp_path / "model.clart"
    files.write(sum_twice(), str(path))
    data = path.read_bytes()
    constants = bytes(sum_twice().constants)
    assert data.endswith(constants)
    assert (len(data) - len(constants)) % 65536 == 0


def test_names_and_free_dimensions_survive() -> None:
    """Signatures have -1 where a dimension is free, names any printable text."""
    batch = dataclasses.replace(spec("größe:0"), signature=(-1,))
    artefact = sum_twice()
    info = ModelInfo((batch,), artefact.info.outputs, "tensors", False, {"ADD": 12})
    artefact = dataclasses.replace(artefact, info=info)
    read = from_memory(memoryview(packed(artefact)))
    assert read.info == info


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_flipped_bit_is_seen(data: st.DataObject) -> None:
    whole = packed(sum_twice(2))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(BadArtefactError):
        from_memory(memoryview(whole))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_shorter_file_is_seen(data: st.DataObject) -> None:
    whole = packed(sum_twice(2))
    with pytest.raises(BadArtefactError):
        from_memory(memoryview(whole)[: data.draw(st.integers(0, len(whole) - 1))])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_forged_table_is_refused_or_sound(data: st.DataObject) -> None:
    """With the right checksum too, no field leads out of its bounds."""
    whole = packed(sum_twice(2))
    (tables_bytes,) = struct.unpack_from("<Q", whole, 16)
    for _ in range(data.draw(st.integers(1, 3))):
        place = 128 + data.draw(st.integers(0, tables_bytes - 1))
        whole[place] = data.draw(st.integers(0, 255))

    try:
        read = from_memory(memoryview(resealed(whole)))
    except BadArtefactError:
        return

    read.check()
    for launch in read.launches:
        assert all(0 <= index < len(read.buffers) for index in launch.arguments)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_other_bytes_are_no_artefact(data: bytes) -> None:
    with pytest.raises(BadArtefactError):
        from_memory(memoryview(data))


def test_another_version_says_so() -> None:
    whole = packed(sum_twice())
    struct.pack_into("<I", whole, MAGIC_BYTES, files.FORMAT_VERSION + 1)
    with pytest.raises(BadArtefactError, match="version"):
        from_memory(memoryview(resealed(whole)))


def test_counts_are_held_against_the_room_before_they_are_used() -> None:
    """A count of billions does not become a loop or an allocation."""
    out = FieldWriter()
    out.u32(0xFFFFFFF0)
    fields = FieldReader(memoryview(out.bytes()), BadArtefactError)
    with pytest.raises(BadArtefactError):
        fields.count(1 << 32, 4)


SIZES = ((256, 1, 1), (32, 1, 1))
OUTSIDE: list[tuple[str, dict[str, Any]]] = [
    ("a kernel that is not there", {"launches": (Launch(2, *SIZES, (2, 0, 1)),)}),
    ("an argument that is not there", {"launches": (Launch(0, *SIZES, (2, 0, 9)),)}),
    ("groups that do not fit", {"launches": (Launch(0, (100, 1, 1), (32, 1, 1), ()),)}),
    ("a group of nothing", {"launches": (Launch(0, (32, 1, 1), (0, 1, 1), ()),)}),
    ("a huge group", {"launches": (Launch(0, (8192, 1, 1), (8192, 1, 1), ()),)}),
    ("an input that is not there", {"inputs": (17,)}),
    ("too many outputs", {"outputs": (3, 3)}),
    ("a share above one", {"coverage": Coverage(2, 2, 1.5)}),
    ("a share that is no number", {"coverage": Coverage(2, 2, float("nan"))}),
    ("less scratch memory", {"scratch_bytes": 512}),
    ("fewer constants", {"constants": memoryview(bytes(600))}),
]


@pytest.mark.parametrize(("what", "change"), OUTSIDE, ids=[what for what, _ in OUTSIDE])
def test_what_points_outside_is_refused(what: str, change: dict[str, Any]) -> None:
    del what
    with pytest.raises(BadArtefactError):
        to_bytes(dataclasses.replace(sum_twice(), **change))


@pytest.mark.parametrize(
    "buffer",
    [
        Buffer(BufferKind.SCRATCH, SIZE_BYTES, 1 << 20, 0, 1),
        Buffer(BufferKind.SCRATCH, SIZE_BYTES, 4, 0, 1),
        Buffer(BufferKind.SCRATCH, 0, 0, 0, 1),
        Buffer(BufferKind.SCRATCH, SIZE_BYTES, 0, 1, 0),
        Buffer(BufferKind.SCRATCH, SIZE_BYTES, 0, 0, 99),
    ],
)
def test_buffers_lie_in_their_memory(buffer: Buffer) -> None:
    artefact = sum_twice()
    buffers = (*artefact.buffers[:2], buffer, *artefact.buffers[3:])
    with pytest.raises(BadArtefactError):
        to_bytes(dataclasses.replace(artefact, buffers=buffers))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = str(tmp_path / "model.clart")
    files.write(sum_twice(), path)
    old = (tmp_path / "model.clart").read_bytes()
    with pytest.raises(BadArtefactError):
        files.write(dataclasses.replace(sum_twice(), outputs=()), path)

    with pytest.raises(OSError):
        files.write(sum_twice(), str(tmp_path / "no" / "model.clart"))

    assert (tmp_path / "model.clart").read_bytes() == old
    assert os.listdir(tmp_path) == ["model.clart"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at the flush to it, after all writes."""

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write(sum_twice(), str(tmp_path / "model.clart"))

    assert os.listdir(tmp_path) == []
