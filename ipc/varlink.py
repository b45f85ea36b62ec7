"""The varlink stream: NUL-terminated JSON objects with descriptors, bounded in every direction.

No I/O here except `receive`: a `MessageReader` takes bytes and descriptors and gives messages.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Iterable
from typing import Final

from switchgear.ipc.errors import ProtocolError

MAX_MESSAGE_BYTES: Final = 2 * 1024 * 1024
MAX_DESCRIPTORS: Final = 16
MAX_NESTING: Final = 32
# A legal message of the interface has a few hundred values. The bound keeps the time that one
# message can hold the daemon's loop near that of copying it.
MAX_VALUES: Final = 16384
READ_BYTES: Final = 64 * 1024

_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_AS_SQUARE: Final = bytes.maketrans(b"{}", b"[]")
_INT64: Final = range(-(2**63), 2**63)


class Descriptors:
    """Received descriptors with an owner: what is not taken is closed."""

    __slots__ = ("_fds",)

    def __init__(self, fds: Iterable[int] = ()) -> None:
        self._fds: list[int | None] = list(fds)

    def __len__(self) -> int:
        return len(self._fds)

    def extend(self, fds: Iterable[int]) -> None:
        self._fds.extend(fds)

    def take(self, index: int) -> int:
        """Gives descriptor `index` to the caller, who closes it from now on.

        :raises ProtocolError: there is no such descriptor, or it was taken before.
        """
        fd = self._fds[index] if 0 <= index < len(self._fds) else None
        if fd is None:
            raise ProtocolError(f"the message carries no descriptor {index}")

        self._fds[index] = None
        return fd

    def close(self) -> None:
        for index, fd in enumerate(self._fds):
            if fd is not None:
                self._fds[index] = None
                os.close(fd)

    def __del__(self) -> None:
        self.close()


class Message:
    """One parsed message and the descriptors that came with it."""

    __slots__ = ("descriptors", "fields")

    def __init__(self, fields: dict[str, object], descriptors: Descriptors) -> None:
        self.fields = fields
        self.descriptors = descriptors


def _parse_int(text: str) -> int:
    # The length first: converting 5000 digits takes quadratic time.
    if len(text) > 20 or (value := int(text)) not in _INT64:
        raise ProtocolError("an integer does not fit 64 bits")

    return value


def _parse_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ProtocolError("a number is out of range")

    return value


def _refuse_constant(text: str) -> object:
    raise ProtocolError(f"{text} is no JSON value")


# One decoder: building it for each message would cost more than parsing a small one.
_DECODER: Final = json.JSONDecoder(
    parse_int=_parse_int, parse_float=_parse_float, parse_constant=_refuse_constant
)


def _check_shape(data: bytes) -> None:
    """Bounds nesting and the number of values before anything is parsed, in linear time."""
    if data.count(b'"') > 4 * MAX_VALUES or data.count(b"\\") > MAX_VALUES:
        raise ProtocolError(f"more than {MAX_VALUES} values or escapes in a message")

    # What stands outside of strings. A backslash out there would mislead this, but there the
    # parser stops at it, before whatever was hidden behind it.
    bare = b"".join(data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    if bare.count(b",") + bare.count(b"[") + bare.count(b"{") > MAX_VALUES:
        raise ProtocolError(f"more than {MAX_VALUES} values in a message")

    # Both kinds as one: the parser refuses a pair of two kinds, and before anything deeper.
    brackets = bare.translate(_AS_SQUARE, _NOT_BRACKETS)
    # Each round takes the innermost level away; what is left is nested deeper.
    for _ in range(MAX_NESTING):
        if not brackets:
            return

        brackets = brackets.replace(b"[]", b"")

    if brackets:
        raise ProtocolError(f"brackets are nested deeper than {MAX_NESTING} or do not match")


def parse(data: bytes) -> dict[str, object]:
    """The JSON object in `data`, within the bounds of this module.

    :raises ProtocolError: it is none, or beyond a bound.
    """
    _check_shape(data)
    try:
        value = _DECODER.decode(data.decode())
    except UnicodeDecodeError:
        raise ProtocolError("a message is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message is not JSON: {error}") from None

    if not isinstance(value, dict):
        raise ProtocolError("a message is not a JSON object")

    return value


def encode(fields: dict[str, object]) -> bytes:
    """The bytes of a message with its NUL. Lone surrogates stay escaped, so it never fails."""
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode() + b"\0"


class MessageReader:
    """Collects bytes and descriptors into messages, each byte looked at once.

    The owner feeds what it receives and takes messages one at a time, so that a pipelining
    client waits in here. After a ProtocolError the stream is unusable: close it.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        # Eight bytes each: there may be one for every byte that was read.
        self._ends = array.array("Q")
        self._base = 0
        self._descriptors: list[tuple[int, Descriptors]] = []

    def __len__(self) -> int:
        return len(self._buffer)

    @property
    def waiting(self) -> int:
        """How many messages are complete."""
        return len(self._ends)

    def feed(self, data: bytes, fds: list[int]) -> None:
        """Adds what one receive returned; takes over the descriptors.

        :raises ProtocolError: a message or its descriptors are beyond the bound.
        """
        self._buffer += data
        search = self._scanned
        while (end := self._buffer.find(b"\0", search)) >= 0:
            self._ends.append(self._base + end)
            search = end + 1

        self._scanned = len(self._buffer)
        if fds:
            # The kernel ends a read after the chunk that carries descriptors, so they belong to
            # the last message that has bytes in this read.
            partial = search < len(self._buffer)
            start = self._base + search if partial or not self._ends else self._ends[-1]
            self._attach(start, fds)

        tail = len(self._buffer) - (self._ends[-1] + 1 - self._base if self._ends else 0)
        if tail > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message is longer than {MAX_MESSAGE_BYTES} bytes")

    def _attach(self, position: int, fds: list[int]) -> None:
        # `position` is any byte of the message: its end once known, else its start.
        if self._descriptors and self._descriptors[-1][0] >= self._message_start():
            owner = self._descriptors[-1][1]
            owner.extend(fds)
        else:
            owner = Descriptors(fds)
            self._descriptors.append((position, owner))

        if len(owner) > MAX_DESCRIPTORS:
            raise ProtocolError(f"more than {MAX_DESCRIPTORS} descriptors in a message")

    def _message_start(self) -> int:
        """Where the last message that has bytes begins, counted from the stream's start."""
        ends = self._ends
        if not ends:
            return self._base

        if ends[-1] + 1 < self._base + len(self._buffer):
            return ends[-1] + 1

        return ends[-2] + 1 if len(ends) > 1 else self._base

    def next(self) -> Message | None:
        """The next complete message, or None.

        :raises ProtocolError: it does not parse or is beyond a bound.
        """
        if not self._ends:
            return None

        end = self._ends.pop(0) - self._base
        data = bytes(memoryview(self._buffer)[:end])
        del self._buffer[: end + 1]
        self._scanned -= end + 1
        self._base += end + 1
        descriptors = Descriptors()
        if self._descriptors and self._descriptors[0][0] < self._base:
            descriptors = self._descriptors.pop(0)[1]

        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message is longer than {MAX_MESSAGE_BYTES} bytes")

        return Message(parse(data), descriptors)

    def close(self) -> None:
        """Closes the descriptors of messages that nobody took."""
        for _, descriptors in self._descriptors:
            descriptors.close()

        self._descriptors.clear()


def receive(sock: socket.socket, limit_bytes: int = READ_BYTES) -> tuple[bytes, list[int]]:
    """One receive: bytes (empty at end of file) and descriptors, which the caller owns.

    :raises BlockingIOError: nothing there (a non-blocking socket).
    :raises ProtocolError: descriptors were lost: too many in one message, or none free here.
    """
    data, ancillary, flags, _ = sock.recvmsg(
        limit_bytes, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
    )
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
            fds.extend(numbers)

    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)

        raise ProtocolError(
            f"descriptors were lost: over {MAX_DESCRIPTORS} in a message, or none free here"
        )

    return data, fds
