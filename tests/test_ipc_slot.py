"""The slot's header: read from shared memory, so nothing in it is believed."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from switchgear.ipc.dtypes import DTYPES
from switchgear.ipc.errors import ProtocolError
from switchgear.ipc.slot import (
    ENTRY,
    ERROR_MAGIC,
    HEADER,
    MAX_RANK,
    SLOT_MAGIC,
    SLOT_VERSION,
    TENSOR_ALIGN_BYTES,
    SlotEntry,
    align,
    header_bytes,
    pack_error,
    pack_header,
    unpack_error,
    unpack_header,
)

shapes = st.lists(st.integers(0, 9), max_size=MAX_RANK).map(tuple)


def entry(dtype: str, shape: tuple[int, ...]) -> SlotEntry:
    return SlotEntry(dtype, shape, math.prod(shape) * DTYPES[dtype].size_bytes)


entries = st.lists(st.builds(entry, st.sampled_from(sorted(DTYPES)), shapes), max_size=6)


@given(st.integers(0, 2**64 - 1), entries)
def test_a_header_comes_back(request_id: int, tensors: list[SlotEntry]) -> None:
    data = pack_header(request_id, tensors)
    assert len(data) <= header_bytes(len(tensors))
    limits = [tensor.length for tensor in tensors]
    assert unpack_header(memoryview(data), limits) == (request_id, tensors)


@given(entries.filter(bool), st.integers(0, 5), st.integers(1, 1000))
def test_a_length_beyond_the_session_s_own_table_is_refused(
    tensors: list[SlotEntry], index: int, less: int
) -> None:
    limits = [tensor.length for tensor in tensors]
    limits[index % len(limits)] -= less
    try:
        unpack_header(memoryview(pack_header(1, tensors)), limits)
    except ProtocolError:
        return

    raise AssertionError("believed")


@given(
    st.binary(min_size=512, max_size=512),
    st.lists(st.integers(0, 10_000), max_size=4),
    st.booleans(),
)
def test_any_bytes_are_refused_or_within_the_limits(
    data: bytes, limits: list[int], valid_head: bool
) -> None:
    memory = bytearray(data)
    if valid_head:
        HEADER.pack_into(memory, 0, SLOT_MAGIC, SLOT_VERSION, len(limits), 7)

    try:
        _, tensors = unpack_header(memoryview(memory), limits)
    except ProtocolError:
        return

    assert len(tensors) == len(limits)
    for tensor, limit in zip(tensors, limits, strict=True):
        assert tensor.length <= limit
        assert len(tensor.shape) <= MAX_RANK
        assert tensor == entry(tensor.dtype, tensor.shape)


@given(st.text(max_size=400), st.integers(64, 1024))
def test_an_error_text_comes_back_as_far_as_there_is_room(text: str, room: int) -> None:
    data = pack_error(text, room)
    assert len(data) <= room
    memory = bytearray(room)
    memory[: len(data)] = data
    got = unpack_error(memoryview(memory))
    whole = text.encode(errors="replace").decode()
    assert got == whole or whole.startswith(got.rstrip("\ufffd"))


@given(st.binary(min_size=64, max_size=256))
def test_any_bytes_are_an_error_text_or_none(data: bytes) -> None:
    text = unpack_error(memoryview(data))
    if int.from_bytes(data[:4], "little") != ERROR_MAGIC:
        assert text == ""


@given(st.integers(0, 2**40), st.sampled_from([1, 8, 256, 4096]))
def test_align(value: int, to: int) -> None:
    assert value <= align(value, to) < value + to
    assert align(value, to) % to == 0


@given(st.integers(0, 64))
def test_a_header_s_room_is_aligned(count: int) -> None:
    assert header_bytes(count) >= HEADER.size + count * ENTRY.size
    assert header_bytes(count) % TENSOR_ALIGN_BYTES == 0
