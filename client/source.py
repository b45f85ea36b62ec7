"""The client's own copy of a model: what it loads again after the daemon went away."""

from __future__ import annotations

import os
from typing import TypeAlias

from switchgear.ipc.errors import BadDescriptor, BadRequest

# A path, the bytes of a .tflite file, or a descriptor of one.
ModelSource: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | int"


class ModelCopy:
    """A model's bytes, or a descriptor of its file. Owns what it holds.

    A path is opened and a descriptor is duplicated, so that a file which is replaced later
    stays the model that was loaded. Bytes are kept as they are.
    """

    def __init__(self, source: ModelSource, name: str | None) -> None:
        """:raises BadDescriptor: the file cannot be opened, or the descriptor is none."""
        self.name = name
        self._fd: int | None = None
        self._data: bytes | None = None
        self._path = ""
        try:
            if isinstance(source, bool):
                raise TypeError

            if isinstance(source, int):
                self._fd = os.dup(source)
            elif isinstance(source, bytes | bytearray | memoryview):
                self._data = bytes(source)
            else:
                self._path = os.fspath(source)
                # Not blocking: a pipe without a writer must not hold the caller.
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except TypeError:
            kind = type(source).__name__
            raise BadRequest(f"a model is a path, bytes or a descriptor, not {kind}") from None
        except OSError as error:
            what = self._path or f"descriptor {source!r}"
            raise BadDescriptor(f"cannot open the model {what}: {error.strerror}") from error

    def descriptor(self) -> tuple[int, bool]:
        """A descriptor to send, and whether the caller closes it; may block while it copies."""
        if self._fd is not None:
            return self._fd, False

        if self._data is None:
            raise BadDescriptor("the client's copy of the model was closed")

        fd = os.memfd_create("switchgear-model", os.MFD_CLOEXEC)
        try:
            view = memoryview(self._data)
            while view:
                view = view[os.write(fd, view) :]
        except BaseException:
            os.close(fd)
            raise

        return fd, True

    def close(self) -> None:
        self._data = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        self.close()
