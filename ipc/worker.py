"""The messages between the daemon and a worker, on one SOCK_SEQPACKET socket.

A packet is either a 128-byte record (`switchgear.ipc.record`) or one JSON object; the first
byte tells them apart (a record's is its type, below 32; an object's is `{`). Packets are
handled in the order in which they were sent. `docs/worker-protocol.md` says the same for a
native worker.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Sequence
from typing import Any, Final

from switchgear.ipc.arena import Layout
from switchgear.ipc.errors import ProtocolError
from switchgear.ipc.slot import TensorPlace, TensorSpec

WORKER_PROTOCOL: Final = 1
MAX_PACKET_BYTES: Final = 160 * 1024
MAX_PACKET_DESCRIPTORS: Final = 4
MAX_SLOTS: Final = 16
# Long enough for a driver's sentence; a hostile model chooses part of it.
MAX_TEXT_CHARACTERS: Final = 2000

Packet = dict[str, Any]


def pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair for one worker; room for the largest packet in each direction."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET_BYTES)

    return ours, theirs


def send(sock: socket.socket, packet: Packet, fds: Sequence[int] = ()) -> None:
    """Sends one object; the descriptors stay the caller's.

    :raises OSError: the other end is gone, or (non-blocking) has no room.
    """
    data = json.dumps(packet, separators=(",", ":")).encode()
    if len(data) > MAX_PACKET_BYTES:
        raise ProtocolError(f"a packet of {len(data)} bytes")

    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


def decode(data: bytes | memoryview) -> Packet:
    """The object in a packet.

    :raises ProtocolError: it is none.
    """
    try:
        packet = json.loads(bytes(data))
    except ValueError as error:
        raise ProtocolError(f"a packet is not JSON: {error}") from None

    if not isinstance(packet, dict):
        raise ProtocolError("a packet is not a JSON object")

    return packet


def descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors of a recvmsg; the caller owns them."""
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])

    return list(fds)


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def spec_to_json(spec: TensorSpec) -> Packet:
    return {
        "name": spec.name,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "signature": list(spec.signature),
        "capacity_bytes": spec.capacity_bytes,
        "dynamic": spec.dynamic,
    }


def spec_from_json(data: Packet) -> TensorSpec:
    return TensorSpec(
        name=str(data["name"]),
        dtype=str(data["dtype"]),
        shape=tuple(int(d) for d in data["shape"]),
        signature=tuple(int(d) for d in data["signature"]),
        capacity_bytes=int(data["capacity_bytes"]),
        dynamic=bool(data["dynamic"]),
    )


def _places(places: Sequence[TensorPlace]) -> list[list[int]]:
    return [[place.chunk, place.offset, place.length] for place in places]


def _places_from(data: list[list[int]]) -> tuple[TensorPlace, ...]:
    return tuple(TensorPlace(int(c), int(o), int(n)) for c, o, n in data)


def layout_to_json(layout: Layout) -> Packet:
    """A layout as `OpenSession` and the bind packet carry it: [chunk, offset, length]."""
    return {
        "size_bytes": layout.size_bytes,
        "inputs": [_places(slot) for slot in layout.inputs],
        "outputs": [_places(slot) for slot in layout.outputs],
        "headers": _places(layout.headers),
    }


def layout_from_json(data: Packet) -> Layout:
    """The layout; every place is checked to lie inside of it.

    :raises ProtocolError: a place does not.
    """
    layout = Layout(
        int(data["size_bytes"]),
        tuple(_places_from(slot) for slot in data["inputs"]),
        tuple(_places_from(slot) for slot in data["outputs"]),
        _places_from(data["headers"]),
    )
    for place in (
        *(p for slot in (*layout.inputs, *layout.outputs) for p in slot),
        *layout.headers,
    ):
        if place.chunk != 0 or min(place.offset, place.length) < 0:
            raise ProtocolError("a place of the layout is out of bounds")

        if place.offset + place.length > layout.size_bytes:
            raise ProtocolError("a place of the layout is out of bounds")

    return layout
