"""A slot's header and the layout of tensors in it.

A slot is a page-aligned part of the arena. An output slot begins with a header that the worker
writes: which request the tensors answer, and the dtype, shape and length of each. The tensors
follow, each aligned to 256 bytes, at the offsets of the session's own table.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from switchgear.ipc.dtypes import DTYPES, DTYPES_BY_NUMBER
from switchgear.ipc.errors import BadShape, ProtocolError

SLOT_MAGIC: Final = 0x544F4C53  # "SLOT" read as little-endian
SLOT_VERSION: Final = 1
TENSOR_ALIGN_BYTES: Final = 256
PAGE_BYTES: Final = 4096
MAX_RANK: Final = 8
MAX_TENSORS: Final = 64

# I magic, H version, H tensors, Q request id, 16x reserved
HEADER: Final = struct.Struct("<IHHQ16x")
HEADER_ID: Final = struct.Struct("<Q")
HEADER_ID_OFFSET: Final = 8
# H dtype, H rank, 4x reserved, Q length in bytes, 8 dims of 4 bytes, 16x reserved
ENTRY: Final = struct.Struct("<HH4xQ8I16x")


def align(value: int, to: int) -> int:
    """The smallest multiple of `to` that is not below `value`."""
    return -(-value // to) * to


def header_bytes(tensor_count: int) -> int:
    """Room of the header of a slot with this many tensors, aligned for the first tensor."""
    return align(HEADER.size + tensor_count * ENTRY.size, TENSOR_ALIGN_BYTES)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a model says of one input or output.

    `shape` is the shape at hand, `signature` the declared one, in which -1 is free. `capacity`
    is the room kept for it in a slot, in bytes; `dynamic` says that the shape that comes out
    depends on the input's values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    signature: tuple[int, ...]
    capacity_bytes: int
    dynamic: bool = False


def check_shape(name: str, shape: tuple[int, ...], signature: tuple[int, ...]) -> None:
    """Holds a wanted shape against the declared one: only dimensions of -1 are free.

    :raises BadShape: it changes a fixed dimension, the rank, or is not positive.
    """
    fits = len(shape) == len(signature) and all(
        want > 0 and have in (-1, want) for want, have in zip(shape, signature, strict=False)
    )
    if not fits:
        raise BadShape(f"input {name!r} takes {list(signature)}, not {list(shape)}")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in the arena: chunk number, offset and length in bytes."""

    chunk: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """One tensor as an output slot's header describes it."""

    dtype: str
    shape: tuple[int, ...]
    length: int


def pack_header(request_id: int, tensors: Sequence[SlotEntry]) -> bytes:
    """The header bytes that describe `tensors`."""
    parts = [HEADER.pack(SLOT_MAGIC, SLOT_VERSION, len(tensors), request_id)]
    for tensor in tensors:
        dims = (*tensor.shape, *(0,) * (MAX_RANK - len(tensor.shape)))
        number = DTYPES[tensor.dtype].number
        parts.append(ENTRY.pack(number, len(tensor.shape), tensor.length, *dims))

    return b"".join(parts)


def unpack_header(data: memoryview, limits: list[int]) -> tuple[int, list[SlotEntry]]:
    """The request id and the tensors of a header, copied out of shared memory once.

    `limits` are the capacities of the session's own table: nothing larger is believed.

    :raises ProtocolError: the header is not one, or contradicts the table.
    """
    size = HEADER.size + len(limits) * ENTRY.size
    copy = bytes(data[:size])
    magic, version, count, request_id = HEADER.unpack_from(copy)
    if magic != SLOT_MAGIC or version != SLOT_VERSION or count != len(limits):
        raise ProtocolError("the output slot has no valid header")

    entries = []
    for index, limit in enumerate(limits):
        number, rank, length, *dims = ENTRY.unpack_from(copy, HEADER.size + index * ENTRY.size)
        dtype = DTYPES_BY_NUMBER.get(number)
        if dtype is None or rank > MAX_RANK or length > limit:
            raise ProtocolError(f"output {index} of the slot header is out of bounds")

        shape = tuple(dims[:rank])
        elements = 1
        for dim in shape:
            elements *= dim

        if elements * dtype.size_bytes != length:
            raise ProtocolError(f"output {index}: shape and length do not agree")

        entries.append(SlotEntry(dtype.name, shape, length))

    return request_id, entries


# A failed request's output slot holds the error's text in the place of the header.
ERROR_MAGIC: Final = 0x54525245  # "ERRT" read as little-endian
_ERROR: Final = struct.Struct("<II")


def pack_error(text: str, room_bytes: int) -> bytes:
    """An error's text for the place of a header, cut to its room."""
    data = text.encode(errors="replace")[: room_bytes - _ERROR.size]
    return _ERROR.pack(ERROR_MAGIC, len(data)) + data


def unpack_error(data: memoryview) -> str:
    """The error's text in the place of a header; empty where there is none."""
    copy = bytes(data)
    magic, length = _ERROR.unpack_from(copy)
    if magic != ERROR_MAGIC:
        return ""

    return copy[_ERROR.size : _ERROR.size + min(length, len(copy))].decode(errors="replace")
