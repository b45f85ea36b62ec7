"""Reads a call's parameters, type by type; a client may have put anything there."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection
from typing import Final

from switchgear.ipc.errors import BadRequest
from switchgear.ipc.slot import MAX_RANK, MAX_TENSORS

_MISSING: Final = object()
MAX_DIMENSION: Final = 2**31 - 1


class InvalidParameter(Exception):
    """org.varlink.service.InvalidParameter: a parameter is missing or of a wrong type."""


class Parameters:
    """The parameters of one call. Every getter checks; `done` refuses what was not asked
    for."""

    def __init__(self, fields: dict[str, object]) -> None:
        # A null stands for an optional parameter that is not given.
        self._fields = {name: value for name, value in fields.items() if value is not None}

    def _take(self, name: str, kind: type, *, required: bool) -> object:
        value = self._fields.pop(name, _MISSING)
        if value is _MISSING:
            if required:
                raise InvalidParameter(name)

            return None

        # bool is a subclass of int in Python, not in varlink.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InvalidParameter(name)

        return value

    def string(self, name: str) -> str:
        value = self._take(name, str, required=True)
        assert isinstance(value, str)
        return value

    def optional_string(self, name: str) -> str | None:
        value = self._take(name, str, required=False)
        return value if isinstance(value, str) else None

    def integer(self, name: str) -> int:
        value = self._take(name, int, required=True)
        assert isinstance(value, int)
        return value

    def optional_integer(
        self, name: str, default: int | None, low: int, high: int
    ) -> int | None:
        """:raises BadRequest: it is out of its range."""
        value = self._take(name, int, required=False)
        if not isinstance(value, int):
            return default

        if not low <= value <= high:
            raise BadRequest(f"{name} is {low} to {high}, not {value}")

        return value

    def optional_real(self, name: str, default: float, high: float) -> float:
        """A number from 0 to `high`, with or without a fraction.

        :raises BadRequest: it is out of its range.
        """
        value = self._take(name, object, required=False)
        if value is None:
            return default

        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidParameter(name)

        if not 0 <= value <= high:
            raise BadRequest(f"{name} is 0 to {high:g}, not {value}")

        return float(value)

    def boolean(self, name: str) -> bool:
        """An optional boolean; false when it is not given."""
        return bool(self._take(name, bool, required=False))

    def optional_boolean(self, name: str) -> bool | None:
        value = self._take(name, bool, required=False)
        return value if isinstance(value, bool) else None

    def choice(self, name: str, default: str, known: Collection[str]) -> str:
        """:raises BadRequest: it is none of the known words."""
        value = self.optional_string(name)
        if value is None:
            return default

        if value not in known:
            raise BadRequest(f"{name} is one of {', '.join(sorted(known))}, not {value[:64]!r}")

        return value

    def strings(self, name: str) -> tuple[str, ...]:
        value = self._take(name, list, required=False)
        if value is None:
            return ()

        assert isinstance(value, list)
        if len(value) > MAX_TENSORS or not all(isinstance(item, str) for item in value):
            raise InvalidParameter(name)

        return tuple(value)

    def shapes(self, name: str, *, required: bool = False) -> dict[str, tuple[int, ...]]:
        """Shapes by tensor name.

        :raises BadRequest: a dimension is not positive, or there are too many.
        """
        value = self._take(name, dict, required=required)
        if not isinstance(value, dict):
            return {}

        if len(value) > MAX_TENSORS:
            raise InvalidParameter(name)

        result = {}
        for tensor, dims in value.items():
            if not isinstance(dims, list) or len(dims) > MAX_RANK:
                raise InvalidParameter(name)

            for dim in dims:
                if not isinstance(dim, int) or isinstance(dim, bool):
                    raise InvalidParameter(name)

                if not 1 <= dim <= MAX_DIMENSION:
                    raise BadRequest(f"a dimension of {tensor[:140]!r} is {dim}")

            result[str(tensor)] = tuple(dims)

        return result

    def values(self, name: str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        """Inline tensors by name: dtype, shape and bytes.

        :raises BadRequest: one is not base64.
        """
        value = self._take(name, dict, required=True)
        assert isinstance(value, dict)
        if len(value) > MAX_TENSORS:
            raise InvalidParameter(name)

        result = {}
        for tensor, item in value.items():
            if not isinstance(item, dict):
                raise InvalidParameter(name)

            inner = Parameters(item)
            dtype = inner.string("dtype")
            shape = inner.shapes_of_one("shape")
            try:
                data = base64.b64decode(inner.string("data"), validate=True)
            except (binascii.Error, ValueError):
                raise BadRequest(f"input {tensor[:140]!r} is not base64") from None

            inner.done()
            result[str(tensor)] = (dtype, shape, data)

        return result

    def shapes_of_one(self, name: str) -> tuple[int, ...]:
        value = self._take(name, list, required=True)
        assert isinstance(value, list)
        if len(value) > MAX_RANK or not all(
            isinstance(dim, int) and not isinstance(dim, bool) and 0 <= dim <= MAX_DIMENSION
            for dim in value
        ):
            raise InvalidParameter(name)

        return tuple(value)

    def done(self) -> None:
        """Refuses parameters that nobody asked for: a typing error must not pass in silence."""
        if self._fields:
            raise InvalidParameter(next(iter(self._fields)))
