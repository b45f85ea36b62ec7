"""A compiled model: what a replay needs, as one file with a checksum.

The file is read by a process that must not crash, and its bytes go to drivers that abort on
damage: nothing in it is used before its checksum was verified, and then every count, length and
index is held against its bound once more. docs/opencl.md describes the format.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import mmap
import os
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from switchgear.backends.contract import Coverage, ModelInfo
from switchgear.backends.opencl.fields import FieldReader, FieldWriter
from switchgear.backends.opencl.plan import ALIGNMENT_BYTES
from switchgear.ipc.dtypes import DTYPES
from switchgear.ipc.slot import MAX_RANK, MAX_TENSORS, TensorSpec

MAGIC: Final = b"SWGCLART"
FORMAT_VERSION: Final = 1
# Of every page size that kernels use, so that the constants can be mapped.
CONSTANTS_ALIGNMENT_BYTES: Final = 65536

# magic, version, header's length, tables' length, constants' length, SHA-256.
_HEADER: Final = struct.Struct("<8sIIQQ32s")
_HEADER_BYTES: Final = 128

MAX_TABLES_BYTES: Final = 1 << 28
MAX_CONSTANTS_BYTES: Final = 1 << 34
MAX_SOURCE_BYTES: Final = 1 << 26
MAX_BINARY_BYTES: Final = 1 << 27
MAX_KERNELS: Final = 1 << 16
MAX_BUFFERS: Final = 1 << 18
MAX_LAUNCHES: Final = 1 << 18
MAX_ARGUMENTS: Final = 255
MAX_BUFFER_BYTES: Final = 1 << 40
MAX_TEXT_BYTES: Final = 1 << 12
MAX_PAIRS: Final = 4096
# Work items of a group; no device that is known has more.
MAX_GROUP: Final = 4096


class BadArtefactError(Exception):
    """The file is damaged, of another version, or says something impossible."""


class BufferKind(enum.IntEnum):
    """What a buffer is: its `offset` counts in the scratch memory or in the constants."""

    SCRATCH = 0
    CONSTANT = 1
    INPUT = 2
    OUTPUT = 3


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer that launches use. `first` and `last` are the launches of its live range."""

    kind: BufferKind
    size_bytes: int
    offset: int = 0
    first: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel run: work items in all and per group, and a buffer for each argument."""

    kernel: int
    global_size: tuple[int, int, int]
    local_size: tuple[int, int, int]
    arguments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Artefact:
    """A compiled model.

    `key` is what it was compiled from and for; `notes` are figures for people. All kernels are
    functions of the one program whose OpenCL C is `source`; `binary` is that program as the
    driver of `key` built it, empty where it has to be built from source. `inputs` and `outputs`
    are buffers in the order of `info`. `constants` may be a view of a mapped file, which it
    keeps alive.
    """

    key: Mapping[str, str]
    notes: Mapping[str, str]
    info: ModelInfo
    precision: str
    coverage: Coverage
    source: str
    binary: bytes
    kernels: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    launches: tuple[Launch, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scratch_bytes: int
    constants: memoryview

    def check(self) -> None:
        """Holds every index and size against what it points into.

        :raises BadArtefactError: one does not fit.
        """
        for buffer in self.buffers:
            room = {
                BufferKind.SCRATCH: self.scratch_bytes,
                BufferKind.CONSTANT: len(self.constants),
            }.get(buffer.kind, MAX_BUFFER_BYTES)
            if not 0 < buffer.size_bytes <= room - buffer.offset or buffer.offset < 0:
                raise BadArtefactError(f"a buffer lies outside its memory: {buffer}")

            if buffer.offset % ALIGNMENT_BYTES:
                raise BadArtefactError(f"a buffer is not aligned: {buffer}")

            if not buffer.first <= buffer.last < max(1, len(self.launches)):
                raise BadArtefactError(f"a buffer is used by no launch: {buffer}")

        for launch in self.launches:
            if not 0 <= launch.kernel < len(self.kernels):
                raise BadArtefactError(f"a launch of kernel {launch.kernel}")

            _check_indices(launch.arguments, len(self.buffers))
            _check_sizes(launch)

        _check_indices((*self.inputs, *self.outputs), len(self.buffers))
        self._check_tensors()
        if not 0 <= self.coverage.arithmetic <= 1:
            raise BadArtefactError(f"a share of {self.coverage.arithmetic}")

    def _check_tensors(self) -> None:
        if len(self.inputs) != len(self.info.inputs):
            raise BadArtefactError("not one buffer for each input")

        if len(self.outputs) != len(self.info.outputs):
            raise BadArtefactError("not one buffer for each output")

        for index, spec in zip(
            (*self.inputs, *self.outputs), (*self.info.inputs, *self.info.outputs), strict=True
        ):
            if self.buffers[index].size_bytes != spec.capacity_bytes:
                raise BadArtefactError(f"the buffer of {spec.name!r} has another size")


def digest_of(artefact: Artefact) -> str:
    """16 hexadecimal digits for what an artefact runs: its kernels, launches and buffers.

    Notes, binary and constants are left out: they change without a change of what is launched.
    """
    what = (artefact.precision, artefact.source, artefact.kernels, artefact.launches)
    parts = (*what, artefact.buffers, artefact.inputs, artefact.outputs)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _check_indices(indices: tuple[int, ...], count: int) -> None:
    if not all(0 <= index < count for index in indices):
        raise BadArtefactError(f"a buffer that is none of the {count}")


def _check_sizes(launch: Launch) -> None:
    group = 1
    for items, local in zip(launch.global_size, launch.local_size, strict=True):
        if not 0 < local <= items < 1 << 32 or items % local:
            raise BadArtefactError(f"a launch of {items} work items in groups of {local}")

        group *= local

    if group > MAX_GROUP:
        raise BadArtefactError(f"a work group of {group} items")


def to_bytes(artefact: Artefact) -> bytes:
    """The file's bytes up to the constants, which follow at their alignment.

    :raises BadArtefactError: a part is larger than the format allows.
    """
    artefact.check()
    tables = _tables(artefact)
    room = -(_HEADER_BYTES + len(tables)) % CONSTANTS_ALIGNMENT_BYTES
    fields = (MAGIC, FORMAT_VERSION, _HEADER_BYTES, len(tables), len(artefact.constants))
    digest = hashlib.sha256(_HEADER.pack(*fields, bytes(32)))
    digest.update(tables)
    digest.update(artefact.constants)
    header = _HEADER.pack(*fields, digest.digest()).ljust(_HEADER_BYTES, b"\0")
    return header + tables + bytes(room)


def write(artefact: Artefact, path: str) -> None:
    """Writes the file and makes it durable; whoever reads meanwhile sees the old one or this.

    :raises OSError: the folder is not writable or has no room; nothing is left behind.
    :raises BadArtefactError: as `to_bytes`.
    """
    head = to_bytes(artefact)
    folder = os.path.dirname(path) or "."
    fd, temporary = tempfile.mkstemp(prefix=".new-", dir=folder)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(head)
            file.write(artefact.constants)
            file.flush()
            os.fsync(file.fileno())

        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)

        raise

    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def without_binary(artefact: Artefact) -> Artefact:
    """The same, to be built from its source."""
    return replace(artefact, binary=b"")


def without_constants(artefact: Artefact) -> Artefact:
    """The same, letting go of the mapped file: for looking at, not for running."""
    return replace(artefact, constants=memoryview(b""))


def read(path: str) -> Artefact:
    """Reads a file; its constants stay a private mapping of it.

    :raises BadArtefactError: it is damaged or of another version.
    :raises OSError: it cannot be opened; FileNotFoundError where there is none.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _HEADER_BYTES:
            raise BadArtefactError(f"{size} bytes are no artefact")

        # Private and writable: drivers want memory that they could write to.
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)

    return from_memory(memoryview(memory))


