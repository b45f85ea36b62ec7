"""Fields of a binary table: written one after another, read with a bound on each.

Little-endian; a text or block has its length before it, a list its count.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_F64: Final = struct.Struct("<d")
_MAX_U32: Final = (1 << 32) - 1
_MAX_U64: Final = (1 << 64) - 1


class FieldWriter:
    """Gathers fields. Values beyond a field's width raise struct.error."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def u32(self, value: int) -> None:
        self._parts.append(_U32.pack(value))

    def u64(self, value: int) -> None:
        self._parts.append(_U64.pack(value))

    def f64(self, value: float) -> None:
        self._parts.append(_F64.pack(value))

    def block(self, data: bytes) -> None:
        self.u32(len(data))
        self._parts.append(data)

    def text(self, value: str) -> None:
        self.block(value.encode())

    def indices(self, values: tuple[int, ...]) -> None:
        self.u32(len(values))
        for value in values:
            self.u32(value)

    def pairs(self, values: Mapping[str, str]) -> None:
        self.u32(len(values))
        for name, value in values.items():
            self.text(name)
            self.text(value)

    def bytes(self) -> bytes:
        return b"".join(self._parts)


class FieldReader:
    """Reads what `FieldWriter` wrote; `error` is raised for whatever does not fit."""

    def __init__(self, data: memoryview, error: type[Exception]) -> None:
        self._data = data
        self._error = error
        self._place = 0

    def _take(self, size_bytes: int) -> memoryview:
        if size_bytes > len(self._data) - self._place:
            raise self._error(f"{size_bytes} bytes at {self._place} are behind the end")

        part = self._data[self._place : self._place + size_bytes]
        self._place += size_bytes
        return part

    def _bounded(self, value: int, bound: int) -> int:
        if value > bound:
            raise self._error(f"{value} at {self._place}, at most {bound}")

        return value

    def u32(self, bound: int = _MAX_U32) -> int:
        return self._bounded(_U32.unpack(self._take(4))[0], bound)

    def u64(self, bound: int = _MAX_U64) -> int:
        return self._bounded(_U64.unpack(self._take(8))[0], bound)

    def f64(self) -> float:
        value: float = _F64.unpack(self._take(8))[0]
        return value

    def block(self, bound: int) -> memoryview:
        return self._take(self.u32(bound))

    def text(self, bound: int) -> str:
        """Printable text.

        :raises error: it is no UTF-8, or not printable.
        """
        value = self.long_text(bound)
        if not value.isprintable():
            raise self._error("a text that is not printable")

        return value

    def long_text(self, bound: int) -> str:
        """Text of several lines."""
        try:
            return str(self.block(bound), "utf-8")
        except UnicodeDecodeError:
            raise self._error("a text that is no UTF-8") from None

    def count(self, bound: int, least_bytes: int) -> int:
        """How many entries follow; never more than there is room for."""
        count = self.u32(bound)
        if count * least_bytes > len(self._data) - self._place:
            raise self._error(f"{count} entries are behind the end")

        return count

    def indices(self, bound: int) -> tuple[int, ...]:
        count = self.count(bound, 4)
        return struct.unpack(f"<{count}I", self._take(4 * count))

    def pairs(self, bound: int, text_bound: int) -> dict[str, str]:
        return {
            self.text(text_bound): self.text(text_bound) for _ in range(self.count(bound, 8))
        }

    def end(self) -> None:
        """:raises error: something follows."""
        if self._place != len(self._data):
            raise self._error(f"{len(self._data) - self._place} bytes too many")
