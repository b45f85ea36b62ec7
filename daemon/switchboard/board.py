"""Chooses for each request, and tells the protocol what became of it.

Made once it is known which backends run here; until then the router's fixed order holds.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from switchgear.daemon.protocol.answers import ADMITTED
from switchgear.daemon.protocol.machine import Protocol
from switchgear.daemon.protocol.topology import PairKey, SessionLimits, Target
from switchgear.daemon.request import Second
from switchgear.daemon.routing.candidate import Candidate, Context
from switchgear.daemon.routing.choice import Inputs, choose
from switchgear.daemon.routing.estimates import EnergyEstimate, ServiceEstimate
from switchgear.daemon.routing.policies import policy_of
from switchgear.daemon.routing.ring import DecisionRing
from switchgear.daemon.routing.scores import RESERVE_SHARE
from switchgear.daemon.switchboard.place import Place, Row, Seat
from switchgear.daemon.switchboard.topology import device_of
from switchgear.ipc.errors import DOMAIN_NAMES
from switchgear.ipc.record import NO_READING, Precision, Priority, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from switchgear.daemon.config import Configuration
    from switchgear.daemon.lane import Lane
    from switchgear.daemon.model import Model
    from switchgear.daemon.pair import Pair
    from switchgear.daemon.protocol.answers import Admission, Event
    from switchgear.daemon.protocol.reading import Reading
    from switchgear.daemon.request import Request
    from switchgear.daemon.router import Target as RouterTarget
    from switchgear.daemon.session import Session
    from switchgear.daemon.switchboard.topology import Heat, Part
    from switchgear.daemon.thermal.watch import ThermalWatch

# What a part draws while it is busy, in watts, where nothing measures it: shapes follow the
# field report (an NPU takes 40 % less energy than a GPU for the same work).
BUSY_W: Final = {"cpu": 4.0, "gpu": 6.0, "npu": 2.5}
KEPT_OWNERS: Final = 4096
_LOW: Final = int(Priority.BATCH)
_DEGRADED: Final = int(Reason.DEGRADED)
# Codes that say that the device is gone, by domain.
DEVICE_LOST: Final = frozenset({("vulkan", -4), ("litert", -4)})
_TRIALS: Final = ("running", "passed")

log = logging.getLogger(__name__)


class Switchboard:
    """Owns the protocol, the estimates and the ring of decisions. Nothing here blocks."""

    def __init__(
        self,
        configuration: Configuration,
        protocol: Protocol,
        parts: Mapping[str, Part],
        heats: Mapping[str, Heat],
        watch: ThermalWatch,
        on_event: Callable[[Event], None],
    ) -> None:
        self.protocol = protocol
        self.parts = dict(parts)
        self.heats = dict(heats)
        self.watch = watch
        self.ring = DecisionRing()
        self._on_event = on_event
        self._default_policy = policy_of(configuration.routing.policy)
        self._least_energy = policy_of("max_efficiency")
        self._busy_w = {**BUSY_W, **configuration.routing.busy_w}
        self._places: dict[PairKey, Place] = {}
        # The protocol's last word against each pair.
        self._causes: dict[PairKey, str] = {}
        self._headroom_c: dict[str, float] = {}
        # Of the device's case, which every part heats.
        self.case_headroom_c = inf
        # Hears of each run that ended well.
        self.on_run: Callable[[Place], None] | None = None
        # Of a device, or of a place by its label: `measured (powercap)`, `modelled`.
        self.energy_source: Callable[[str], str] = lambda _name: "modelled"
        # The user and the model of each session by its number, and of the last that ended: as
        # many as the ring has decisions.
        self._owners: dict[int, tuple[int, str]] = {}
        self._ended: OrderedDict[int, tuple[int, str]] = OrderedDict()
        self._devices = {backend: part.name for backend, part in self.parts.items()}

    # Backends and pairs.

    def add_backend(self, backend: str, part: Part, heat: Heat) -> None:
        """A backend that came later, on a part that may be known."""
        self.heats.setdefault(part.name, heat)
        self.protocol.add_backend(backend, device_of(part, self.heats[part.name]))
        self.parts[backend] = part
        self._devices[backend] = part.name

    def add_model(self, model: Model) -> None:
        """The CPU's pair of a model, and those that are ready."""
        self._add(model, "cpu", "auto", model.run_us / 1000)
        for pair in model.pairs.values():
            if pair.ready:
                self.add_pair(model, pair)

    def add_pair(self, model: Model, pair: Pair) -> None:
        """A pair that was prepared; its check's runs are its first estimate."""
        run_ms = pair.figures.get("run_us", 0) / 1000
        self._add(model, pair.backend, pair.precision, run_ms, fresh=pair.fresh)

    def _add(
        self, model: Model, backend: str, precision: str, run_ms: float, *, fresh: bool = False
    ) -> None:
        part = self.parts.get(backend)
        key = PairKey(model.digest, backend, precision)
        if fresh:
            # What held against it was before this check; it is probed before it serves.
            self.protocol.release(key, monotonic())

        if part is None or key in self._places:
            return

        estimate = ServiceEstimate(max(run_ms, 0.001), "the runs of its check")
        # Measured when the device was cool: what it comes back to.
        estimate.observe(max(run_ms, 0.001), monotonic())
        energy = EnergyEstimate(self._busy_w.get(part.name, self._busy_w[part.kind]))
        self._places[key] = Place(key, part.name, part.kind, estimate, energy)
        self.protocol.add_pair(key, now_s=monotonic())

    def drop_model(self, digest: str) -> None:
        """Forgets a model that was unloaded; quarantines are kept."""
        for key in [key for key in self._places if key.model == digest]:
            del self._places[key]
            self._causes.pop(key, None)
            self.protocol.remove_pair(key)

    def estimate_ms(self, key: PairKey) -> float | None:
        """The expected run time of a pair, for the protocol."""
        place = self._places.get(key)
        return None if place is None else place.estimate.median_ms

    # Sessions.

    def seat(self, session: Session) -> Seat:
        """A session's places; made anew whenever its targets change, its memory is kept."""
        options, digest = session.options, session.model.digest
        rows = []
        for target in session.targets:
            # Not the pair's: it may have been prepared in another meanwhile.
            number = target.precision
            precision = "auto" if target.pair is None else Precision(number).name.lower()
            place = self._places.get(PairKey(digest, target.backend, precision))
            if place is not None:
                rows.append(Row(target, place))

        limits = None
        if options.slow_ms or options.recover_ms:
            limits = SessionLimits(
                session.identity, options.slow_ms or None, options.recover_ms or None
            )

        self._owners[session.identity] = (session.peer.uid, digest)
        known = session.seat
        context = known.context if known is not None else Context()
        context.requested = len(options.backends) == 1
        context.pinned = rows[0].candidate.key if session.model.state and rows else ""
        policy = policy_of(options.policy) if options.policy else self._default_policy
        wants_int4 = options.precision == "int4"
        return Seat(
            rows,
            policy,
            context,
            limits,
            wants_int4=wants_int4,
            hedges=options.hedge and not session.model.state,
        )

    def owner_of(self, session: int) -> int | None:
        """The user of a session by its number, though it may have ended."""
        owner = self._owners.get(session) or self._ended.get(session)
        return owner[0] if owner is not None else None

    def causes_of(self, session: int) -> dict[str, str]:
        """The protocol's last word against each place of a session's model, by its label."""
        owner = self._owners.get(session) or self._ended.get(session)
        digest = owner[1] if owner is not None else ""
        return {
            f"{key.backend}/{key.precision}": cause
            for key, cause in self._causes.items()
            if key.model == digest
        }

    def drop_session(self, session: Session) -> None:
        owner = self._owners.pop(session.identity, None)
        if owner is not None:
            self._ended[session.identity] = owner
            if len(self._ended) > KEPT_OWNERS:
                self._ended.popitem(last=False)

        if session.seat is not None and session.seat.limits is not None:
            self.protocol.drop_session(session.identity)

    # Requests.

    def choose(self, session: Session, seat: Seat, request: Request) -> Row | None:
        """Where a request runs; sets its reason, the age of the temperature and, where the
        session hedges, a second place. None where no backend may have it."""
        now_s = request.arrival_ns / 1e9
        protocol = self.protocol
        number = session.identity << 32 | request.identity & 0xFFFFFFFF
        sole = seat.sole
        if sole is not None and protocol.admit(seat.rows[0].place.key, now_s) is ADMITTED:
            # Nothing to choose, and nothing that the protocol would learn from its frames.
            common, verdict = sole
            row = seat.rows[0]
            row.candidate.headroom_c = self._headroom_c.get(row.place.device, inf)
            known = (row.candidate.row(now_s),)
            inputs = (
                *(now_s, seat.policy.number, _limit_ms(request)),
                *common,
                *(self.case_headroom_c, known),
            )
            self.ring.add(number, _new_inputs(Inputs, inputs), verdict)
            request.reason = verdict[1]
            return row

        policy = seat.policy
        rows: list[Row] = []
        candidates: list[Candidate] = []
        own = session.identity if seat.limits is not None else 0
        among = None
        if own or len(session.options.backends) < len(self.parts):
            among = [row.place.key for row in seat.rows]

        for row in seat.rows:
            if not row.target.is_warm(session):
                continue

            place, candidate = row.place, row.candidate
            if not self._may_have(seat, place):
                continue

            answer = protocol.admit(place.key, now_s, session=own, among=among)
            candidate.share = self._share(answer, request)
            candidate.state = answer.state
            if answer.reason:
                self._causes[place.key] = answer.reason

            candidate.headroom_c = self._headroom_c.get(place.device, inf)
            if answer.least_energy:
                policy = self._least_energy

            rows.append(row)
            candidates.append(candidate)

        context = seat.context
        context.limit_ms = _limit_ms(request)
        context.case_headroom_c = self.case_headroom_c
        context.explore = all(row.target.lane.is_idle for row in rows)
        context.hedge = seat.hedges and session.may_hedge
        verdict = choose(candidates, policy, context, now_s, self.ring, number)
        if verdict.chosen < 0:
            return None

        chosen = rows[verdict.chosen]
        request.reason = verdict.reason
        if chosen.place.int4 and not seat.wants_int4:
            request.reason = _DEGRADED

        request.place = chosen.place
        request.temperature_age_ms = self._age_ms(chosen.place.device, now_s)
        if verdict.hedge >= 0:
            target, place = rows[verdict.hedge].target, rows[verdict.hedge].place
            age_ms = self._age_ms(place.device, now_s)
            request.second = Second(target.lane, target.precision, place, age_ms)

        return chosen

    @staticmethod
    def _share(answer: Admission, request: Request) -> float:
        low = request.priority == _LOW
        if answer.shed_low and low:
            return 0.0

        # Low priorities are what heat takes first: nothing is in reserve for them.
        if answer.reserve and not low and request.deadline_ns < _FAR_NS:
            return RESERVE_SHARE

        return answer.share if answer.allowed else 0.0

    def _may_have(self, seat: Seat, place: Place) -> bool:
        """The INT4 variant stands in for the NPU only, but where it was asked for."""
        if not place.int4 or seat.wants_int4:
            return True

        return self.protocol.pair_state(place.key).trial.phase in _TRIALS

    def admits(self, session: Session, target: RouterTarget, request: Request) -> bool:
        """Whether a request may wait for a place whose worker is not ready; it gets it then."""
        seat = session.seat
        row = next((r for r in seat.rows if r.target is target), None) if seat else None
        if seat is None or row is None or not self._may_have(seat, row.place):
            return False

        own = session.identity if seat.limits is not None else 0
        among = [other.place.key for other in seat.rows]
        answer = self.protocol.admit(row.place.key, monotonic(), session=own, among=among)
        if not answer.allowed or self._share(answer, request) <= 0:
            return False

        request.place, request.reason = row.place, int(Reason.ONLY_READY)
        return True

    def _age_ms(self, device: str, now_s: float) -> int:
        if device not in self._headroom_c:
            return NO_READING

        reading = self.watch.reading(device, now_s)
        return NO_READING if reading.temperature_mc is None else max(0, int(reading.age_ms))

    def elsewhere(
        self, session: Session, seat: Seat, request: Request, lane: Lane
    ) -> Row | None:
        """The earliest other place for a request that failed in `lane`."""
        now_s = monotonic()
        best, best_ms = None, inf
        for row in seat.rows:
            other = row.target.lane
            if other is lane or request.tried >> other.number & 1:
                continue

            if not self._may_have(seat, row.place):
                continue

            admitted = self.protocol.admit(row.place.key, now_s)
            if row.target.is_warm(session) and admitted.allowed:
                done_ms = other.wait_ms(now_s) + row.place.estimate.expected_ms(now_s)
                if done_ms < best_ms:
                    best, best_ms = row, done_ms

        if best is not None:
            request.place = best.place

        return best

    def retry_after_ms(self, session: Session) -> int:
        """When a session without any place may find one again."""
        digest = session.model.digest
        return int(self.protocol.retry_after_s(digest, "", monotonic()) * 1000)

    # What became of them.

    def answered(self, lane: Lane, request: Request, run_ns: int, now_ns: int) -> None:
        """A run ended well."""
        place = request.place
        if place is None or lane.worker is None:
            return

        if request.blame is not None:
            self._blame(request.blame)
            request.blame = None

        if self.on_run is not None:
            self.on_run(place)

        now_s, run_ms = now_ns / 1e9, run_ns / 1e6
        first = place.is_first_use(lane.worker.pid)
        if not first:
            place.estimate.observe(run_ms, now_s)

        seat = request.session.seat
        limits = seat.limits if seat is not None else None
        self.protocol.frame(place.key, run_ms, now_s, first_use=first, session_limits=limits)

    def failed(self, lane: Lane, request: Request, domain: int, code: int) -> None:
        """A driver gave an error to a run. It counts once the same request was answered
        elsewhere: what fails there too is the caller's doing. On the CPU it always is."""
        place = request.place
        if place is not None and not place.is_cpu:
            request.blame = (place.key, DOMAIN_NAMES.get(domain, ""), code)

        log.info("%s failed a request: %s:%d", lane.label, DOMAIN_NAMES.get(domain), code)

    def _blame(self, blame: tuple[PairKey, str, int]) -> None:
        key, name, code = blame
        kind: Any = "device_lost" if (name, code) in DEVICE_LOST else "error"
        self.protocol.failure(key, kind, name, code, monotonic())
        self.tell()

    def died(self, lane: Lane, request: Request, reason: str) -> None:
        """A worker ended with a run in it. The CPU's deaths are counted by its lane: there is
        nothing behind it, so that one alone takes no model away."""
        place = request.place
        if place is not None and not place.is_cpu:
            kind: Any = "hang" if reason.startswith("hung") else "crash"
            self.protocol.failure(place.key, kind, "signal", 0, monotonic(), reason[:200])
            self.tell()

        log.info("%s died in a request: %s", lane.label, reason)

    def heard(self, device: str, reading: Reading, now_s: float) -> None:
        """A new reading of a device that is followed."""
        heat = self.heats.get(device)
        if heat is not None and reading.temperature_mc is not None:
            self._headroom_c[device] = (heat.trip_mc - reading.temperature_mc) / 1000
        else:
            self._headroom_c.pop(device, None)

        self.protocol.reading(device, reading, now_s)

    def resumed(self, now_s: float) -> None:
        self.protocol.resumed(now_s)

    def age(self, lanes: list[Lane], now_s: float) -> set[str]:
        """Tells the protocol of runs in flight; returns the devices that are busy."""
        busy = set()
        for lane in lanes:
            head = lane.head
            if head is None:
                continue

            busy.add(self._devices.get(lane.backend, lane.backend))
            request, age_ms = head
            place, worker = request.place, lane.worker
            if place is None or worker is None or not place.was_used(worker.pid):
                continue

            seat = request.session.seat
            limits = seat.limits if seat is not None else None
            self.protocol.aging(place.key, age_ms, now_s, session_limits=limits)

        return busy

    def tell(self) -> None:
        """Passes on what the protocol did since the last call."""
        for event in self.protocol.events():
            log.warning("%s", event)
            self._on_event(event)

    # For people.

    def backend_state(self, backend: str) -> str:
        """normal, shedding, tripped, degraded or recovering: the backend's own, else the
        device's; empty for one that is not there."""
        if backend not in self.parts:
            return ""

        own = self.protocol.people_state(Target("backend", backend))
        device = self.protocol.people_state(Target("device", self._devices[backend]))
        return own if own != "normal" else device

    def device_state(self, device: str) -> str:
        """Of a device by its name, in the words people know."""
        return self.protocol.people_state(Target("device", device))

    def pair_state(self, digest: str, backend: str, precision: str) -> str:
        key = PairKey(digest, backend, precision)
        if key not in self._places:
            return ""

        return self.protocol.people_state(Target("pair", key))


# A request without a deadline has one this far away; see `request.NO_DEADLINE`.
_FAR_NS: Final = 2**62


def _limit_ms(request: Request) -> float:
    """From its arrival to its deadline; 0 without one."""
    if request.deadline_ns >= _FAR_NS:
        return 0.0

    return (request.deadline_ns - request.arrival_ns) / 1e6


_new_inputs = tuple.__new__
