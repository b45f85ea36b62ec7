"""How a test process speaks to the runner: one JSON object a line, on a pipe.

| key | meaning |
|---|---|
| `begin` | a subject (see `Subject`); from here on a death of the process is this device's |
| `expect_s` | the next step may take this many seconds without a further line |
| `progress` | `{"done": 0..1, "text": what runs now}` |
| `report` | a whole `Report` |
| `end` | true; the test is complete, the process only has to exit |
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from switchgear.fingerprints.measurement import Report, Subject


class Channel:
    """The writing end of the pipe. Each call writes one line at once and may block on it.

    The descriptor stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def begin(self, subject: Subject) -> None:
        self._send({"begin": subject.to_json()})

    def expect(self, seconds: float) -> None:
        self._send({"expect_s": seconds})

    def progress(self, done: float, text: str) -> None:
        """`done` is the share of this device's part of the test, 0 to 1."""
        self._send({"progress": {"done": round(done, 3), "text": text}})

    def report(self, report: Report) -> None:
        self._send({"report": report.to_json()})

    def end(self) -> None:
        self._send({"end": True})

    def _send(self, message: dict[str, Any]) -> None:
        line = memoryview(json.dumps(message, allow_nan=False).encode() + b"\n")
        while line:
            line = line[os.write(self._fd, line) :]
