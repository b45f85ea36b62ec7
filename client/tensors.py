"""Views of tensors in memory, and the checked way of writing values into them."""

from __future__ import annotations

import importlib
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from switchgear.ipc.dtypes import DTYPES, Dtype
from switchgear.ipc.errors import BadInput

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from switchgear.ipc.slot import TensorSpec

# What an app gets: a numpy array where numpy can be imported, else a memoryview of the tensor's
# format and shape. Without numpy a checker sees Any here.
View: TypeAlias = "NDArray[Any]"
# What an app may give: an array, anything with the buffer protocol, or nested lists of numbers.
Value: TypeAlias = "ArrayLike"

_LONG: Final = {4: ("i", "I"), 8: ("q", "Q")}[struct.calcsize("l")]
_SAME_FORMAT: Final = {"l": _LONG[0], "L": _LONG[1], "c": "B"}
_COMPLEX: Final = {"Zf": "complex64", "Zd": "complex128"}
_FORMAT_NAMES: Final = {dtype.format: dtype.name for dtype in DTYPES.values()}


@cache
def numpy_module() -> Any:
    """numpy, or None where it cannot be imported; imported at the first use of a tensor."""
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None


def view_of(raw: memoryview, dtype: Dtype, shape: Sequence[int]) -> View:
    """A view of the bytes `raw` (exactly the tensor's), which shares their memory.

    Without numpy, types for which a memoryview has no letter are: float16 as "H" (its bits),
    complex64 as "f" with a last dimension of 2.
    """
    numpy = numpy_module()
    if numpy is not None:
        view: View = numpy.ndarray(shape, dtype.name, raw)
        return view

    letter = {"float16": "H", "complex64": "f"}.get(dtype.name, dtype.format)
    dims = [*shape, 2] if dtype.name == "complex64" else list(shape)
    return _cast(raw, letter or "B", dims)


def copy_of(view: View) -> View:
    """A copy that does not depend on the arena."""
    source: Any = view
    if not isinstance(source, memoryview):
        copied: View = source.copy()
        return copied

    data = bytearray(source.nbytes)
    memoryview(data)[:] = source.cast("B")
    return _cast(memoryview(data), source.format, list(source.shape or ()))


def _cast(raw: memoryview, letter: str, dims: list[int]) -> View:
    flat: Any = raw
    # A memoryview cannot have a dimension of 0 beside others.
    shaped: View = flat.cast(letter, dims) if raw.nbytes else flat.cast(letter)
    return shaped


class Target:
    """One input tensor in memory: its view, and how a value gets into it."""

    __slots__ = ("_array", "_dtype", "_raw", "dtype", "name", "shape", "view")

    def __init__(self, spec: TensorSpec, raw: memoryview) -> None:
        """`raw` is writable and exactly as long as the tensor."""
        self.name = spec.name
        self.shape = spec.shape
        self.dtype = DTYPES[spec.dtype]
        self._raw = raw
        self.view = view_of(raw, self.dtype, spec.shape)
        numpy = numpy_module()
        self._array: Any = None if numpy is None else numpy.ndarray
        self._dtype: Any = None if numpy is None else self.view.dtype

    def write(self, value: Value) -> None:
        """Copies `value` in.

        :raises BadInput: its dtype, shape or size is not this tensor's.
        """
        given: Any = value
        if self._array is not None and isinstance(given, self._array):
            if given.dtype != self._dtype:
                raise self._wrong(f"is of dtype {given.dtype}")

            if given.shape != self.shape:
                raise self._wrong(f"has shape {_dims(given.shape)}")

            self.view[...] = given
            return

        try:
            source = memoryview(given)
        except TypeError:
            self._write_numbers(given)
            return

        with source:
            self._check_buffer(source)
            if source.c_contiguous:
                with source.cast("B") as flat:
                    self._raw[:] = flat
            else:
                self._raw[:] = source.tobytes()

    def _check_buffer(self, source: memoryview) -> None:
        letter = source.format
        swapped = ">!" if sys.byteorder == "little" else "<"
        if letter[:1] in ("@", "=", "<"):
            letter = letter[1:]

        letter = _SAME_FORMAT.get(letter, letter)
        name = _FORMAT_NAMES.get(letter) or _COMPLEX.get(letter, f"format {source.format!r}")
        # Plain bytes stand for any tensor of their size.
        plain = letter == "B" and source.ndim == 1
        if letter[:1] in swapped or (name != self.dtype.name and not plain):
            raise self._wrong(f"is of dtype {name}")

        if source.nbytes != self._raw.nbytes:
            raise self._wrong(f"has {source.nbytes} bytes")

        if source.ndim > 1 and source.shape != self.shape:
            raise self._wrong(f"has shape {_dims(source.shape or ())}")

    def _write_numbers(self, value: object) -> None:
        if not isinstance(value, list | tuple | int | float):
            raise self._wrong(f"is a {type(value).__name__}")

        if self.dtype.format is None:
            raise self._wrong("is a list: give an array")

        numbers = list(self._numbers(value, self.shape))
        try:
            # Packed first: a value that does not fit must not leave half of the others.
            self._raw[:] = struct.pack(f"<{len(numbers)}{self.dtype.format}", *numbers)
        except (struct.error, OverflowError) as error:
            raise self._wrong(f"has a value that does not fit: {error}") from None

    def _numbers(self, value: object, shape: tuple[int, ...]) -> Iterator[int | float]:
        if not shape:
            if not isinstance(value, int | float):
                raise self._wrong(f"has a {type(value).__name__} where a number belongs")

            yield value
            return

        if not isinstance(value, list | tuple) or len(value) != shape[0]:
            raise self._wrong("is a list of another shape")

        for part in value:
            yield from self._numbers(part, shape[1:])

    def _wrong(self, what: str) -> BadInput:
        return BadInput(
            f"input {self.name!r} {what}; the model takes {self.dtype.name}"
            f" {_dims(self.shape)}, {self._raw.nbytes} bytes",
            input=self.name,
        )


def write_all(targets: Mapping[str, Target], inputs: Mapping[str, Value]) -> None:
    """Writes each named value into its target.

    :raises BadInput: an unknown name, or a value that does not fit.
    """
    for name, value in inputs.items():
        target = targets.get(name)
        if target is None:
            raise unknown_input(name, targets)

        target.write(value)


def unknown_input(name: object, targets: Mapping[str, Target]) -> BadInput:
    known = ", ".join(repr(known) for known in targets) or "none"
    return BadInput(f"the model has no input {name!r}; its inputs: {known}", input=str(name))


def missing_inputs(targets: Mapping[str, Target], inputs: Mapping[str, Value]) -> BadInput:
    """The error for inputs of which at least one is missing or unknown."""
    for name in inputs:
        if name not in targets:
            return unknown_input(name, targets)

    missing = [name for name in targets if name not in inputs]
    return BadInput(f"input {missing[0]!r} is missing", input=missing[0])


def _dims(shape: Sequence[int]) -> str:
    return "[" + ", ".join(str(dim) for dim in shape) + "]"
