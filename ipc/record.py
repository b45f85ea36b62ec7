"""The record: 128 little-endian bytes, one for each inference in each direction.

`docs/protocol.md` documents every byte; a test holds the two together. Fields are grouped so
that the daemon forwards a record by patching a few of them in place.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final

from switchgear.ipc.errors import BadRecord

RECORD_BYTES: Final = 128
RECORD_VERSION: Final = 1
NO_SLOT: Final = 0xFFFF
NO_READING: Final = 0xFFFFFFFF

# Offset 0.
#   B type, B version, H flags, I epoch, Q request id            -> 16
#   H input slot, H output slot, B priority, B capture clock, H reserved -> 24
#   Q timeout_us, Q capture_ns, 16s trace id                     -> 56
#   H status domain, B backend, B precision, i status code       -> 64
#   H reason, H retries, I tried (bit per backend number)         -> 72
#   I temperature age in ms, I retry_after_ms                    -> 80
#   Q queue_ns, Q run_ns, Q total_ns                             -> 104
#   I binding, 4x reserved, Q deadline_ns                        -> 120 (worker hop only)
#   8x reserved                                                  -> 128
RECORD: Final = struct.Struct("<BBHIQ HHBBH QQ16s HBBi HHI II QQQ I4xQ 8x")
# The parts of a request that the daemon reads, and those that a reply reports.
REQUEST: Final = struct.Struct("<BBHIQHHBBHQ")
ROUTE: Final = struct.Struct("<I4xQ")
STATUS: Final = struct.Struct("<HBBi")
# What a worker reads: flags, request id, input slot, output slot, binding, deadline.
RUN_REQUEST: Final = struct.Struct("<2xH4xQHH84xI4xQ")
REPLY_STATUS: Final = struct.Struct("<HBBiHHIIIQQQ")
SLOTS: Final = struct.Struct("<HH")
ID: Final = struct.Struct("<Q")
ID_OFFSET: Final = 8
SLOTS_OFFSET: Final = 16
STATUS_OFFSET: Final = 56
RUN_NS: Final = struct.Struct("<Q")
RUN_OFFSET: Final = 88
ROUTE_OFFSET: Final = 104
RESERVED: Final = (slice(22, 24), slice(108, 112), slice(120, 128))


class Kind(IntEnum):
    """A record's type. ARENA_ADD is reserved: sending one is answered with BadRequest."""

    INFER = 1
    REPLY = 2
    CANCEL = 3
    EVENT = 4
    ARENA_ADD = 5
    GOAWAY = 6


class Flag(IntFlag):
    """Bits of a record's flags.

    RESET: run this frame of a stateful session from a fresh state.
    LATE: (reply) the run ended after its deadline.
    """

    NONE = 0
    RESET = 1
    LATE = 2


class Priority(IntEnum):
    """Priority classes, the most urgent first; DEFAULT takes the session's."""

    DEFAULT = 0
    HIGH = 1
    NORMAL = 2
    BATCH = 3


class Clock(IntEnum):
    """The clock of a capture time."""

    NONE = 0
    MONOTONIC = 1
    BOOTTIME = 2
    REALTIME = 3


class Backend(IntEnum):
    """Numbers of the backends in a record; third-party ones share OTHER."""

    NONE = 0
    CPU = 1
    VULKAN = 2
    OPENCL = 3
    NPU = 4
    OTHER = 5


class Precision(IntEnum):
    """The arithmetic that a result was computed in."""

    NONE = 0
    FP32 = 1
    FP16 = 2
    INT8 = 3
    INT4 = 4


class Reason(IntEnum):
    """Why the backend of a reply was chosen."""

    NONE = 0
    ONLY_READY = 1  # no other backend is ready for the model
    REQUESTED = 2  # the session allows one backend only
    PINNED = 3  # the state lives there
    RETRIED = 4  # the worker that had it died
    FASTEST = 5
    POLICY = 6
    TRIPPED = 7
    DEGRADED = 8
    PROBE = 9
    HEDGED = 10  # a second copy of the request answered first


