"""The protocol's mutable records: one per device, backend and pair, each with its state."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias
from zlib import crc32

from switchgear.daemon.protocol import backend as backends
from switchgear.daemon.protocol import device_rules as devices
from switchgear.daemon.protocol.backend import BackendState
from switchgear.daemon.protocol.breaker import Breaker
from switchgear.daemon.protocol.device_rules import DeviceState, Limits
from switchgear.daemon.protocol.pair_state import PairState, new_pair, share_of
from switchgear.daemon.protocol.topology import PairKey, Target

if TYPE_CHECKING:
    from switchgear.daemon.protocol.constants import Constants
    from switchgear.daemon.protocol.topology import Device, Presence, Word

_GONE: dict[str, str] = {"absent": "is not there", "lost": "is lost"}


def seed_of(seed: int, name: str) -> int:
    return seed ^ crc32(name.encode())


class Place:
    """What a device, a backend and a pair have beside their state.

    `free`: nothing stands against a frame here; `look` keeps it true to the state.
    """

    __slots__ = ("free", "presence", "target", "word")

    def __init__(self, target: Target) -> None:
        self.target = target
        self.presence: Presence = "present"
        self.word: Word = "auto"
        self.free = True

    def refusal(self) -> str:
        """Why no frame may come here whatever the breaker says, empty where it may."""
        if self.word == "isolated":
            return f"{self.target} is isolated by the operator"

        if self.presence != "present":
            return f"{self.target} {_GONE[self.presence]}"

        return ""

    def _usual(self) -> bool:
        return self.word == "auto" and self.presence == "present"


class DeviceRecord(Place):
    """A device, its backends and its pairs."""

    __slots__ = ("backends", "pairs", "state", "tripped_by")

    def __init__(self, device: Device, constants: Constants, seed: int) -> None:
        super().__init__(Target("device", device.name))
        trip_mc = constants.trip_mc if device.trip_mc is None else device.trip_mc
        recover_mc = device.recover_mc
        if recover_mc is None:
            recover_mc = constants.recover_mc(trip_mc)

        hard_mc = device.hard_limit_mc
        if hard_mc is None:
            hard_mc = constants.hard_limit(None)

        if recover_mc > trip_mc:
            raise ValueError(f"device {device.name!r} recovers above its trip")

        limits = Limits(trip_mc, recover_mc, hard_mc, device.is_cpu)
        breaker = Breaker(seed_of(seed, device.name))
        self.state = DeviceState(limits, constants, breaker)
        self.backends: list[BackendRecord] = []
        self.pairs: dict[PairKey, PairRecord] = {}
        self.tripped_by: PairKey | None = None

    def look(self) -> None:
        self.free = self.state.breaker.phase == "closed" and self._usual()

    def share(self) -> float:
        return 1.0 if self.word == "forced" else devices.share_of(self.state)

    def set_breaker(self, breaker: Breaker) -> None:
        self.state = self.state._replace(breaker=breaker)


class BackendRecord(Place):
    """A backend on its device."""

    __slots__ = ("device", "name", "pairs", "state")

    def __init__(
        self, name: str, device: DeviceRecord, constants: Constants, seed: int
    ) -> None:
        super().__init__(Target("backend", name))
        self.name = name
        self.device = device
        self.state = BackendState(constants, Breaker(seed_of(seed, f"backend {name}")))
        self.pairs: dict[PairKey, PairRecord] = {}

    def look(self) -> None:
        self.free = self.state.breaker.phase == "closed" and self._usual()

    def share(self) -> float:
        return 1.0 if self.word == "forced" else backends.share_of(self.state)

    def set_breaker(self, breaker: Breaker) -> None:
        self.state = self.state._replace(breaker=breaker)


class PairRecord(Place):
    """A pair, and the same pair as single sessions with limits of their own see it."""

    __slots__ = ("backend", "device", "key", "model", "ready", "sessions", "state")

    def __init__(
        self, key: PairKey, backend: BackendRecord, state: PairState, *, ready: bool
    ) -> None:
        super().__init__(Target("pair", key))
        self.key = key
        self.model = (key.model, key.shapes)
        self.backend = backend
        self.device = backend.device
        self.state = state
        self.ready = ready
        self.sessions: dict[int, SessionRecord] = {}

    def look(self) -> None:
        self.free = self.ready and self.state.breaker.phase == "closed" and self._usual()

    def share(self) -> float:
        return 1.0 if self.word == "forced" else share_of(self.state)

    def clear(self) -> bool:
        """Whether nothing at any level stands against a frame."""
        return self.free and self.device.free and self.backend.free

    def on_trial(self) -> bool:
        """Whether it may load its device although that is open for heat."""
        return self.state.trial.phase in ("running", "passed")


class SessionRecord:
    """A pair by one session's limits. Its slowness moves this session and nobody else."""

    __slots__ = ("pair", "session", "state", "target")

    def __init__(
        self,
        pair: PairRecord,
        session: int,
        slow_ms: float | None,
        recover_ms: float | None,
        seed: int,
    ) -> None:
        self.pair = pair
        self.session = session
        self.target = Target("pair", pair.key, session)
        self.state = new_pair(
            pair.state.constants,
            pair.key.model,
            slow_ms=slow_ms,
            recover_ms=recover_ms,
            seed=seed_of(seed, f"session {session} {pair.key}"),
        )

    def share(self) -> float:
        return share_of(self.state)


AnyRecord: TypeAlias = DeviceRecord | BackendRecord | PairRecord | SessionRecord


def probe_place(record: AnyRecord) -> tuple[str, PairKey | None]:
    """The backend and the pair to probe: of a device, those of the pair that tripped it."""
    if isinstance(record, SessionRecord):
        return record.pair.backend.name, record.pair.key

    if isinstance(record, PairRecord):
        return record.backend.name, record.key

    tripped = record.tripped_by if isinstance(record, DeviceRecord) else None
    ready = [
        pair
        for pair in record.pairs.values()
        if pair.ready and pair.state.breaker.phase == "closed"
    ]
    chosen = next((pair for pair in ready if pair.key == tripped), None)
    chosen = chosen or next(iter(ready), None)
    if chosen is not None:
        return chosen.backend.name, chosen.key

    if isinstance(record, BackendRecord):
        return record.name, None

    return (record.backends[0].name if record.backends else ""), None
