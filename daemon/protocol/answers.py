"""What the protocol tells its user: admissions, probes to run, and events."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

from switchgear.daemon.protocol.breaker import Phase
from switchgear.daemon.protocol.reading import ReadingKind
from switchgear.daemon.protocol.topology import PairKey, Target

PeopleState: TypeAlias = Literal["normal", "shedding", "tripped", "degraded", "recovering"]
EventKind: TypeAlias = Literal[
    "transition", "step", "degrade", "trial", "refuge", "operator", "presence"
]

PEOPLE: Final[dict[Phase, PeopleState]] = {
    "closed": "normal",
    "shedding": "shedding",
    "open": "tripped",
    "half_open": "recovering",
    "ramping": "recovering",
    "quarantined": "degraded",
}


class Admission(NamedTuple):
    """Whether a pair may be given a frame now.

    `share` is the part of the frames it may be given at most, 0 to 1. `state` and `reason` are
    for people. `probe`: it is being probed and takes no live frames. `least_energy`: choose by
    energy per inference, for the hot device does not cool at its refuge. `shed_low`: only
    higher priorities are served here. `reserve`: closed for heat or slowness alone, it may
    have those with a limit that no other place answers in time.
    """

    allowed: bool
    share: float
    state: PeopleState
    reason: str
    probe: bool = False
    least_energy: bool = False
    shed_low: bool = False
    reserve: bool = False


ADMITTED: Final = Admission(True, 1.0, "normal", "")


class Probe(NamedTuple):
    """Run a probe on `backend`: the kernel with a known answer, then `pair`'s golden input.

    Answer with `probe_result(target, lease, ...)` before `deadline_s`; later is bad. `pair` is
    None where none is loaded: the kernel alone is the probe then.
    """

    target: Target
    backend: str
    pair: PairKey | None
    lease: int
    deadline_s: float


class Event(NamedTuple):
    """One thing that the protocol did, with what it was decided by. Times in seconds.

    `before` and `after` are phases, words or places, by `kind`. The temperature is the device's
    at that moment, `run_ms` and `limit_ms` the frame's that decided, 0.0 where none did.
    """

    now_s: float
    kind: EventKind
    target: Target
    before: str
    after: str
    cause: str
    reason: str
    temperature_mc: int | None = None
    temperature_kind: ReadingKind = "none"
    run_ms: float = 0.0
    limit_ms: float = 0.0
    hold_s: float = 0.0

    def __str__(self) -> str:
        text = f"{self.target}: {self.before} -> {self.after}: {self.reason}"
        if self.temperature_mc is not None:
            text += f", {self.temperature_mc / 1000:.1f} °C {self.temperature_kind}"

        if self.limit_ms:
            text += f", {self.run_ms:.1f} ms against {self.limit_ms:.1f} ms"

        return text + (f", for {self.hold_s:.0f} s" if self.hold_s > 0 else "")
