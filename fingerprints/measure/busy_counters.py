"""The busy counters of NPUs in sysfs: where they are, what they hold, how busy that makes it.

Hexagon, MediaTek's APU, amdxdna and EdgeTPU have no known counter: their utilisation comes from
our own timestamps.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class CounterKind:
    """One kind of counter.

    `path` is a glob under sysfs. `parse` gives percent busy, or with `per_s` set a cumulative
    count of which `per_s` make one second of work; None for text that is something else.
    `driver` is the kernel driver that the device must have, empty where the path is unique.
    `window_s` is the least time between two readings that mean something.
    """

    name: str
    path: str
    parse: Callable[[str], float | None]
    window_s: float
    per_s: float = 0.0
    driver: str = ""


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\s*\d+\s*", text) else None


def _rknpu(text: str) -> float | None:
    """`NPU load:  Core0:  0%, Core1: 12%, Core2:  0%,`, or `NPU load:  0%` with one core."""
    cores = re.findall(r"Core\d+:\s*([\d.]+)%", text) or re.findall(r"load:\s*([\d.]+)%", text)
    return sum(map(float, cores)) / len(cores) if cores else None


def _devfreq(text: str) -> float | None:
    """`88@300000000Hz`; vendors' files have been seen above 100."""
    found = re.match(r"\s*(\d+)@\d+Hz", text)
    return float(found[1]) if found else None


# Formats as seen in public sources; the last of Intel's is for kernels before 6.11, and counts
# the time that the device is powered.
KINDS: Final = (
    CounterKind("rknpu load", "kernel/debug/rknpu/load", _rknpu, 1.0),
    CounterKind("devfreq load", "class/devfreq/*.npu/load", _devfreq, 0.1),
    CounterKind(
        "npu_busy_time_us",
        "class/accel/accel*/device/npu_busy_time_us",
        _number,
        1.0,
        per_s=1e6,
        driver="intel_vpu",
    ),
    CounterKind(
        "runtime_active_time",
        "class/accel/accel*/device/power/runtime_active_time",
        _number,
        1.0,
        per_s=1e3,
        driver="intel_vpu",
    ),
)


@dataclass(slots=True)
class BusyCounter:
    """A counter of this machine, read by one reader only (some windows restart at a read)."""

    kind: CounterKind
    path: Path
    _last: tuple[float, float] | None = None

    def busy_pct(self) -> float | None:
        """Percent busy, 0 to 100: now, or since the last call for a cumulative counter.

        None at the first call of a cumulative counter, after its reset, and for a reading that
        fails or cannot be understood. Never blocks for long: a small sysfs file.
        """
        now = time.monotonic()
        try:
            value = self.kind.parse(self.path.read_text())
        except (OSError, UnicodeDecodeError):
            value = None

        if value is None:
            self._last = None
            return None

        if not self.kind.per_s:
            return min(value, 100.0)

        last, self._last = self._last, (now, value)
        if last is None or value < last[1] or now <= last[0]:
            return None

        return min(100.0 * (value - last[1]) / self.kind.per_s / (now - last[0]), 100.0)


def find(sysfs: Path) -> BusyCounter | None:
    """The first counter of `KINDS` that is there and can be read."""
    for kind in KINDS:
        for path in sorted(sysfs.glob(kind.path)):
            if kind.driver and _driver(path) != kind.driver:
                continue

            try:
                readable = kind.parse(path.read_text()) is not None
            except (OSError, UnicodeDecodeError):
                continue

            if readable:
                return BusyCounter(kind, path)

    return None


def _driver(path: Path) -> str:
    """The kernel driver of the device that a file belongs to: numbers are not stable."""
    device = path.parent.parent if path.parent.name == "power" else path.parent
    try:
        for line in (device / "uevent").read_text().splitlines():
            if line.startswith("DRIVER="):
                return line[len("DRIVER=") :]
    except OSError:
        pass

    return ""
