"""What the protocol watches over: devices, backends on them, and pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Level: TypeAlias = Literal["device", "backend", "pair"]
Presence: TypeAlias = Literal["present", "absent", "lost"]
Word: TypeAlias = Literal["auto", "isolated", "forced"]


@dataclass(frozen=True, slots=True)
class Device:
    """A physical part with its thermal domain. Limits in m°C.

    Limits that are None are the protocol's defaults: its trip, the recover that belongs to the
    trip, and the hard limit without a passive trip of the kernel.
    """

    name: str
    trip_mc: int | None = None
    recover_mc: int | None = None
    hard_limit_mc: int | None = None
    is_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Topology:
    """Devices by name, and for each backend the name of its device."""

    devices: Mapping[str, Device]
    backends: Mapping[str, str]

    def __post_init__(self) -> None:
        for backend, device in self.backends.items():
            if device not in self.devices:
                raise ValueError(f"backend {backend!r} is on an unknown device {device!r}")


class PairKey(NamedTuple):
    """A model (its hash) on a backend in one precision for one set of input shapes."""

    model: str
    backend: str
    precision: str
    shapes: str = ""

    def __str__(self) -> str:
        shapes = f" {self.shapes}" if self.shapes else ""
        return f"{self.model[:12]} on {self.backend} {self.precision}{shapes}"


class Target(NamedTuple):
    """One thing with a state of its own; `name` is a `PairKey` for pairs.

    `session` is 0 but for a pair as one session's own limits see it.
    """

    level: Level
    name: str | PairKey
    session: int = 0

    def __str__(self) -> str:
        own = f" of session {self.session}" if self.session else ""
        return f"{self.level} {self.name}{own}"


class SessionLimits(NamedTuple):
    """One session's own frame limits in ms; None follows the pair's own."""

    session: int
    slow_ms: float | None = None
    recover_ms: float | None = None
