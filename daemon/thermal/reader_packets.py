"""What the sensor reader and the daemon say to each other over their socket pair.

Each packet begins with its kind. To the daemon: `Z`, the sensors as JSON, whenever they change;
`R`, readings in fixed records of 16 bytes, at least once a second. To the reader: JSON alone.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final, NamedTuple

from switchgear.fingerprints.zones_model import ROLES, TripPoint, Zone

MAX_PACKET_BYTES: Final = 256 * 1024
# As many as fit a packet; a phone has about a hundred.
MAX_ZONES: Final = 1024

_ZONES: Final = ord("Z")
_READINGS: Final = ord("R")
_HEADER: Final = struct.Struct("<BBHIQQ")
_RECORD: Final = struct.Struct("<HBBiQ")
_VERSION: Final = 1

OK: Final = 0
FAILED: Final = 1
IMPLAUSIBLE: Final = 2
HANGS: Final = 3


class Sample(NamedTuple):
    """One try to read the sensor with this number in the list of its generation.

    `errno` is that of a failed read; `taken_ns` is of CLOCK_MONOTONIC.
    """

    number: int
    status: int
    errno: int
    temperature_mc: int
    taken_ns: int


class Samples(NamedTuple):
    """One packet of samples, with both clocks at its sending: they part while it sleeps."""

    generation: int
    monotonic_ns: int
    boottime_ns: int
    samples: tuple[Sample, ...]


class Found(NamedTuple):
    """The sensors of a generation."""

    generation: int
    zones: tuple[Zone, ...]
    problems: tuple[str, ...]


def pack_samples(
    generation: int, monotonic_ns: int, boottime_ns: int, samples: Sequence[Sample]
) -> bytes:
    head = _HEADER.pack(
        _READINGS, _VERSION, len(samples), generation, monotonic_ns, boottime_ns
    )
    return head + b"".join(_RECORD.pack(*sample) for sample in samples)


def pack_zones(generation: int, zones: Iterable[Zone], problems: Iterable[str]) -> bytes:
    """The sensors; trips and cooling are left out where the whole would be too long."""
    known = list(zones)[:MAX_ZONES]
    told = {"zones": [asdict(zone) for zone in known], "problems": list(problems)[:16]}
    head = _HEADER.pack(_ZONES, _VERSION, 0, generation, 0, 0)
    packet = head + json.dumps(told).encode()
    if len(packet) > MAX_PACKET_BYTES:
        short = [
            asdict(Zone(zone.zone_id, zone.type, zone.role, zone.chip_wide, source=zone.source))
            for zone in known
        ]
        packet = head + json.dumps({"zones": short, "problems": []}).encode()

    return packet


def unpack(packet: bytes) -> Samples | Found:
    """A packet of the reader.

    :raises ValueError: it is none.
    """
    if len(packet) < _HEADER.size:
        raise ValueError(f"a packet of {len(packet)} bytes")

    kind, version, count, generation, monotonic_ns, boottime_ns = _HEADER.unpack_from(packet)
    if version != _VERSION:
        raise ValueError(f"version {version}")

    body = packet[_HEADER.size :]
    if kind == _READINGS:
        if len(body) != count * _RECORD.size:
            raise ValueError(f"{count} samples in {len(body)} bytes")

        samples = tuple(Sample(*fields) for fields in _RECORD.iter_unpack(body))
        return Samples(generation, monotonic_ns, boottime_ns, samples)

    if kind == _ZONES:
        return _found(generation, body)

    raise ValueError(f"kind {kind}")


def _found(generation: int, body: bytes) -> Found:
    try:
        told = json.loads(body)
        zones = tuple(_zone(entry) for entry in told["zones"])
        return Found(generation, zones, tuple(str(text) for text in told["problems"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"zones: {error!r}") from error


def _zone(entry: dict[str, Any]) -> Zone:
    if entry["role"] not in ROLES:
        raise ValueError(f"role {entry['role']!r}")

    trips = tuple(TripPoint(**trip) for trip in entry["trips"])
    return Zone(**{**entry, "trips": trips, "cooling": tuple(entry["cooling"])})


def pack_orders(limits_mc: dict[str, int], *, find: bool = False) -> bytes:
    """To the reader: the lowest limit of each sensor that counts, and whether to look anew."""
    return json.dumps({"limits_mc": limits_mc, "find": find}).encode()


def unpack_orders(packet: bytes) -> tuple[dict[str, int], bool]:
    """
    :raises ValueError: it is no order.
    """
    try:
        told = json.loads(packet)
        limits = {str(name): int(limit) for name, limit in told["limits_mc"].items()}
        return limits, bool(told["find"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"orders: {error!r}") from error
