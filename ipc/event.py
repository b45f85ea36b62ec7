"""The EVENT record: how one place where a session's frames may run stands now.

It goes from the daemon to a client that asked for events. It is a record like the others (128
bytes, the header and the places of `record.RECORD`); `docs/protocol.md` has every byte. It says
what is, not what changed: a later one of the same backend and precision replaces an earlier.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from switchgear.ipc.errors import BadRecord
from switchgear.ipc.record import (
    NO_READING,
    NO_SLOT,
    RECORD_BYTES,
    RECORD_VERSION,
    Clock,
    Kind,
)

# Offset 0.
#   B type, B version, 2x flags, I epoch, Q number                     -> 16
#   H input slot, H output slot, x priority, B clock, 2x               -> 24
#   8x timeout, Q time in ns, 16x trace id                             -> 56
#   2x status domain, B backend, B precision, 4x status code           -> 64
#   H event, 2x retries, B state, B state of the device, H share       -> 72
#   I temperature age in ms, I retry_after_ms, i headroom, 44x         -> 128
EVENT: Final = struct.Struct("<BB2xIQ HHxB2x 8xQ16x 2xBB4x H2xBBH IIi44x")
NO_HEADROOM: Final = -(2**31)
WHOLE_SHARE: Final = 1000

_EVENT: Final = int(Kind.EVENT)
_MONOTONIC: Final = int(Clock.MONOTONIC)
_LONGEST_MS: Final = 2**32 - 1
_LARGEST_MC: Final = 2**31 - 1


class State(IntEnum):
    """The state of a place, or of a device, in the words people know."""

    NONE = 0
    NORMAL = 1
    SHEDDING = 2
    TRIPPED = 3
    DEGRADED = 4
    RECOVERING = 5


class EventKind(IntEnum):
    """What an event tells: the state that a place is in from now on, or that only its device's
    headroom has crossed a step."""

    NONE = 0
    NORMAL = 1
    SHEDDING = 2
    TRIPPED = 3
    DEGRADED = 4
    RECOVERING = 5
    HEADROOM = 6


@dataclass(frozen=True, slots=True)
class EventRecord:
    """The fields of an EVENT.

    `number` counts the changes that the session's places went through: a gap is changes that a
    later one replaced. `at_ns` is CLOCK_MONOTONIC. `share` is the part of the frames that the
    place may be given, in thousandths. `headroom_mc` is the way from the device's temperature
    to its trip in m°C, below zero above it; None without a reading. `retry_after_ms` is the
    least time until the place may be tried again; 0 is not said.
    """

    kind: int
    backend: int
    precision: int
    state: int
    device_state: int
    share: int = WHOLE_SHARE
    headroom_mc: int | None = None
    temperature_age_ms: int = NO_READING
    retry_after_ms: int = 0
    number: int = 0
    epoch: int = 0
    at_ns: int = 0

    def pack(self) -> bytes:
        """The record; times and temperatures beyond their fields become the largest there."""
        headroom_mc = NO_HEADROOM
        if self.headroom_mc is not None:
            headroom_mc = max(-_LARGEST_MC, min(self.headroom_mc, _LARGEST_MC))

        return EVENT.pack(
            _EVENT,
            RECORD_VERSION,
            self.epoch,
            self.number,
            NO_SLOT,
            NO_SLOT,
            _MONOTONIC,
            self.at_ns,
            self.backend,
            self.precision,
            self.kind,
            self.state,
            self.device_state,
            self.share,
            min(self.temperature_age_ms, _LONGEST_MS),
            min(self.retry_after_ms, _LONGEST_MS),
            headroom_mc,
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> EventRecord:
        """The fields of `data`; bytes that this version has no use for are not looked at.

        :raises BadRecord: wrong length, version or type.
        """
        if len(data) != RECORD_BYTES or data[0] != _EVENT or data[1] != RECORD_VERSION:
            raise BadRecord(f"not an event of version {RECORD_VERSION}")

        fields = EVENT.unpack(data)
        return cls(
            kind=fields[10],
            backend=fields[8],
            precision=fields[9],
            state=fields[11],
            device_state=fields[12],
            share=fields[13],
            headroom_mc=None if fields[16] == NO_HEADROOM else fields[16],
            temperature_age_ms=fields[14],
            retry_after_ms=fields[15],
            number=fields[3],
            epoch=fields[2],
            at_ns=fields[7],
        )
