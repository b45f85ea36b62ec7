"""One request: how it is sent, and how it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from switchgear.ipc.errors import BadRequest, SwitchgearError
from switchgear.ipc.record import Clock, Priority

if TYPE_CHECKING:
    from switchgear.client.core import SessionCore
    from switchgear.client.result import Result

_TRACE_BYTES: Final = 16
_LONGEST_TIMEOUT_US: Final = 2**63 - 1

PRIORITIES: Final[Mapping[str | None, int]] = {
    None: Priority.DEFAULT,
    "high": Priority.HIGH,
    "normal": Priority.NORMAL,
    "batch": Priority.BATCH,
}
CLOCKS: Final[Mapping[str, int]] = {clock.name.lower(): int(clock) for clock in Clock}


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How one request is sent: the fields of its record."""

    reset: bool = False
    timeout_us: int = 0
    priority: int = 0
    trace_id: bytes = b""
    capture_ns: int = 0
    clock: int = 0


PLAIN: Final = RequestOptions()


def request_options(
    reset: bool,
    deadline_ms: float | None,
    priority: str | None,
    trace_id: bytes,
    capture_ns: int,
    capture_clock: str,
) -> RequestOptions:
    """Checks what the caller said of one request.

    :raises BadRequest: a value is out of its range.
    """
    timeout_us = 0
    if deadline_ms is not None:
        if not (deadline_ms > 0 and math.isfinite(deadline_ms)):
            raise BadRequest(f"deadline_ms is {deadline_ms}; it has to be above 0")

        timeout_us = min(max(1, int(deadline_ms * 1000)), _LONGEST_TIMEOUT_US)

    if priority not in PRIORITIES:
        raise BadRequest(f"priority {priority!r} is none of high, normal, batch")

    if len(trace_id) > _TRACE_BYTES:
        raise BadRequest(
            f"a trace id has at most {_TRACE_BYTES} bytes, this one {len(trace_id)}"
        )

    if capture_clock not in CLOCKS:
        raise BadRequest(f"capture_clock {capture_clock!r} is none of {', '.join(CLOCKS)}")

    if not 0 <= capture_ns < 2**64:
        raise BadRequest(f"capture_ns is {capture_ns}; it has to fit 64 bits")

    clock = CLOCKS[capture_clock] if capture_ns else 0
    return RequestOptions(reset, timeout_us, PRIORITIES[priority], trace_id, capture_ns, clock)


class Pending:
    """A request from the moment it is sent: base of the two clients' `Request`.

    It ends once: `fields` (a success) or `error` is set. It holds its slot until its result is
    taken, or nobody has the request any more.
    """

    __slots__ = ("_core", "_result", "cancel_sent", "error", "fields", "id", "reset", "slot")

    def __init__(self) -> None:
        self.id = 0
        self.slot = 0
        self.reset = False
        self.cancel_sent = False
        self.error: SwitchgearError | None = None
        self.fields: tuple[int, ...] | None = None
        self._core: SessionCore | None = None
        self._result: Result | None = None

    @property
    def ended(self) -> bool:
        """Whether the reply is there (or never comes), as far as received."""
        return self.fields is not None or self.error is not None

    def _wake(self) -> None:
        """Called once, when the request has ended."""

    def __del__(self) -> None:
        if self._core is not None:
            self._core.release(self)
