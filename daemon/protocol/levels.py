"""The levels together: their records, their steps, and what passes from one to another.

A step's actions are the messages: slow frames of a pair trip its device, failures of a pair
make its backend suspect, a device that opens lets a degraded model try INT4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Final, Literal, NamedTuple

from switchgear.daemon.protocol import backend as backends
from switchgear.daemon.protocol import device as devices
from switchgear.daemon.protocol import pair as pairs
from switchgear.daemon.protocol.admission import share_elsewhere, verdict
from switchgear.daemon.protocol.answers import (
    Admission,
    Event,
    EventKind,
    Probe,
)
from switchgear.daemon.protocol.backend import FaultKind, Suspect
from switchgear.daemon.protocol.constants import Constants, report
from switchgear.daemon.protocol.degrade import degraded, faster_than_cpu, slower
from switchgear.daemon.protocol.device_rules import RefugeHeats, Trip, warmth_of
from switchgear.daemon.protocol.pair_state import (
    BeginTrial,
    EndTrial,
    Faulted,
    Rest,
    Slow,
    TrialChanged,
    TrialHeat,
    TripDevice,
    is_good,
)
from switchgear.daemon.protocol.reading import Warmth
from switchgear.daemon.protocol.records import (
    BackendRecord,
    DeviceRecord,
    PairRecord,
    SessionRecord,
    probe_place,
)
from switchgear.daemon.protocol.snapshots import Kept
from switchgear.daemon.protocol.table import (
    ProbeDone,
    RefugeFrame,
    StartProbe,
    Tick,
    Transition,
)
from switchgear.daemon.protocol.topology import (
    PairKey,
    SessionLimits,
    Target,
    Topology,
)

# Events that nobody fetched; the oldest go first.
KEPT_EVENTS: Final = 4096
_FAULTS: Final[dict[str, FaultKind]] = {"error": "error", "hang": "hang", "crash": "crash"}
_UNKNOWN: Final = Admission(False, 0.0, "normal", "the pair is not known")


class Levels:
    """The records of all levels and what connects them. `Protocol` is its face."""

    def __init__(
        self,
        constants: Constants | None,
        topology: Topology,
        seed: int = 0,
        *,
        mode: Literal["default", "report"] = "default",
        dry_run: bool = False,
        estimate: Callable[[PairKey], float | None] | None = None,
    ) -> None:
        if constants is None:
            constants = report() if mode == "report" else Constants()

        self.constants = constants
        self.dry_run = dry_run
        self._seed = seed
        self._estimate = estimate
        self._devices = {
            name: DeviceRecord(device, constants, seed)
            for name, device in topology.devices.items()
        }
        self._backends: dict[str, BackendRecord] = {}
        for name, device in topology.backends.items():
            record = BackendRecord(name, self._devices[device], constants, seed)
            self._backends[name] = record
            record.device.backends.append(record)

        self._pairs: dict[PairKey, PairRecord] = {}
        self._models: dict[tuple[str, str], list[PairRecord]] = {}
        # Pairs, and pairs as sessions see them, that a tick must look at.
        self._restless: dict[Target, PairRecord | SessionRecord] = {}
        # What waits for good frames of a model that left it.
        self._left: dict[tuple[str, str], dict[Target, None]] = {}
        self._events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._probes: list[Probe] = []
        self._refuges_heat = False
        self._frame: tuple[float, float] = (0.0, 0.0)
        self._kept = Kept()
        self._attempts: set[PairKey] = set()

    # Steps, and what passes from one level to another.
    def _step(self, record: object, event: NamedTuple, now_s: float) -> None:
        if isinstance(record, DeviceRecord):
            self._step_device(record, event, now_s)
        elif isinstance(record, BackendRecord):
            self._step_backend(record, event, now_s)
        elif isinstance(record, PairRecord | SessionRecord):
            self._step_pair(record, event, now_s)

    def _step_device(self, record: DeviceRecord, event: NamedTuple, now_s: float) -> None:
        before = record.state
        after, actions = devices.step(before, event, now_s)
        if after is before:
            return

        record.state = after
        if after.shed != before.shed and after.breaker.phase == before.breaker.phase:
            self._tell_step(record, f"{before.shed}", f"{after.shed}", now_s)

        for action in actions:
            if isinstance(action, Transition):
                self._moved(record, action, now_s)
            elif isinstance(action, StartProbe):
                self._probe(record, action)
            elif isinstance(action, RefugeHeats):
                self._tell(
                    now_s,
                    "refuge",
                    record.target,
                    "",
                    "least energy",
                    "heat",
                    "its refuge does not let it cool",
                )

        self._refuges_heat = any(d.state.refuge_heats for d in self._devices.values())
        record.look()

    def _moved(self, record: DeviceRecord, moved: Transition, now_s: float) -> None:
        self._tell_transition(record.target, record.state.breaker, moved, now_s)
        if moved.after == "half_open":
            # It stays left, and a trial goes on, until the probes are good.
            return

        if moved.after != "open":
            for waiting in self._left.values():
                waiting.pop(record.target, None)

            self._left = {model: waiting for model, waiting in self._left.items() if waiting}

        for pair in list(record.pairs.values()):
            self._step_pair(pair, EndTrial(), now_s)
            if moved.after == "open":
                self._degrade(pair.model, now_s)

    def _step_backend(self, record: BackendRecord, event: NamedTuple, now_s: float) -> None:
        before = record.state
        after, actions = backends.step(before, event, now_s)
        if after is before:
            return

        record.state = after
        for action in actions:
            if isinstance(action, Transition):
                self._tell_transition(record.target, after.breaker, action, now_s)
            elif isinstance(action, StartProbe):
                self._probe(record, action)

        record.look()

    def _step_pair(
        self, record: PairRecord | SessionRecord, event: NamedTuple, now_s: float
    ) -> None:
        before = record.state
        after, actions = pairs.step(before, event, now_s)
        if after is before:
            return

        record.state = after
        if isinstance(record, PairRecord):
            record.look()

        if after.breaker is not before.breaker:
            self._watch(record)

        for action in actions:
            self._pass_on(record, action, now_s)

    def _pass_on(
        self, record: PairRecord | SessionRecord, action: NamedTuple, now_s: float
    ) -> None:
        if isinstance(action, Transition):
            self._tell_transition(record.target, record.state.breaker, action, now_s)
        elif isinstance(action, StartProbe):
            self._probe(record, action)
        elif isinstance(action, TripDevice):
            self._trip(record, action, now_s)
        elif isinstance(action, TrialChanged):
            self._tell(now_s, "trial", record.target, "", action.phase, "heat", action.why)
        elif isinstance(action, Faulted) and isinstance(record, PairRecord):
            if action.kind in _FAULTS:
                self._step_backend(record.backend, Suspect(), now_s)
            elif action.kind == "unsupported":
                self._degrade(record.model, now_s)

    def _trip(self, record: PairRecord | SessionRecord, trip: TripDevice, now_s: float) -> None:
        self._frame = (trip.run_ms, trip.limit_ms)
        pair = record.pair if isinstance(record, SessionRecord) else record
        session = record.session if isinstance(record, SessionRecord) else 0
        others = [
            other
            for other in self._models[pair.model]
            if other.device is not pair.device
            and not slower(other, trip.run_ms, self._estimate)
        ]
        elsewhere = share_elsewhere(pair, session, others) > 0.0
        if isinstance(record, PairRecord):
            pair.device.tripped_by = pair.key
            self._step_device(pair.device, Trip(elsewhere), now_s)
            left = pair.device.state.breaker.phase == "open"
        else:
            if elsewhere and not pair.device.state.limits.is_cpu:
                self._step_pair(record, Slow(), now_s)

            left = record.state.breaker.phase == "open"

        if left:
            target = pair.device.target if isinstance(record, PairRecord) else record.target
            self._left.setdefault(pair.model, {})[target] = None

        self._frame = (0.0, 0.0)

    def _refuge_frame(
        self, record: PairRecord, run_ms: float, limits: SessionLimits | None, now_s: float
    ) -> None:
        for target in list(self._left[record.model]):
            found = self._find(target)
            if isinstance(found, DeviceRecord) and found is not record.device:
                good = is_good(record.state, run_ms)
                self._step_device(found, RefugeFrame(good), now_s)
            elif (
                isinstance(found, SessionRecord)
                and limits is not None
                and found.session == limits.session
                and found.pair.device is not record.device
            ):
                good = is_good(self._session(record, limits).state, run_ms)
                self._step_pair(found, RefugeFrame(good), now_s)

    def _tick_pair(
        self, record: PairRecord | SessionRecord, now_s: float, busy: Collection[str]
    ) -> None:
        pair = record.pair if isinstance(record, SessionRecord) else record
        if record.state.breaker.phase in ("open", "quarantined"):
            warm = warmth_of(pair.device.state, now_s)
            cool = warm is Warmth.COOL or warm is Warmth.NONE
            self._step_pair(record, Rest(cool), now_s)
            return

        self._dry_return(record, now_s)
        shut = ("open", "half_open")
        phases = (pair.device.state.breaker.phase, pair.backend.state.breaker.phase)
        if phases[0] not in shut and phases[1] not in shut:
            self._step_pair(record, Tick(pair.device.target.name in busy), now_s)

    def _watch(self, record: PairRecord | SessionRecord) -> None:
        breaker = record.state.breaker
        if breaker.phase == "closed" and not breaker.hold_level:
            self._restless.pop(record.target, None)
            for waiting in self._left.values():
                if isinstance(record, SessionRecord):
                    waiting.pop(record.target, None)
        else:
            self._restless[record.target] = record

    def _heat_trials(self, device: DeviceRecord, now_s: float) -> None:
        for record in device.pairs.values():
            if record.state.trial.phase != "none":
                known = device.state.thermometer
                hot = TrialHeat(known.temperature_mc, device.state.limits.hard_mc)
                self._step_pair(record, hot, now_s)
                if record.state.trial.phase == "failed":
                    self._degrade(record.model, now_s)

    # Degrade.
    def _degrade(self, model: tuple[str, str], now_s: float) -> None:
        """Where the NPU says unsupported and the GPU is hot, the INT4 pair may try the GPU."""
        places = degraded(self._models.get(model, ()), self.constants)
        if places is None:
            return

        refused, refuge = places
        breaker = refuge.device.state.breaker
        if breaker.phase != "open" or breaker.cause != "heat":
            return

        if not (
            self.constants.degrade_always
            or faster_than_cpu(refuge, self._models[model], self._estimate)
        ):
            return

        known = refuge.device.state.thermometer.temperature_mc
        before = refuge.state.trial
        self._step_pair(refuge, BeginTrial(known, breaker.until_s), now_s)
        if refuge.state.trial is not before:
            self._tell(
                now_s,
                "degrade",
                refused.target,
                str(refused.key),
                str(refuge.key),
                "unsupported",
                "the NPU does not support the model and the GPU is hot",
            )

    # Small things.
    def _session(self, record: PairRecord, limits: SessionLimits) -> SessionRecord:
        own = record.sessions.get(limits.session)
        if own is None:
            own = SessionRecord(
                record, limits.session, limits.slow_ms, limits.recover_ms, self._seed
            )
            record.sessions[limits.session] = own

        return own

    def _serves_elsewhere(self, device: DeviceRecord) -> bool:
        """Whether each model of a device, at least one, has another device to go to."""
        models = {record.model for record in device.pairs.values() if record.ready}
        return bool(models) and all(
            any(
                other.device is not device and verdict(other).share > 0.0
                for other in self._models[model]
            )
            for model in models
        )

    def _heats(self, record: PairRecord) -> bool:
        return self._refuges_heat and any(
            other.device.state.refuge_heats for other in self._models[record.model]
        )

    def _find(
        self, target: Target
    ) -> DeviceRecord | BackendRecord | PairRecord | SessionRecord | None:
        if target.level == "device":
            return self._devices.get(str(target.name))

        if target.level == "backend":
            return self._backends.get(str(target.name))

        record = self._pairs.get(target.name) if isinstance(target.name, PairKey) else None
        if record is None or not target.session:
            return record

        return record.sessions.get(target.session)

    def _place(self, target: Target) -> DeviceRecord | BackendRecord | PairRecord:
        record = self._find(target)
        if record is None or isinstance(record, SessionRecord):
            raise KeyError(target)

        return record

    def _probe(
        self,
        record: DeviceRecord | BackendRecord | PairRecord | SessionRecord,
        start: StartProbe,
    ) -> None:
        backend, pair = probe_place(record)
        probe = Probe(record.target, backend, pair, start.lease, start.deadline_s)
        self._probes.append(probe)

    def _dry_return(
        self,
        record: DeviceRecord | BackendRecord | PairRecord | SessionRecord,
        now_s: float,
    ) -> None:
        """In a dry run nobody answers a probe: without a frame it is given back in time."""
        breaker = record.state.breaker
        if self.dry_run and breaker.lease and now_s >= breaker.lease_until_s:
            self._step(record, ProbeDone(breaker.lease, None), now_s)

    def _stand_in(self, record: PairRecord, now_s: float) -> None:
        """In a dry run a live frame that went well is a good probe."""
        for place in (record.device, record.backend, record):
            if place.state.breaker.lease:
                self._step(place, ProbeDone(place.state.breaker.lease, True), now_s)

    def _device_of(self, target: Target) -> DeviceRecord | None:
        record = self._find(target)
        if isinstance(record, SessionRecord):
            record = record.pair

        return record.device if isinstance(record, BackendRecord | PairRecord) else record

    def _tell_transition(
        self, target: Target, breaker: Any, moved: Transition, now_s: float
    ) -> None:
        hold_s = breaker.hold_s if moved.after in ("open", "quarantined") else 0.0
        self._tell(
            now_s,
            "transition",
            target,
            moved.before,
            moved.after,
            breaker.cause,
            moved.reason,
            hold_s,
        )

    def _tell_step(self, record: DeviceRecord, before: str, after: str, now_s: float) -> None:
        self._tell(
            now_s,
            "step",
            record.target,
            before,
            after,
            "heat",
            "shedding more" if after > before else "shedding less",
        )

    def _tell(
        self,
        now_s: float,
        kind: EventKind,
        target: Target,
        before: str,
        after: str,
        cause: str,
        reason: str,
        hold_s: float = 0.0,
    ) -> None:
        device = self._device_of(target)
        known = device.state.thermometer if device is not None else None
        run_ms, limit_ms = self._frame
        self._events.append(
            Event(
                now_s,
                kind,
                target,
                before,
                after,
                cause,
                reason,
                known.temperature_mc if known else None,
                known.kind if known else "none",
                run_ms,
                limit_ms,
                hold_s,
            )
        )
