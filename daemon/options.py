"""What a session was opened with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """What the client chose at OpenSession. `precision` is the lowest one it wants, empty for
    any that was checked; INT4 is used by itself only where an NPU refuses the model. `policy`
    is empty for the daemon's own, the limits are 0 for the model's own. `events`: it wants
    EVENT records. `hedge`: it may run a request in a second place too."""

    slots: int
    on_busy: str
    priority: int
    backends: tuple[str, ...]
    strict: bool
    precision: str = ""
    policy: str = ""
    slow_ms: float = 0.0
    recover_ms: float = 0.0
    events: bool = False
    hedge: bool = False
