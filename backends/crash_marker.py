"""Marks of first uses in progress, so that a driver that kills the process is not asked again.

A first use is of one (driver, model, precision). The mark is written and synchronised to disk
before it and cleared after it; one that is found later says that the process, or the machine,
ended in between. After `LIMIT` such ends the use is not tried until the driver or the engine
changes, which is another key, or the mark expires. Standard library only. Every call blocks on
the disk for some milliseconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from switchgear.backends.atomic_file import read_bounded, write_atomically

LIMIT: Final = 2
# A week: long enough for an update to come, short enough for a bad batch of luck to pass.
EXPIRY_S: Final = 7 * 86400.0
_VERSION: Final = 1
_MAX_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Mark:
    """`ends` is how often a first use of `key` did not come back; `since_s` is the clock's time
    (seconds since 1970) of the last one. `pid` is the process in it, 0 when none is."""

    key: Mapping[str, str]
    ends: int
    since_s: float
    pid: int = 0


class CrashMarkers:
    """The marks in one folder; any number of processes may use it at once.

    `key` has strings only and names all that the outcome depends on: backend, engine version,
    the driver's identity, the model's hash, the precision. `clock` gives seconds since 1970.
    """

    def __init__(
        self,
        folder: Path,
        expiry_s: float = EXPIRY_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._expiry_s = expiry_s
        self._clock = clock

    def reason(self, key: Mapping[str, str]) -> str:
        """Why a first use of `key` must not be tried; empty where it may."""
        mark = self._read(self._path(key))
        if mark is None or mark.ends < LIMIT:
            return ""

        return (
            f"its first use ended the process {mark.ends} times; it is not tried again for "
            f"{self._left_h(mark):.0f} hours, or until the driver or the engine changes"
        )

    def begin(self, key: Mapping[str, str]) -> None:
        """Marks a first use as in progress, by this process.

        It counts as an end that was not survived until `clear`.

        :raises OSError: the mark is not safely on disk; then the use should not begin.
        """
        path = self._path(key)
        known = self._read(path)
        ends = 0 if known is None else known.ends
        self._write(path, Mark(key, ends + 1, self._clock(), os.getpid()))

    def clear(self, key: Mapping[str, str]) -> None:
        """The use came back, with whatever result: all is forgotten. Never raises."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def forgive(self, pid: int) -> None:
        """Takes back the mark of a process that was killed on purpose. Never raises."""
        for path, mark in self._marks():
            if mark.pid != pid:
                continue

            with contextlib.suppress(OSError):
                if mark.ends > 1:
                    self._write(path, Mark(mark.key, mark.ends - 1, mark.since_s))
                else:
                    path.unlink()

    def marks(self) -> list[Mark]:
        """All that have not expired, for people; expired and damaged ones are deleted."""
        return [mark for _, mark in self._marks()]

    def _marks(self) -> list[tuple[Path, Mark]]:
        found = []
        with contextlib.suppress(OSError):
            for path in sorted(self._folder.glob("*.json")):
                mark = self._read(path)
                if mark is not None:
                    found.append((path, mark))

        return found

    def _path(self, key: Mapping[str, str]) -> Path:
        digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
        return self._folder / f"{digest[:32]}.json"

    def _left_h(self, mark: Mark) -> float:
        return max(0.0, mark.since_s + self._expiry_s - self._clock()) / 3600

    def _read(self, path: Path) -> Mark | None:
        try:
            data = json.loads(read_bounded(path, _MAX_BYTES))
            if data["version"] != _VERSION:
                raise ValueError("of another version")

            key = {str(name): str(value) for name, value in data["key"].items()}
            mark = Mark(key, int(data["ends"]), float(data["since_s"]), int(data["pid"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # A mark that cannot be read marks nothing: the worst is one more try.
            with contextlib.suppress(OSError):
                path.unlink()

            return None

        # Either way: a clock that was set back by more than the expiry was wrong before.
        if abs(self._clock() - mark.since_s) > self._expiry_s:
            with contextlib.suppress(OSError):
                path.unlink()

            return None

        return mark

    def _write(self, path: Path, mark: Mark) -> None:
        data = {
            "version": _VERSION,
            "key": dict(mark.key),
            "ends": mark.ends,
            "since_s": mark.since_s,
            "pid": mark.pid,
        }
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, json.dumps(data).encode())
