"""What a .tflite file says that the interpreter does not: its state, its custom operators.

The interpreter lists the operators of the first subgraph only, and no tensor that an operator
updates in place. The engine has checked the file's structure before this reads it.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from switchgear.ipc.errors import BadModel

if TYPE_CHECKING:
    from collections.abc import Iterator

# Field numbers of the schema (version 3): tables Model, SubGraph, Tensor and OperatorCode.
_MODEL_OPERATOR_CODES: Final = 1
_MODEL_SUBGRAPHS: Final = 2
_SUBGRAPH_TENSORS: Final = 0
_TENSOR_IS_VARIABLE: Final = 5
_CODE_DEPRECATED: Final = 0
_CODE_CUSTOM_NAME: Final = 1
_CODE_BUILTIN: Final = 3
# BuiltinOperator: VAR_HANDLE, READ_VARIABLE, ASSIGN_VARIABLE.
_STATE_CODES: Final = frozenset({142, 143, 144})
_CUSTOM_CODE: Final = 32
_MAX_NAME_BYTES: Final = 256

_U8: Final = struct.Struct("<B")
_U16: Final = struct.Struct("<H")
_I32: Final = struct.Struct("<i")
_U32: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class FileFacts:
    """`state`: the model keeps variables between runs, in whichever subgraph."""

    state: bool
    custom_operators: tuple[str, ...]


class _Table:
    """A FlatBuffers table: fields found by number."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data = data
        self._position = position
        self._fields = position - _I32.unpack_from(data, position)[0]
        (self._fields_bytes,) = _U16.unpack_from(data, self._fields)

    def place(self, number: int) -> int:
        """Where a field lies; 0 when it has its default."""
        entry = 4 + 2 * number
        if entry + 2 > self._fields_bytes:
            return 0

        offset: int = _U16.unpack_from(self._data, self._fields + entry)[0]
        return self._position + offset if offset else 0

    def scalar(self, number: int, kind: struct.Struct) -> int:
        place = self.place(number)
        return int(kind.unpack_from(self._data, place)[0]) if place else 0

    def tables(self, number: int) -> Iterator[_Table]:
        place = self.place(number)
        if not place:
            return

        vector = place + _U32.unpack_from(self._data, place)[0]
        (count,) = _U32.unpack_from(self._data, vector)
        for index in range(count):
            entry = vector + 4 + 4 * index
            yield _Table(self._data, entry + _U32.unpack_from(self._data, entry)[0])

    def text(self, number: int) -> str:
        place = self.place(number)
        if not place:
            return ""

        begin = place + _U32.unpack_from(self._data, place)[0]
        (length,) = _U32.unpack_from(self._data, begin)
        data = self._data[begin + 4 : begin + 4 + min(length, _MAX_NAME_BYTES)]
        return data.decode(errors="replace")


def read_facts(path: str) -> FileFacts:
    """Reads a few tables of the file at `path`; blocks for about a millisecond.

    :raises BadModel: an offset leads outside of the file.
    """
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        try:
            return _facts(_Table(data, _U32.unpack_from(data, 0)[0]))
        except (struct.error, IndexError) as error:
            raise BadModel(f"the file's tables are damaged: {error}") from None


def _facts(model: _Table) -> FileFacts:
    state = False
    custom = set()
    for code in model.tables(_MODEL_OPERATOR_CODES):
        # Old files have the 8-bit field only, new ones both.
        number = max(code.scalar(_CODE_DEPRECATED, _U8), code.scalar(_CODE_BUILTIN, _I32))
        state |= number in _STATE_CODES
        if number == _CUSTOM_CODE:
            custom.add(code.text(_CODE_CUSTOM_NAME))

    # Recurrent operators update such tensors in place.
    state = state or any(
        tensor.scalar(_TENSOR_IS_VARIABLE, _U8)
        for subgraph in model.tables(_MODEL_SUBGRAPHS)
        for tensor in subgraph.tables(_SUBGRAPH_TENSORS)
    )
    return FileFacts(state, tuple(sorted(custom)))
