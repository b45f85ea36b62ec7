"""The varlink stream: whatever the pieces, the same messages with their own descriptors."""

from __future__ import annotations

import array
import json
import os
import socket
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from switchgear.ipc.errors import ProtocolError
from switchgear.ipc.varlink import (
    MAX_DESCRIPTORS,
    MAX_MESSAGE_BYTES,
    MAX_NESTING,
    MAX_VALUES,
    Descriptors,
    MessageReader,
    encode,
    parse,
    receive,
)

simple = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    simple | numbers,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
objects = st.dictionaries(st.text(max_size=8), values, max_size=5)


@given(objects)
def test_what_json_means_is_what_is_parsed(fields: dict[str, Any]) -> None:
    assert parse(encode(fields)[:-1]) == fields
    assert parse(json.dumps(fields, ensure_ascii=False, indent=1).encode()) == fields


@given(
    st.binary(max_size=200) | st.text(alphabet='{}[]",:\\0123456789.eE-tfn ').map(str.encode)
)
def test_any_bytes_are_an_object_or_a_protocol_error(data: bytes) -> None:
    try:
        fields = parse(data)
    except ProtocolError:
        return

    assert fields == json.loads(data)


@dataclass(frozen=True, slots=True)
class Sent:
    """A message of `size` payload bytes with `fds` descriptors; cut after `first` bytes."""

    size: int
    fds: int
    first: int


sent_messages = st.lists(
    st.builds(Sent, st.integers(0, 300), st.sampled_from([0, 0, 1, 2, 5]), st.integers(1, 200)),
    min_size=1,
    max_size=8,
)


def pieces(messages: list[Sent], glue: list[bool]) -> list[tuple[bytes, int]]:
    """What a client sends: bytes with the number of descriptors that go with the first one.

    A message with descriptors begins a piece of its own, which ends within it, as the kernel
    wants it; what follows may be glued to the next message.
    """
    result: list[tuple[bytes, int]] = []
    rest = b""
    for number, sent in enumerate(messages):
        data = encode({"n": number, "x": "x" * sent.size})
        if sent.fds:
            if rest:
                result.append((rest, 0))

            first = min(sent.first, len(data))
            result.append((data[:first], sent.fds))
            rest = data[first:]
        else:
            rest += data

        if rest and not glue[number % len(glue)]:
            result.append((rest, 0))
            rest = b""

    return [*result, (rest, 0)] if rest else result


@settings(max_examples=150, deadline=None)
@given(
    sent_messages,
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.lists(st.integers(1, 400), min_size=1, max_size=10),
)
def test_any_split_gives_the_same_messages_and_descriptors(
    messages: list[Sent], glue: list[bool], limits: list[int]
) -> None:
    """Over a real socket, since only the kernel says where descriptors come out."""
    one, two = socket.socketpair()
    reader = MessageReader()
    with ExitStack() as stack, one, two, closing(reader):
        two.setblocking(False)
        identities = []
        for data, count in pieces(messages, glue):
            fds = array.array("i", [os.memfd_create("test") for _ in range(count)])
            for fd in fds:
                stack.callback(os.close, fd)

            identities.append([os.fstat(fd).st_ino for fd in fds])
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if count else []
            assert one.sendmsg([data], ancillary) == len(data)

        expected = iter(names for names in identities if names)
        found = []
        turn = 0
        while True:
            try:
                reader.feed(*receive(two, limits[turn % len(limits)]))
            except BlockingIOError:
                break

            turn += 1
            while (message := reader.next()) is not None:
                with closing(message.descriptors):
                    found.append((message.fields["n"], inodes(message.descriptors)))

    wanted = [(n, next(expected) if sent.fds else []) for n, sent in enumerate(messages)]
    assert found == wanted


def inodes(descriptors: Descriptors) -> list[int]:
    result = []
    for index in range(len(descriptors)):
        fd = descriptors.take(index)
        result.append(os.fstat(fd).st_ino)
        os.close(fd)

    return result


@given(st.lists(st.binary(max_size=60), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_any_bytes_never_break_the_reader(parts: list[bytes], counts: list[int]) -> None:
    """Messages or a ProtocolError; and every descriptor is closed in the end."""
    before = len(os.listdir("/proc/self/fd"))
    reader = MessageReader()
    try:
        for part, count in zip(parts, [*counts, *[0] * len(parts)], strict=False):
            if part:
                fds = [os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) for _ in range(count)]
                reader.feed(part, fds)

            while (message := reader.next()) is not None:
                message.descriptors.close()
    except ProtocolError:
        pass
    finally:
        reader.close()

    assert len(os.listdir("/proc/self/fd")) == before


def nested(levels: int) -> bytes:
    return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def test_nesting_at_and_over_the_bound() -> None:
    assert parse(nested(MAX_NESTING))
    with pytest.raises(ProtocolError, match="nested"):
        parse(nested(MAX_NESTING + 1))


def test_brackets_in_strings_do_not_count() -> None:
    assert parse(json.dumps({"a": "[{" * 1000, '"[': "\\"}).encode())


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63)])
def test_integers_at_the_bound(value: int) -> None:
    assert parse(b'{"a":%d}' % value) == {"a": value}


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**30])
def test_integers_over_the_bound(value: int) -> None:
    with pytest.raises(ProtocolError, match="64 bits"):
        parse(b'{"a":%d}' % value)


def test_values_at_and_over_the_bound() -> None:
    assert parse(b'{"a":[' + b"1," * (MAX_VALUES - 3) + b"1]}")
    with pytest.raises(ProtocolError, match="values"):
        parse(b'{"a":[' + b"1," * MAX_VALUES + b"1]}")


def test_a_message_at_and_over_the_bound() -> None:
    frame = b'{"a":""}'
    for extra, fits in ((0, True), (1, False)):
        reader = MessageReader()
        with closing(reader):
            text = b"x" * (MAX_MESSAGE_BYTES - len(frame) + extra)
            data = frame.replace(b'""', b'"' + text + b'"') + b"\0"
            if fits:
                reader.feed(data, [])
                message = reader.next()
                assert message is not None
                assert message.fields == {"a": text.decode()}
            else:
                with pytest.raises(ProtocolError, match="longer"):
                    reader.feed(data[:-1], [])


def test_descriptors_at_and_over_the_bound() -> None:
    def some(count: int) -> list[int]:
        return [os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) for _ in range(count)]

    reader = MessageReader()
    with closing(reader):
        reader.feed(b"{}\0", some(MAX_DESCRIPTORS))
        message = reader.next()
        assert message is not None
        assert len(message.descriptors) == MAX_DESCRIPTORS
        message.descriptors.close()
        reader.feed(b"{", some(MAX_DESCRIPTORS))
        with pytest.raises(ProtocolError, match="more than 16 descriptors"):
            reader.feed(b" ", some(1))


def test_a_descriptor_is_taken_once() -> None:
    descriptors = Descriptors([os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)])
    os.close(descriptors.take(0))
    for index in (0, 1, -1):
        with pytest.raises(ProtocolError):
            descriptors.take(index)


def test_what_is_not_taken_is_closed_with_its_owner() -> None:
    fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    owner = Descriptors([fd])
    del owner
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
