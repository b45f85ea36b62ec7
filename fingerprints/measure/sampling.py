"""Taking samples within a budget, and seeing whether the machine disturbed them."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from switchgear.fingerprints.measurement import median_absolute_deviation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The share of the time that a thread of ours, ready to run, waited for a CPU (or that the
# hypervisor took away) from which on the samples count as disturbed. Ours: an idle machine
# shows under 1 %, one busy process per CPU shows 50 %.
WAITED_SHARE: Final = 0.05


def collect(
    sample: Callable[[], float],
    *,
    budget_s: float,
    minimum: int = 5,
    maximum: int = 101,
    tick: Callable[[float], None] | None = None,
) -> list[float]:
    """Calls `sample` until `maximum` samples are there or the budget is spent.

    At least `minimum` samples are taken. `tick` hears the share done, at most 5 times a second,
    and always after a sample that took longer than that. Blocks; raises what `sample` raises.
    """
    samples: list[float] = []
    started = told = time.monotonic()
    while len(samples) < maximum:
        now = time.monotonic()
        spent = (now - started) / budget_s if budget_s > 0 else 1.0
        if spent >= 1.0 and len(samples) >= minimum:
            break

        if tick is not None and now - told >= 0.2:
            tick(min(1.0, max(spent, len(samples) / maximum)))
            told = now

        samples.append(sample())

    return samples


def drifted(samples: Sequence[float]) -> bool:
    """Whether the second half of the samples differs from the first beyond the spread.

    Such a value was still moving (clocks, heat, another process): its spread says too little.
    """
    half = len(samples) // 2
    if half < 3:
        return False

    first, second = samples[:half], samples[half:]
    gap = abs(statistics.median(first) - statistics.median(second))
    spread = max(median_absolute_deviation(first), median_absolute_deviation(second))
    return gap > 3 * spread and gap > 0.01 * abs(statistics.median(samples))


class Contention:
    """How long this process's threads waited for a CPU since the object was made."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._waited = _waited_s()
        self._stolen = _stolen_s()

    def share(self) -> float:
        """The larger of two shares of the time since: the longest wait of a thread, steal.

        0 where the kernel does not tell.
        """
        waits = [now - self._waited.get(thread, 0.0) for thread, now in _waited_s().items()]
        stolen = (_stolen_s() - self._stolen) / (os.cpu_count() or 1)
        # After the others: a wait between two of these is in both, or in the time only.
        elapsed = time.monotonic() - self._started
        if elapsed <= 0:
            return 0.0

        # Steal comes in ticks, which may be longer than the time.
        return min(1.0, max([*waits, stolen, 0.0]) / elapsed)

    @property
    def disturbed(self) -> bool:
        return self.share() > WAITED_SHARE


def _waited_s() -> dict[str, float]:
    """Run-queue wait per thread, from `schedstat` (its second number, in nanoseconds)."""
    waited = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            waited[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            # The thread ended, or the kernel keeps no schedstat.
            continue

    return waited


def _stolen_s() -> float:
    """Time that the hypervisor gave to others, summed over all CPUs."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        return int(words[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