def from_memory(data: memoryview) -> Artefact:
    """The artefact in these bytes; its constants are a view of them.

    :raises BadArtefactError: they are damaged or of another version.
    """
    tables, constants = _verified(data)
    artefact = _from_tables(tables, constants)
    artefact.check()
    return artefact


def _verified(data: memoryview) -> tuple[memoryview, memoryview]:
    if len(data) < _HEADER_BYTES:
        raise BadArtefactError(f"{len(data)} bytes are no artefact")

    magic, version, header_bytes, tables_bytes, constants_bytes, digest = _HEADER.unpack_from(
        data
    )
    if magic != MAGIC or header_bytes != _HEADER_BYTES:
        raise BadArtefactError("no artefact")

    if version != FORMAT_VERSION:
        raise BadArtefactError(f"version {version}, not {FORMAT_VERSION}")

    if tables_bytes > MAX_TABLES_BYTES or constants_bytes > MAX_CONSTANTS_BYTES:
        raise BadArtefactError("larger than an artefact may be")

    begin = -(-(_HEADER_BYTES + tables_bytes) // CONSTANTS_ALIGNMENT_BYTES)
    begin *= CONSTANTS_ALIGNMENT_BYTES
    if begin + constants_bytes != len(data):
        raise BadArtefactError(f"{len(data)} bytes, not {begin + constants_bytes}")

    tables = data[_HEADER_BYTES : _HEADER_BYTES + tables_bytes]
    constants = data[begin:]
    fields = (magic, version, header_bytes, tables_bytes, constants_bytes)
    found = hashlib.sha256(_HEADER.pack(*fields, bytes(32)))
    found.update(tables)
    found.update(constants)
    if found.digest() != digest:
        raise BadArtefactError("the checksum is another")

    # What the checksum leaves out says nothing, and says so.
    end = _HEADER_BYTES + tables_bytes
    if any(data[_HEADER.size : _HEADER_BYTES]) or any(data[end:begin]):
        raise BadArtefactError("bytes where there are none")

    return tables, constants


def _tables(artefact: Artefact) -> bytes:
    out = FieldWriter()
    out.pairs(artefact.key)
    out.pairs(artefact.notes)
    _write_info(out, artefact.info)
    out.text(artefact.precision)
    out.u32(artefact.coverage.nodes)
    out.u32(artefact.coverage.nodes_total)
    out.f64(artefact.coverage.arithmetic)
    out.block(artefact.source.encode())
    out.block(artefact.binary)
    out.u32(len(artefact.kernels))
    for name in artefact.kernels:
        out.text(name)

    out.u32(len(artefact.buffers))
    for buffer in artefact.buffers:
        out.u32(buffer.kind)
        out.u64(buffer.size_bytes)
        out.u64(buffer.offset)
        out.u32(buffer.first)
        out.u32(buffer.last)

    out.u32(len(artefact.launches))
    for launch in artefact.launches:
        out.u32(launch.kernel)
        for size in (*launch.global_size, *launch.local_size):
            out.u32(size)

        out.indices(launch.arguments)

    out.indices(artefact.inputs)
    out.indices(artefact.outputs)
    out.u64(artefact.scratch_bytes)
    data = out.bytes()
    if len(data) > MAX_TABLES_BYTES or len(artefact.constants) > MAX_CONSTANTS_BYTES:
        raise BadArtefactError("larger than an artefact may be")

    return data


def _from_tables(tables: memoryview, constants: memoryview) -> Artefact:
    fields = FieldReader(tables, BadArtefactError)
    artefact = Artefact(
        key=fields.pairs(MAX_PAIRS, MAX_TEXT_BYTES),
        notes=fields.pairs(MAX_PAIRS, MAX_TEXT_BYTES),
        info=_read_info(fields),
        precision=fields.text(MAX_TEXT_BYTES),
        coverage=Coverage(fields.u32(), fields.u32(), fields.f64()),
        source=fields.long_text(MAX_SOURCE_BYTES),
        binary=bytes(fields.block(MAX_BINARY_BYTES)),
        kernels=tuple(fields.text(MAX_TEXT_BYTES) for _ in range(fields.count(MAX_KERNELS, 4))),
        buffers=tuple(_read_buffer(fields) for _ in range(fields.count(MAX_BUFFERS, 28))),
        launches=tuple(_read_launch(fields) for _ in range(fields.count(MAX_LAUNCHES, 32))),
        inputs=fields.indices(MAX_TENSORS),
        outputs=fields.indices(MAX_TENSORS),
        scratch_bytes=fields.u64(MAX_BUFFER_BYTES),
        constants=constants,
    )
    fields.end()
    return artefact


def _read_buffer(fields: FieldReader) -> Buffer:
    return Buffer(
        BufferKind(fields.u32(max(BufferKind))),
        fields.u64(MAX_BUFFER_BYTES),
        fields.u64(MAX_BUFFER_BYTES),
        fields.u32(MAX_LAUNCHES),
        fields.u32(MAX_LAUNCHES),
    )


def _read_launch(fields: FieldReader) -> Launch:
    return Launch(
        fields.u32(MAX_KERNELS),
        (fields.u32(), fields.u32(), fields.u32()),
        (fields.u32(MAX_GROUP), fields.u32(MAX_GROUP), fields.u32(MAX_GROUP)),
        fields.indices(MAX_ARGUMENTS),
    )


def _write_info(out: FieldWriter, info: ModelInfo) -> None:
    for tensors in (info.inputs, info.outputs):
        out.u32(len(tensors))
        for spec in tensors:
            out.text(spec.name)
            out.text(spec.dtype)
            out.indices(spec.shape)
            # -1 stands for a dimension that a signature leaves open.
            out.indices(tuple(size + 1 for size in spec.signature))
            out.u64(spec.capacity_bytes)

    out.text(info.names)
    out.u32(info.state)
    out.pairs({name: str(count) for name, count in info.operators.items()})


def _read_info(fields: FieldReader) -> ModelInfo:
    inputs, outputs = (
        tuple(_read_spec(fields) for _ in range(fields.count(MAX_TENSORS, 28)))
        for _ in range(2)
    )
    names = fields.text(MAX_TEXT_BYTES)
    state = bool(fields.u32(1))
    counts = fields.pairs(MAX_PAIRS, MAX_TEXT_BYTES)
    if not all(count.isascii() and count.isdigit() for count in counts.values()):
        raise BadArtefactError("a count of operators that is no number")

    return ModelInfo(inputs, outputs, names, state, {n: int(c) for n, c in counts.items()})


def _read_spec(fields: FieldReader) -> TensorSpec:
    name = fields.text(MAX_TEXT_BYTES)
    dtype = fields.text(MAX_TEXT_BYTES)
    if dtype not in DTYPES:
        raise BadArtefactError(f"element type {dtype!r}")

    shape = fields.indices(MAX_RANK)
    signature = tuple(size - 1 for size in fields.indices(MAX_RANK))
    return TensorSpec(name, dtype, shape, signature, fields.u64(MAX_BUFFER_BYTES), False)
