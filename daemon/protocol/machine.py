"""The protocol as its user holds it: all devices, backends and pairs, and what passes between.

No clock and no I/O: each call takes the time, in seconds of a monotonic clock that never goes
back. Nothing here blocks. Not thread-safe; use it from one loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, Literal

from switchgear.daemon.protocol import backend as backends
from switchgear.daemon.protocol.admission import admit, verdict
from switchgear.daemon.protocol.answers import (
    ADMITTED,
    PEOPLE,
    Admission,
    Event,
    PeopleState,
    Probe,
)
from switchgear.daemon.protocol.backend import Fault, FaultKind, Served
from switchgear.daemon.protocol.degrade import is_unsupported
from switchgear.daemon.protocol.device_rules import DeviceState, Heat, Lost, rises, warmth_of
from switchgear.daemon.protocol.failures import NO_FAILURES
from switchgear.daemon.protocol.levels import Levels
from switchgear.daemon.protocol.pair_state import (
    Aging,
    Failure,
    FailureKind,
    Frame,
    PairState,
    Rest,
    new_pair,
)
from switchgear.daemon.protocol.reading import Reading, Warmth
from switchgear.daemon.protocol.records import (
    BackendRecord,
    DeviceRecord,
    PairRecord,
    SessionRecord,
    seed_of,
)
from switchgear.daemon.protocol.snapshots import restore, snapshot
from switchgear.daemon.protocol.table import (
    ProbeDone,
    Returned,
    Tick,
)
from switchgear.daemon.protocol.topology import (
    Device,
    PairKey,
    Presence,
    SessionLimits,
    Target,
    Word,
)

# Events that nobody fetched; the oldest go first.
KEPT_EVENTS: Final = 4096
_FAULTS: Final[dict[str, FaultKind]] = {"error": "error", "hang": "hang", "crash": "crash"}
_UNKNOWN: Final = Admission(False, 0.0, "normal", "the pair is not known")


class Protocol(Levels):
    """Give it readings, frames and failures; ask it for admissions, probes and events.

    `mode` is "default" or "report" and chooses `constants` where none are given. With `dry_run`
    everything is decided and told in events, every pair stays admitted, and live frames stand
    in for probes. `estimate(pair)` gives the expected run time of a pair in ms, None where it
    is not known; it decides whether INT4 is worth its trial.
    """

    # Backends and pairs.
    def add_backend(self, name: str, device: Device) -> None:
        """Adds a backend that came later, and its device where that is new; a known one stays
        as it is."""
        if name not in self._backends:
            place = self._devices.get(device.name)
            if place is None:
                place = DeviceRecord(device, self.constants, self._seed)
                self._devices[device.name] = place

            record = BackendRecord(name, place, self.constants, self._seed)
            self._backends[name] = record
            place.backends.append(record)

    def add_pair(
        self,
        pair: PairKey,
        *,
        slow_ms: float | None = None,
        recover_ms: float | None = None,
        ready: bool = True,
        now_s: float = 0.0,
    ) -> None:
        """Adds a pair, or changes whether a known one is ready. Limits are the model's own.

        A kept quarantine of an earlier life is taken up.

        :raises KeyError: the backend is not in the topology.
        """
        known = self._pairs.get(pair)
        if known is not None:
            known.ready = ready
            known.look()
            return

        backend = self._backends[pair.backend]
        state = new_pair(
            self.constants,
            pair.model,
            slow_ms=slow_ms,
            recover_ms=recover_ms,
            seed=seed_of(self._seed, f"pair {pair}"),
        )
        record = PairRecord(pair, backend, state, ready=ready)
        record.state = self._kept.take(pair, record.state, now_s)
        record.look()
        self._pairs[pair] = backend.pairs[pair] = backend.device.pairs[pair] = record
        self._models.setdefault(record.model, []).append(record)
        self._watch(record)

    def remove_pair(self, pair: PairKey) -> None:
        """Forgets a pair; its quarantine is kept for when it comes back. Unknown: ignored."""
        record = self._pairs.pop(pair, None)
        if record is None:
            return

        self._kept.put(pair, record.state)
        del record.backend.pairs[pair]
        del record.device.pairs[pair]
        self._models[record.model].remove(record)
        if not self._models[record.model]:
            del self._models[record.model]
            self._left.pop(record.model, None)

        if record.device.tripped_by == pair:
            record.device.tripped_by = None

        self._restless.pop(record.target, None)
        for own in record.sessions.values():
            self._forget(own)

    def drop_session(self, session: int) -> None:
        """Forgets one session's own limits and what they led to."""
        for record in self._pairs.values():
            own = record.sessions.pop(session, None)
            if own is not None:
                self._forget(own)

    def _forget(self, own: SessionRecord) -> None:
        self._restless.pop(own.target, None)
        for waiting in self._left.values():
            waiting.pop(own.target, None)

    # What happens.
    def reading(self, device: str, reading: Reading, now_s: float) -> None:
        """A temperature of a device's domain, or that there is none."""
        record = self._devices[device]
        asks = rises(record.state, reading)
        event = Heat(reading, asks and self._serves_elsewhere(record))
        self._step_device(record, event, now_s)
        if record.state.breaker.phase != "closed":
            self._heat_trials(record, now_s)

    def frame(
        self,
        pair: PairKey,
        run_ms: float,
        now_s: float,
        *,
        first_use: bool = False,
        session_limits: SessionLimits | None = None,
    ) -> None:
        """A frame ended well after `run_ms` in the worker, queueing not counted.

        `first_use`: it was the first on this instance. An unknown pair is ignored: its frame
        was on its way when it was removed.
        """
        record = self._pairs.get(pair)
        if record is None:
            return

        state = record.state
        if not state.quiet or run_ms > state.slow_ms:
            warm = warmth_of(record.device.state, now_s)
            event = Frame(
                run_ms,
                warm is Warmth.ABOVE or warm is Warmth.NONE,
                warm is not Warmth.ABOVE,
                first_use,
            )
            self._step_pair(record, event, now_s)

        backend = record.backend
        if backend.state.failures is not NO_FAILURES:
            self._step_backend(backend, Served(), now_s)

        if self._left and not first_use and record.model in self._left:
            self._refuge_frame(record, run_ms, session_limits, now_s)

        if session_limits is not None:
            own = self._session(record, session_limits)
            warm = warmth_of(record.device.state, now_s)
            above = warm is Warmth.ABOVE or warm is Warmth.NONE
            self._step_pair(own, Frame(run_ms, above, not above, first_use), now_s)

        if self.dry_run and not record.clear():
            self._stand_in(record, now_s)

    def aging(
        self,
        pair: PairKey,
        age_ms: float,
        now_s: float,
        *,
        session_limits: SessionLimits | None = None,
    ) -> None:
        """A frame that is no first use is still in flight after `age_ms` in the worker."""
        record = self._pairs.get(pair)
        if record is None:
            return

        warm = warmth_of(record.device.state, now_s)
        event = Aging(age_ms, warm is Warmth.ABOVE or warm is Warmth.NONE)
        self._step_pair(record, event, now_s)
        if session_limits is not None:
            self._step_pair(self._session(record, session_limits), event, now_s)

    def failure(
        self,
        pair: PairKey,
        kind: FailureKind | Literal["device_lost"],
        domain: str,
        code: int,
        now_s: float,
        text: str = "",
    ) -> None:
        """A frame failed through no fault of the caller. An unknown pair is ignored."""
        record = self._pairs.get(pair)
        if record is None:
            return

        what = f"{domain}:{code}" + (f" {text}" if text else "")
        if kind == "device_lost":
            if not record.device.state.limits.is_cpu:
                record.device.tripped_by = pair
                self._step_device(record.device, Lost(what), now_s)
                return

            # Software on the CPU lost its "device": that is the backend's fault.
            kind = "error"

        if kind == "error" and is_unsupported(record, f"{domain}:{code}"):
            kind = "unsupported"

        self._step_pair(record, Failure(kind, what), now_s)
        fault = _FAULTS.get(kind)
        if fault is not None:
            self._step_backend(record.backend, Fault(fault, pair.model), now_s)

    def caller_error(self, pair: PairKey, now_s: float) -> None:
        """A frame failed by its caller's mistake: it counts nowhere."""

    def attempt(self, pair: PairKey, *, begins: bool) -> None:
        """Marks a pair's first use, which may take the process with it, and its end.

        Write a snapshot after the begin: a mark that outlives the process is a crash.
        """
        if begins:
            self._attempts.add(pair)
        else:
            self._attempts.discard(pair)

    def probe_result(self, target: Target, lease: int, good: bool | None, now_s: float) -> None:
        """The end of a probe; None where it was given up. An old lease is ignored."""
        record = self._find(target)
        if record is not None:
            self._step(record, ProbeDone(lease, good), now_s)

    def tick(self, now_s: float, busy: Collection[str] = ()) -> list[Probe]:
        """Time passes: call it at least every 100 ms. Returns the probes to run now.

        `busy` names the devices that run a frame; probes wait for them, for a while.
        """
        for device in self._devices.values():
            self._dry_return(device, now_s)
            self._step_device(device, Tick(device.target.name in busy), now_s)
            if device.state.breaker.phase == "open":
                self._heat_trials(device, now_s)

        for backend in self._backends.values():
            self._dry_return(backend, now_s)
            if backend.device.state.breaker.phase not in ("open", "half_open"):
                event = Tick(backend.device.target.name in busy)
                self._step_backend(backend, event, now_s)

        for record in list(self._restless.values()):
            self._tick_pair(record, now_s, busy)

        probes, self._probes = self._probes, []
        return [] if self.dry_run else probes

    def resumed(self, now_s: float) -> None:
        """The machine slept: windows are dropped, every device but the CPU is probed again."""
        event = Returned("the machine slept")
        for device in self._devices.values():
            self._step_device(device, event, now_s)

        for record in self._pairs.values():
            self._step_pair(record, event, now_s)

    def operator(self, target: Target, word: Word, now_s: float) -> None:
        """The operator's word on a target: `auto`, `isolated` or `forced`.

        :raises KeyError: no such target.
        """
        place = self._place(target)
        if place.word != word:
            before, place.word = place.word, word
            place.look()
            self._tell(now_s, "operator", target, before, word, "", "the operator's word")

    def presence(self, target: Target, presence: Presence, now_s: float) -> None:
        """A device or backend is there, is not, or was lost; back again it is probed first.

        :raises KeyError: no such target.
        """
        place = self._place(target)
        if place.presence == presence:
            return

        before, place.presence = place.presence, presence
        place.look()
        self._tell(now_s, "presence", target, before, presence, "", "presence changed")
        if presence == "present":
            self._step(place, Returned("it is there again"), now_s)

    def release(self, pair: PairKey, now_s: float) -> None:
        """Ends a quarantine, for its driver changed; the pair is probed before it serves."""
        record = self._pairs.get(pair)
        self._kept.release(pair)
        if record is not None and record.state.breaker.phase == "quarantined":
            breaker = record.state.breaker._replace(until_s=now_s)
            record.state = record.state._replace(breaker=breaker)
            self._step_pair(record, Rest(cool=True), now_s)

    # What is asked.
    def admit(
        self,
        pair: PairKey,
        now_s: float,
        *,
        session: int = 0,
        among: Iterable[PairKey] | None = None,
    ) -> Admission:
        """Whether a pair may be given a frame, and what share of them.

        The last usable place is decided among the pairs `among`, all of the model without it.
        """
        record = self._pairs.get(pair)
        if record is None:
            return _UNKNOWN

        plain = not session and not self._refuges_heat
        if plain and record.free and record.device.free and record.backend.free:
            return ADMITTED

        others: Iterable[PairRecord]
        if among is None:
            others = self._models[record.model]
        else:
            others = [self._pairs[key] for key in among if key in self._pairs]

        answer = admit(record, session, others, least_energy=self._heats(record))
        if self.dry_run and record.ready and not record.refusal():
            would = f"dry run: would be {answer.share:.0%}, {answer.reason}"
            return Admission(True, 1.0, answer.state, would)

        return answer

    def retry_after_s(self, model: str, shapes: str, now_s: float) -> float:
        """In how many seconds a place of a model without any may be there again, at least 1."""
        untils = []
        for record in self._models.get((model, shapes), ()):
            states = (record.device.state, record.backend.state, record.state)
            shut = [state.breaker for state in states if state.breaker.phase != "closed"]
            if shut and record.ready:
                untils.append(max(breaker.until_s for breaker in shut) - now_s)

        return max(1.0, min(untils, default=1.0))

    def people_state(self, target: Target) -> PeopleState:
        """The state of a target in the words people know.

        :raises KeyError: no such target.
        """
        place = self._place(target)
        if isinstance(place, PairRecord):
            if place.on_trial():
                return "degraded"

            return verdict(place).state

        return PEOPLE[place.state.breaker.phase]

    def model_state(self, model: str, shapes: str = "") -> PeopleState:
        """The state of a model over all its pairs: normal while its best places are."""
        found = [verdict(record) for record in self._models.get((model, shapes), ())]
        order: tuple[PeopleState, ...] = ("tripped", "degraded", "recovering", "shedding")
        return next((s for s in order if any(own.state == s for own in found)), "normal")

    def events(self) -> list[Event]:
        """What happened since the last call, oldest first."""
        found = list(self._events)
        self._events.clear()
        return found

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """What persists, as JSON values: hold levels, quarantines and crash marks.

        Openness is not in it.
        """
        return snapshot(
            self._devices, self._backends, self._pairs, self._kept, self._attempts, now_s
        )

    def restore(self, kept: Mapping[str, Any], now_s: float) -> None:
        """Takes up a snapshot of an earlier life; before or after pairs are added.

        :raises ValueError: it is none.
        """
        self._kept = restore(kept, self._devices, self._backends, self.constants, now_s)
        for pair, record in self._pairs.items():
            record.state = self._kept.take(pair, record.state, now_s)
            record.look()
            self._watch(record)

    def device_state(self, device: str) -> DeviceState:
        """The state of a device, immutable."""
        return self._devices[device].state

    def backend_state(self, backend: str) -> backends.BackendState:
        """The state of a backend, immutable."""
        return self._backends[backend].state

    def pair_state(self, pair: PairKey, session: int = 0) -> PairState:
        """The state of a pair, or of what one session's limits made of it; immutable.

        :raises KeyError: no such pair, or the session has no limits of its own on it.
        """
        record = self._pairs[pair]
        return record.sessions[session].state if session else record.state