@dataclass(slots=True)
class Record:
    """A record's fields. Times: `_us` microseconds, `_ns` nanoseconds, `_ms` milliseconds."""

    kind: int
    request_id: int = 0
    flags: int = 0
    epoch: int = 0
    input_slot: int = NO_SLOT
    output_slot: int = NO_SLOT
    priority: int = 0
    capture_clock: int = 0
    timeout_us: int = 0
    capture_ns: int = 0
    trace_id: bytes = bytes(16)
    status_domain: int = 0
    backend: int = 0
    precision: int = 0
    status_code: int = 0
    reason: int = 0
    retries: int = 0
    tried: int = 0
    temperature_age_ms: int = 0
    retry_after_ms: int = 0
    queue_ns: int = 0
    run_ns: int = 0
    total_ns: int = 0
    binding: int = 0
    deadline_ns: int = 0

    def pack(self) -> bytes:
        return RECORD.pack(
            self.kind,
            RECORD_VERSION,
            self.flags,
            self.epoch,
            self.request_id,
            self.input_slot,
            self.output_slot,
            self.priority,
            self.capture_clock,
            0,
            self.timeout_us,
            self.capture_ns,
            self.trace_id,
            self.status_domain,
            self.backend,
            self.precision,
            self.status_code,
            self.reason,
            self.retries,
            self.tried,
            self.temperature_age_ms,
            self.retry_after_ms,
            self.queue_ns,
            self.run_ns,
            self.total_ns,
            self.binding,
            self.deadline_ns,
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Record:
        """The fields of `data`.

        :raises BadRecord: wrong length, version or type, or a reserved byte that is not zero.
        """
        check(data)
        fields = RECORD.unpack(data)
        return cls(
            kind=fields[0],
            flags=fields[2],
            epoch=fields[3],
            request_id=fields[4],
            input_slot=fields[5],
            output_slot=fields[6],
            priority=fields[7],
            capture_clock=fields[8],
            timeout_us=fields[10],
            capture_ns=fields[11],
            trace_id=fields[12],
            status_domain=fields[13],
            backend=fields[14],
            precision=fields[15],
            status_code=fields[16],
            reason=fields[17],
            retries=fields[18],
            tried=fields[19],
            temperature_age_ms=fields[20],
            retry_after_ms=fields[21],
            queue_ns=fields[22],
            run_ns=fields[23],
            total_ns=fields[24],
            binding=fields[25],
            deadline_ns=fields[26],
        )


# Plain numbers: comparing enumerations costs more than the rest of the check.
_FROM_CLIENT: Final = frozenset(map(int, (Kind.INFER, Kind.CANCEL, Kind.ARENA_ADD)))
ZERO_AFTER_REQUEST: Final = bytes(RECORD_BYTES - STATUS_OFFSET)


def check(data: bytes | bytearray | memoryview) -> None:
    """Refuses what is no record of this version.

    :raises BadRecord: wrong length, version or type, or a reserved byte that is not zero.
    """
    if len(data) != RECORD_BYTES:
        raise BadRecord(f"a record has {RECORD_BYTES} bytes, this one {len(data)}")

    if data[1] != RECORD_VERSION:
        raise BadRecord(f"record version {data[1]}, this side speaks {RECORD_VERSION}")

    if not Kind.INFER <= data[0] <= Kind.GOAWAY:
        raise BadRecord(f"unknown record type {data[0]}")

    for part in RESERVED:
        if any(data[part]):
            raise BadRecord(f"reserved bytes {part.start} to {part.stop - 1} are not zero")


def check_request(data: bytes | bytearray) -> None:
    """Like `check`, for what a client may send: everything after the trace id is zero.

    :raises BadRecord: see `check`; or a reply's field is set in a request.
    """
    if (
        len(data) == RECORD_BYTES
        and data[0] in _FROM_CLIENT
        and data[1] == RECORD_VERSION
        and data.endswith(ZERO_AFTER_REQUEST)
        and not data[22]
        and not data[23]
    ):
        return

    check(data)
    if data[0] not in _FROM_CLIENT:
        raise BadRecord(f"a client does not send records of type {data[0]}")

    raise BadRecord("a request sets a field that only a reply has")
