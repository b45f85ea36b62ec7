"""The arena: one sealed memfd of fixed size that an app and its worker map."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import Final

from switchgear.ipc.errors import BadDescriptor, NoSpace
from switchgear.ipc.slot import (
    PAGE_BYTES,
    TENSOR_ALIGN_BYTES,
    TensorPlace,
    TensorSpec,
    align,
    header_bytes,
)

# Smaller ones are not worth a look at the free memory; nor may the last of it be taken.
UNCHECKED_BYTES: Final = 1 << 20
KEPT_FREE_BYTES: Final = 64 << 20
F_ADD_SEALS: Final = 1033
F_GET_SEALS: Final = 1034
F_SEAL_SEAL: Final = 0x1
F_SEAL_SHRINK: Final = 0x2
F_SEAL_GROW: Final = 0x4
F_SEAL_WRITE: Final = 0x8


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of every tensor of every slot.

    `inputs[slot][tensor]` and `outputs[slot][tensor]` follow the order of the model's tensors;
    `headers[slot]` is the header of output slot `slot`.
    """

    size_bytes: int
    inputs: tuple[tuple[TensorPlace, ...], ...]
    outputs: tuple[tuple[TensorPlace, ...], ...]
    headers: tuple[TensorPlace, ...]

    @property
    def filled_bytes(self) -> int:
        """What tensors and headers take; the rest lies between them."""
        slots = (*self.inputs, *self.outputs, self.headers)
        return sum(place.length for slot in slots for place in slot)


def plan(
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    input_slots: int,
    output_slots: int,
) -> Layout:
    """Lays the slots out in one chunk: tensors aligned to 256 bytes, slots to a page."""
    cursor = 0

    def place(specs: tuple[TensorSpec, ...]) -> tuple[TensorPlace, ...]:
        nonlocal cursor
        places = []
        for spec in specs:
            cursor = align(cursor, TENSOR_ALIGN_BYTES)
            places.append(TensorPlace(0, cursor, spec.capacity_bytes))
            cursor += spec.capacity_bytes

        return tuple(places)

    in_places = []
    for _ in range(input_slots):
        in_places.append(place(inputs))
        cursor = align(cursor, PAGE_BYTES)

    out_places = []
    headers = []
    room = header_bytes(len(outputs))
    for _ in range(output_slots):
        headers.append(TensorPlace(0, cursor, room))
        cursor += room
        out_places.append(place(outputs))
        cursor = align(cursor, PAGE_BYTES)

    size = max(cursor, PAGE_BYTES)
    return Layout(size, tuple(in_places), tuple(out_places), tuple(headers))


def available_bytes() -> int | None:
    """Memory that can be had without swapping (MemAvailable); None where it is not told."""
    try:
        with open("/proc/meminfo", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass

    return None


def create(name: str, size_bytes: int) -> int:
    """A new memfd of `size_bytes`, all of it backed by memory, sealed against resizing.

    Blocks while the kernel clears the pages (about 0.3 ms a MiB): call it from a thread when it
    is large. The caller owns the descriptor.

    :raises NoSpace: there is not enough memory.
    """
    if size_bytes > UNCHECKED_BYTES:
        # A memfd has no limit of its own: the kernel would end processes to serve it.
        free = available_bytes()
        if free is not None and size_bytes > free - KEPT_FREE_BYTES:
            raise NoSpace(
                f"the arena needs {size_bytes} bytes of memory, {free} are free",
                bytes_needed=size_bytes,
                bytes_free=free,
            )

    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise NoSpace("not enough memory for the arena", bytes_needed=size_bytes) from None

        raise

    return fd


def seals(fd: int) -> int:
    """The seals of a descriptor; 0 where it cannot have any."""
    try:
        return fcntl.fcntl(fd, F_GET_SEALS)
    except OSError:
        return 0


def map_arena(fd: int, size_bytes: int) -> mmap.mmap:
    """Maps an arena that somebody else made; the caller owns the mapping, not `fd`.

    :raises BadDescriptor: it could shrink under the mapping, or is smaller than `size_bytes`.
    """
    if seals(fd) & (F_SEAL_SHRINK | F_SEAL_GROW) != F_SEAL_SHRINK | F_SEAL_GROW:
        raise BadDescriptor("the arena is not sealed against resizing")

    if os.fstat(fd).st_size < size_bytes:
        raise BadDescriptor("the arena is smaller than its layout")

    # Populated: the first frame must not pay for page faults.
    return mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
