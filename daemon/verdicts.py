"""The verdicts on models, kept over restarts in one file.

Each change is written by a thread, the newest state last: the loop waits for no disk, and the
process ends only after the last write. A file that cannot be read costs new trials, no more.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from switchgear.backends.atomic_file import (
    TEMPORARY_SUFFIX,
    read_bounded,
    write_atomically,
)
from switchgear.ipc.dtypes import DTYPES
from switchgear.ipc.worker import spec_from_json

KEPT_VERDICTS: Final = 1024
# Most have 1 to 4 KiB; one may have over 100, of a model made for it.
KEPT_BYTES: Final = 8 << 20
MAX_FILE_BYTES: Final = 64 << 20
_SCHEMA: Final = 1
_NUMBERS: Final = ("parse_us", "first_run_us", "run_us", "instance_bytes")

log = logging.getLogger(__name__)

Verdict = dict[str, Any]


class Verdicts:
    """At most `KEPT_VERDICTS` of them, in `KEPT_BYTES` of JSON; the one not asked for longest
    goes first.

    `check` holds what is read against what is taken out of a verdict; it raises ValueError,
    KeyError, TypeError or AttributeError. A verdict is not changed once it is kept.
    """

    def __init__(self, path: Path, check: Callable[[Verdict], None]) -> None:
        self._path = path
        self._check = check
        self._verdicts: OrderedDict[str, Verdict] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._bytes = 0
        # Answers of `get` since the start.
        self.hits = 0
        self.misses = 0
        self._lock = threading.Lock()
        self._next: OrderedDict[str, Verdict] | None = None
        self._writer: threading.Thread | None = None
        self._remove_leftovers()
        self._read()

    def get(self, key: str) -> Verdict | None:
        verdict = self._verdicts.get(key)
        if verdict is None:
            self.misses += 1
        else:
            self.hits += 1
            self._verdicts.move_to_end(key)

        return verdict

    @property
    def size_bytes(self) -> int:
        """Of all that are kept, as JSON."""
        return self._bytes

    def keep(self, key: str, verdict: Verdict) -> None:
        """Keeps a verdict and has it written; does not block."""
        self._add(key, verdict)
        with self._lock:
            self._next = self._verdicts.copy()
            if self._writer is None:
                # No daemon thread: the end of the process waits for the last write.
                self._writer = threading.Thread(target=self._write_all, name="verdicts")
                self._writer.start()

    def _add(self, key: str, verdict: Verdict) -> None:
        size = len(key) + len(json.dumps(verdict))
        self._bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self._verdicts[key] = verdict
        self._verdicts.move_to_end(key)
        while len(self._verdicts) > KEPT_VERDICTS or self._bytes > KEPT_BYTES:
            oldest, _ = self._verdicts.popitem(last=False)
            self._bytes -= self._sizes.pop(oldest)

    def flush(self) -> None:
        """Waits until all that was kept is in the file; blocks."""
        with self._lock:
            writer = self._writer

        if writer is not None:
            writer.join()

    def _write_all(self) -> None:
        while True:
            with self._lock:
                verdicts, self._next = self._next, None
                if verdicts is None:
                    self._writer = None
                    return

            try:
                self._write(verdicts)
            except OSError as error:
                log.warning("cannot keep verdicts in %s: %s", self._path, error)

    def _write(self, verdicts: OrderedDict[str, Verdict]) -> None:
        """Replaces the file: a reader, or the next start, sees the old one or the new one."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # One by one: encoding all at once would hold up the loop's thread.
        entries = (f"{json.dumps(key)}: {json.dumps(v)}" for key, v in verdicts.items())
        text = f'{{"schema": {_SCHEMA}, "verdicts": {{{", ".join(entries)}}}}}'
        write_atomically(self._path, text.encode())

    def _remove_leftovers(self) -> None:
        """Of a process that was killed in the middle of a write."""
        with contextlib.suppress(OSError):
            pattern = f".{self._path.name}.*{TEMPORARY_SUFFIX}"
            for leftover in self._path.parent.glob(pattern):
                leftover.unlink(missing_ok=True)

    def _read(self) -> None:
        try:
            data = json.loads(read_bounded(self._path, MAX_FILE_BYTES))
            if data["schema"] != _SCHEMA:
                raise ValueError(f"schema {data['schema']}")

            for key, verdict in data["verdicts"].items():
                self._check(verdict)
                self._add(key, verdict)
        except FileNotFoundError:
            pass
        except (
            *(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError),
        ) as error:
            # They can be found again: start anew.
            self._verdicts.clear()
            self._sizes.clear()
            self._bytes = 0
            log.warning("verdicts in %s are not readable: %r", self._path, error)


def check_verdict(verdict: Verdict) -> None:
    """Holds what was read against what the daemon takes out of a verdict.

    :raises ValueError, KeyError, TypeError, AttributeError: it is none.
    """
    if not isinstance(verdict["ok"], bool):
        raise TypeError(f"ok is {verdict['ok']!r}")

    if not verdict["ok"]:
        int(verdict["code"])
        str(verdict["domain"])
        return

    for tensor in (*verdict["inputs"], *verdict["outputs"]):
        spec = spec_from_json(tensor)
        if spec.dtype not in DTYPES or spec.capacity_bytes < 0:
            raise ValueError(f"tensor {spec.name!r}")

    if any(int(verdict[name]) < 0 for name in _NUMBERS):
        raise ValueError("a negative number")

    if not isinstance(verdict["state"], bool) or not isinstance(verdict["names"], str):
        raise TypeError("state or names")

    for count in verdict["operators"].values():
        int(count)
