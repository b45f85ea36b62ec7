"""Element types of tensors: name, number on the wire, and size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type. `format` is its struct/memoryview letter, None where there is none."""

    name: str
    number: int
    size_bytes: int
    format: str | None


# Names are numpy's. The numbers are ours: they stand in a slot header.
_ALL: Final = (
    Dtype("float32", 1, 4, "f"),
    Dtype("float16", 2, 2, "e"),
    Dtype("float64", 3, 8, "d"),
    Dtype("int8", 4, 1, "b"),
    Dtype("uint8", 5, 1, "B"),
    Dtype("int16", 6, 2, "h"),
    Dtype("uint16", 7, 2, "H"),
    Dtype("int32", 8, 4, "i"),
    Dtype("uint32", 9, 4, "I"),
    Dtype("int64", 10, 8, "q"),
    Dtype("uint64", 11, 8, "Q"),
    Dtype("bool", 12, 1, "?"),
    Dtype("complex64", 13, 8, None),
)
DTYPES: Final = {dtype.name: dtype for dtype in _ALL}
DTYPES_BY_NUMBER: Final = {dtype.number: dtype for dtype in _ALL}
