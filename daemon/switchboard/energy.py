"""Energy per inference, measured: what the machine took while exactly one place was busy.

(energy - idle power * time) / inferences, over intervals of a second. The idle power is learnt
while nothing ran. Readings are taken in a thread of their own, which may hang for ever without
anybody waiting for it, and only while there is work, or the idle power is to be learnt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from switchgear.daemon.switchboard.power_meters import (
    Meter,
    Taken,
    choose_meter,
    find_meters,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from switchgear.daemon.switchboard.place import Place
    from switchgear.daemon.switchboard.topology import Part

INTERVAL_S: Final = 1.0
IDLE_INTERVAL_S: Final = 2.0
# How often a meter of power is read within an interval; a counter needs its ends only.
STEP_S: Final = 0.1
# A run at each end is counted in the wrong interval: with fewer than these it would weigh.
MIN_RUNS: Final = 10
# An interval that came out longer than this tells too little: the loop was late.
LONGEST_S: Final = 5.0
# Nothing answers now (a battery that charges): asked again after this.
SILENT_S: Final = 30.0
# The weight of a newer idle power: a warm chip leaks more than a cold one.
IDLE_WEIGHT: Final = 0.25
# So many readings in a row that fail, and a meter is given up.
MAX_FAILURES: Final = 5
MODELLED: Final = "modelled"

Readings = dict[Meter, "Taken | str | None"]

log = logging.getLogger(__name__)


class Sampler:
    """A thread that reads meters when asked; `answer` is called on the loop."""

    def __init__(
        self,
        root: Path,
        found: Callable[[list[Meter], list[str]], None],
        answer: Callable[[Readings], None],
    ) -> None:
        self._root = root
        self._found = found
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._orders: queue.SimpleQueue[tuple[Meter, ...] | None] = queue.SimpleQueue()
        # A daemon thread: one that hangs in a read does not hold up the process's end.
        self._thread = threading.Thread(target=self._run, name="energy", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self, meters: tuple[Meter, ...]) -> None:
        """Does not block; the answer comes when it comes."""
        self._orders.put(meters)

    def stop(self) -> None:
        """It ends after the reading that it is in, if ever."""
        self._orders.put(None)

    def _run(self) -> None:
        found, problems = find_meters(self._root)
        self._tell(self._found, found, problems)
        while (meters := self._orders.get()) is not None:
            self._tell(self._answer, {meter: _take(meter) for meter in meters})

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        # The loop may be closed by now.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)


def _take(meter: Meter) -> Taken | str | None:
    try:
        return meter.take()
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:
        return str(error)


class Interval:
    """What happened since its first readings: energy by meter (None: not known), runs by
    place."""

    __slots__ = ("busy", "disturbed", "energy_uj", "first", "last", "runs")

    def __init__(self, first: dict[Meter, Taken]) -> None:
        self.first = first
        self.last = dict(first)
        self.energy_uj: dict[Meter, float | None] = dict.fromkeys(first, 0.0)
        self.runs: Counter[Place] = Counter()
        # Seen running, whether or not they ended in it.
        self.busy: set[Place] = set()
        self.disturbed = False

    def add(self, readings: Readings) -> None:
        for meter, known_uj in self.energy_uj.items():
            taken = readings.get(meter)
            if not isinstance(taken, Taken):
                self.energy_uj[meter] = None
                continue

            more_uj = meter.energy_uj(self.last[meter], taken)
            whole = known_uj is not None and more_uj is not None
            self.energy_uj[meter] = known_uj + more_uj if whole else None  # type: ignore[operator]
            self.last[meter] = taken

    def power_uw(self, meter: Meter) -> float | None:
        """The mean power, None where it is not known."""
        energy_uj, passed_s = self.energy_uj.get(meter), self.passed_s(meter)
        return energy_uj / passed_s if energy_uj is not None and passed_s > 0.0 else None

    def passed_s(self, meter: Meter) -> float:
        return self.last[meter].at_s - self.first[meter].at_s if meter in self.first else 0.0

    @property
    def length_s(self) -> float:
        return max(self.passed_s(meter) for meter in self.first)


class EnergyWatch:
    """Measures the places of the switchboard. Use it on a running loop; nothing here blocks.

    `disturbed()` says whether the daemon itself does something else that takes energy (it
    prepares a model): then nothing is learnt.
    """

    def __init__(self, root: Path, disturbed: Callable[[], bool]) -> None:
        self._disturbed = disturbed
        self._sampler = Sampler(root, self._found, self._sampled)
        self._parts: dict[str, Part] = {}
        # All that there are, and that of each part.
        self._there: tuple[Meter, ...] = ()
        self._meters: dict[str, Meter] = {}
        self._asked: tuple[Meter, ...] = ()
        self._step_s = INTERVAL_S
        self._waiting = False
        self._asked_s = 0.0
        self._due_s = 0.0
        self._failures: Counter[Meter] = Counter()
        self._idle_uw: dict[Meter, float] = {}
        self._interval: Interval | None = None
        # Runs that ended since the last interval: there is work.
        self._worked = False
        self.problems: tuple[str, ...] = ()
        # By a place's label and by device, where it was measured: with what.
        self.sources: dict[str, str] = {}

    def start(self, parts: Mapping[str, Part]) -> None:
        """Looks for the meters of these parts, by backend."""
        for part in parts.values():
            self._join(part)

        self._sampler.start()

    def _join(self, part: Part) -> Part:
        """The part with all the APIs through which it is seen."""
        known = self._parts.get(part.name)
        apis = (*known.apis, *part.apis) if known is not None else part.apis
        joined = self._parts[part.name] = type(part)(part.name, part.kind, apis)
        return joined

    def add(self, part: Part) -> None:
        """A part that came later, or one more API of a known one."""
        self._choose(self._join(part))
        self._use_meters()
        # What is under way does not know its meter.
        self._interval = None

    def stop(self) -> None:
        self._meters.clear()
        self._sampler.stop()

    def source(self, name: str) -> str:
        """Where the energy of a device, or of a place by its label (`cpu/auto`), comes from:
        `measured (powercap)`, or `modelled`, with the reason where there could be a meter."""
        method = self.sources.get(name)
        if method is not None:
            return f"measured ({method})"

        return f"{MODELLED} ({'; '.join(self.problems)})" if self.problems else MODELLED

    # What happens.

    @property
    def active(self) -> bool:
        """Whether there is a meter at all."""
        return bool(self._meters)

    def ran(self, place: Place) -> None:
        """A run of this place ended well."""
        if self._interval is not None:
            self._interval.runs[place] += 1
        else:
            self._worked = True

    def tick(self, now_s: float, running: Collection[Place | None]) -> None:
        """The time, and the places that have a run now; None for one that has no place."""
        if not self._meters:
            return

        interval = self._interval
        if interval is not None:
            interval.busy.update(place for place in running if place is not None)
            interval.disturbed = interval.disturbed or None in running

        if self._waiting or now_s < self._due_s:
            return

        if interval is not None or self._worked or running or not self._idle_uw:
            self._waiting = True
            self._asked_s = now_s
            self._sampler.ask(self._asked)

    # What the thread says.

    def _found(self, meters: list[Meter], problems: list[str]) -> None:
        self.problems = tuple(problems)
        for problem in problems:
            log.info("energy is not measured by %s", problem)

        self._there = tuple(meters)
        for part in self._parts.values():
            self._choose(part)

        self._use_meters()

    def _choose(self, part: Part) -> None:
        meter = choose_meter(self._there, part)
        if meter is not None and meter != self._meters.get(part.name):
            log.info("the energy of %s is measured by %s", part.name, meter.method)
            self._meters[part.name] = meter

    def _use_meters(self) -> None:
        self._asked = tuple(dict.fromkeys(self._meters.values()))
        self._step_s = INTERVAL_S if all(meter.counts for meter in self._asked) else STEP_S

    def _sampled(self, readings: Readings) -> None:
        self._waiting = False
        good = {meter: taken for meter, taken in readings.items() if isinstance(taken, Taken)}
        self._due_s = self._asked_s + (self._step_s if good else SILENT_S)
        interval = self._interval
        if not good:
            self._interval = None
        elif interval is None:
            self._begin(good)
        else:
            interval.add(readings)
            self._close_if_over(interval, good)

        self._count_failures(readings)

    def _close_if_over(self, interval: Interval, good: dict[Meter, Taken]) -> None:
        idle = not interval.runs and not interval.busy
        if interval.length_s < (IDLE_INTERVAL_S if idle else INTERVAL_S):
            return

        learnt = self._learn(interval)
        self._interval = None
        # Without work there is nothing to follow, once the idle power is known.
        if not (idle and learnt):
            self._begin(good)

    def _begin(self, good: dict[Meter, Taken]) -> None:
        self._worked = False
        self._interval = Interval(good)
        self._interval.disturbed = self._disturbed()

    def _count_failures(self, readings: Readings) -> None:
        for meter, taken in readings.items():
            if not isinstance(taken, str):
                self._failures.pop(meter, None)
                continue

            self._failures[meter] += 1
            if self._failures[meter] == MAX_FAILURES:
                problem = f"{meter.method} {meter.files[0].parent.name}: {taken}"
                log.warning("energy is not measured any more by %s", problem)
                self.problems = (*self.problems, problem)
                self._there = tuple(m for m in self._there if m is not meter)
                self._meters = {n: m for n, m in self._meters.items() if m is not meter}
                self._idle_uw.pop(meter, None)
                self._interval = None
                self._use_meters()

    # What is learnt.

    def _learn(self, interval: Interval) -> bool:
        """Whether an interval without work told the idle power."""
        places = interval.busy | set(interval.runs)
        disturbed = interval.disturbed or self._disturbed()
        if disturbed or len(places) > 1 or interval.length_s > LONGEST_S:
            return False

        if not places:
            return self._learn_idle(interval)

        (place,) = places
        runs = interval.runs[place]
        meter = self._meters.get(place.device)
        if meter is None or runs < MIN_RUNS:
            return False

        energy_mj = energy_per_run_mj(
            interval.energy_uj.get(meter),
            self._idle_uw.get(meter),
            interval.passed_s(meter),
            runs,
        )
        if energy_mj is not None:
            place.energy.observe(energy_mj)
            label = f"{place.key.backend}/{place.key.precision}"
            self.sources[label] = self.sources[place.device] = meter.method

        return False

    def _learn_idle(self, interval: Interval) -> bool:
        learnt = False
        for meter in self._asked:
            power_uw = interval.power_uw(meter)
            if power_uw is not None:
                known_uw = self._idle_uw.get(meter, power_uw)
                self._idle_uw[meter] = known_uw + IDLE_WEIGHT * (power_uw - known_uw)
                learnt = True

        return learnt


def energy_per_run_mj(
    energy_uj: float | None, idle_uw: float | None, passed_s: float, runs: int
) -> float | None:
    """What one of `runs` took beyond the idle power, in mJ; None where that is not known, or
    not more than nothing."""
    if energy_uj is None or idle_uw is None or runs <= 0:
        return None

    energy_mj = (energy_uj - idle_uw * passed_s) / runs / 1e3
    return energy_mj if energy_mj > 0.0 else None
