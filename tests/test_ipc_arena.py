"""The arena: its layout, its seals, and what happens to a mapping without them."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from switchgear.ipc import arena, worker
from switchgear.ipc.errors import BadDescriptor, NoSpace, ProtocolError
from switchgear.ipc.slot import PAGE_BYTES, TENSOR_ALIGN_BYTES, TensorPlace, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator


def spec(size: int) -> TensorSpec:
    return TensorSpec("x", "uint8", (size,), (size,), size)


specs = st.lists(st.integers(0, 20_000).map(spec), min_size=0, max_size=5).map(tuple)


def pages_of(place: TensorPlace) -> set[int]:
    return set(
        range(place.offset // PAGE_BYTES, -(-(place.offset + place.length) // PAGE_BYTES))
    )


@given(specs, specs, st.integers(1, 16), st.integers(1, 32))
def test_no_two_tensors_share_a_byte(
    inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], ins: int, outs: int
) -> None:
    layout = arena.plan(inputs, outputs, ins, outs)
    assert [len(slot) for slot in layout.inputs] == [len(inputs)] * ins
    assert [len(slot) for slot in layout.outputs] == [len(outputs)] * outs
    tensors = [place for slot in (*layout.inputs, *layout.outputs) for place in slot]
    assert all(place.offset % TENSOR_ALIGN_BYTES == 0 for place in tensors)
    assert all(place.offset % PAGE_BYTES == 0 for place in layout.headers)
    for slot in layout.inputs:
        assert all(place.offset % PAGE_BYTES == 0 for place in slot[:1])

    used = sorted((p.offset, p.offset + p.length) for p in (*tensors, *layout.headers))
    used = [part for part in used if part[0] < part[1]]
    for (_, end), (begin, _) in pairwise(used):
        assert end <= begin

    # No page has tensors of two slots: one may be given to a device as it is.
    pages = [set().union(*map(pages_of, slot)) for slot in layout.inputs]
    assert sum(len(part) for part in pages) == len(set().union(*pages))
    assert layout.size_bytes % PAGE_BYTES == 0 or not used
    assert all(end <= layout.size_bytes for _, end in used)
    assert worker.layout_from_json(worker.layout_to_json(layout)) == layout


@given(specs.filter(bool), st.integers(-(2**40), 2**40), st.integers(-(2**40), 2**40))
def test_a_layout_from_elsewhere_stays_within_itself(
    inputs: tuple[TensorSpec, ...], offset: int, length: int
) -> None:
    packet = worker.layout_to_json(arena.plan(inputs, inputs, 2, 4))
    packet["outputs"][1][0] = [0, offset, length]
    try:
        layout = worker.layout_from_json(packet)
    except ProtocolError:
        return

    place = layout.outputs[1][0]
    assert place.chunk == 0
    assert 0 <= place.offset <= place.offset + place.length <= layout.size_bytes
    assert place == TensorPlace(0, offset, length)


@pytest.fixture
def made() -> Iterator[int]:
    fd = arena.create("test", 3 * PAGE_BYTES)
    yield fd
    os.close(fd)


def test_an_arena_cannot_be_resized(made: int) -> None:
    for size in (0, PAGE_BYTES, 100 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(made, size)

    assert os.fstat(made).st_size == 3 * PAGE_BYTES
    assert not arena.seals(made) & arena.F_SEAL_WRITE
    # All of it has memory: a full system shows here, not as a signal at the first write.
    assert os.fstat(made).st_blocks * 512 == 3 * PAGE_BYTES
    with arena.map_arena(made, 3 * PAGE_BYTES) as memory:
        memory[:] = b"x" * len(memory)


def test_no_memory_is_an_error_with_the_bytes() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NoSpace) as caught:
        arena.create("test", 1 << 60)

    assert caught.value.details["bytes_needed"] == 1 << 60
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_could_shrink_is_not_mapped() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, PAGE_BYTES)
        with pytest.raises(BadDescriptor, match="not sealed"):
            arena.map_arena(fd, PAGE_BYTES)
    finally:
        os.close(fd)


def test_what_is_too_small_is_not_mapped(made: int) -> None:
    with pytest.raises(BadDescriptor, match="smaller"):
        arena.map_arena(made, 4 * PAGE_BYTES)


def test_a_file_has_no_seals() -> None:
    with open(__file__, "rb") as file:
        assert arena.seals(file.fileno()) == 0
        with pytest.raises(BadDescriptor):
            arena.map_arena(file.fileno(), 1)


READER = """
import mmap, os, sys
fd = int(sys.argv[1])
memory = mmap.mmap(fd, 8192)
try:
    os.ftruncate(fd, 0)
except PermissionError:
    pass
print(memory[8000])
"""


@pytest.mark.parametrize("sealed", [False, True])
def test_why_the_seals_are_there(sealed: bool) -> None:
    """Without them a peer that truncates ends the reader with SIGBUS; there is no exception."""
    fd = arena.create("test", 2 * PAGE_BYTES) if sealed else os.memfd_create("test")
    try:
        if not sealed:
            os.ftruncate(fd, 2 * PAGE_BYTES)

        result = subprocess.run(
            [sys.executable, "-c", READER, str(fd)], pass_fds=[fd], capture_output=True
        )
        assert result.returncode == (0 if sealed else -signal.SIGBUS)
    finally:
        os.close(fd)


def test_a_mapping_outlives_its_descriptor() -> None:
    fd = arena.create("test", PAGE_BYTES)
    memory: mmap.mmap = arena.map_arena(fd, PAGE_BYTES)
    os.close(fd)
    with memory:
        memory[0] = 7
        assert memory[0] == 7
