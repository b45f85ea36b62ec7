"""One case for every row of the protocol's tables: a state, an event, what has to follow."""

from __future__ import annotations

from typing import Any, NamedTuple

from switchgear.daemon.protocol import backend, device, pair
from switchgear.daemon.protocol.backend import BackendState, Fault, Served, Suspect
from switchgear.daemon.protocol.breaker import Breaker, Phase
from switchgear.daemon.protocol.constants import Constants, report
from switchgear.daemon.protocol.device_rules import (
    DeviceState,
    Heat,
    Limits,
    Lost,
    RefugeHeats,
    Trip,
)
from switchgear.daemon.protocol.failures import Bucket, Failures
from switchgear.daemon.protocol.pair_state import (
    Aging,
    BeginTrial,
    EndTrial,
    Failure,
    Faulted,
    Frame,
    PairState,
    Rest,
    Slow,
    Trial,
    TrialChanged,
    TrialHeat,
    TripDevice,
)
from switchgear.daemon.protocol.reading import Reading, Thermometer
from switchgear.daemon.protocol.table import (
    ProbeDone,
    RefugeFrame,
    Returned,
    StartProbe,
    Table,
    Tick,
)

NOW = 10_000.0
DEFAULT = Constants()
REPORT = report()
LIMITS = Limits(65_000, 58_000, 80_000)
CPU = LIMITS._replace(is_cpu=True)
TABLES: dict[str, Table[Any]] = {
    "device": device.TABLE,
    "backend": backend.TABLE,
    "pair": pair.TABLE,
}


class Case(NamedTuple):
    """A state of `level` and an event that take the row with `guard`; `to` is the phase after.

    `actions` are the types of the actions besides the transition.
    """

    level: str
    guard: str
    state: Any
    event: NamedTuple
    to: str
    actions: tuple[type, ...] = ()
    now_s: float = NOW


def breaker(phase: Phase, **changes: Any) -> Breaker:
    """A breaker that came to its phase a second ago, and whose hold is over."""
    base = Breaker(7, phase, since_s=NOW - 1, until_s=NOW - 1, cause="heat")
    return base._replace(**changes)


def measured(celsius: float, **changes: Any) -> Thermometer:
    known = Thermometer(round(celsius * 1000), NOW, "measured", 0.0, sensor=True)
    return known._replace(**changes)


def dev(phase: Phase, celsius: float = 50.0, **changes: Any) -> DeviceState:
    base = DeviceState(
        LIMITS, DEFAULT, breaker(phase), measured(celsius), began=True, opened_mc=70_000
    )
    return base._replace(**changes)


def back(phase: Phase, **changes: Any) -> BackendState:
    return BackendState(DEFAULT, breaker(phase, cause="failure"))._replace(**changes)


def a_pair(phase: Phase, **changes: Any) -> PairState:
    base = PairState(DEFAULT, "m", 200.0, breaker=breaker(phase, cause="failure"))
    return base._replace(**changes)


def heat(celsius: float, *, slope: float = 0.0, elsewhere: bool = True) -> Heat:
    return Heat(Reading(round(celsius * 1000), "measured", 0.0, slope), elsewhere)


def slow(ms: float = 250.0) -> Frame:
    return Frame(ms, above=True, learns=False)


LEASED = {"lease": 4, "probes": 4, "lease_until_s": NOW + 1}
PROBED = (
    ("device", dev),
    ("backend", back),
    ("pair", a_pair),
)


def probing_cases() -> list[Case]:
    """The rows that every level has."""
    cases = []
    for level, make in PROBED:

        def half(make: Any = make, **changes: Any) -> Any:
            return make("half_open", breaker=breaker("half_open", **changes))

        leased = half(**LEASED)
        last = half(**LEASED, good_probes=2)
        cases += [
            Case(
                level,
                "the probe's lease is over",
                half(lease=4, probes=4, lease_until_s=NOW),
                Tick(),
                "open",
            ),
            Case(
                level,
                "no probe under way, the gap over, the device idle or waited for",
                half(),
                Tick(),
                "half_open",
                (StartProbe,),
            ),
            Case(level, "its lease, bad", leased, ProbeDone(4, False), "open"),
            Case(level, "its lease, given up", leased, ProbeDone(4, None), "half_open"),
            Case(
                level,
                "its lease, good, the last one, there is a ramp",
                last,
                ProbeDone(4, True),
                "ramping",
            ),
            Case(
                level,
                "its lease, good, the last one, there is no ramp",
                leased._replace(constants=REPORT),
                ProbeDone(4, True),
                "closed",
            ),
            Case(
                level,
                "its lease, good, not the last one",
                leased,
                ProbeDone(4, True),
                "half_open",
            ),
            Case(
                level,
                "the last step is over",
                make("ramping", breaker=breaker("ramping", ramp=2, since_s=NOW - 10)),
                Tick(),
                "closed",
            ),
            Case(
                level,
                "a step is over, not the last one",
                make("ramping", breaker=breaker("ramping", ramp=1, since_s=NOW - 10)),
                Tick(),
                "ramping",
            ),
        ]
        cases += [
            Case(
                level,
                "a hold level is left and 10 minutes are over",
                make(phase, breaker=breaker(phase, hold_level=1, stable_s=NOW - 600)),
                Tick(),
                phase,
            )
            for phase in (("closed", "shedding") if level == "device" else ("closed",))
        ]

    cases.append(
        Case(
            "device",
            "its lease, good, too warm",
            dev("half_open", 65.001, breaker=breaker("half_open", **LEASED)),
            ProbeDone(4, True),
            "open",
        )
    )
    return cases


def device_cases() -> list[Case]:
    fresh = dev("closed", began=False, thermometer=Thermometer())
    old = {"since_s": NOW - 120, "until_s": NOW + 60}
    warm = dev("open", 67.5, breaker=breaker("open", **old))
    good = dev("open", good_frames=10)
    nine = dev("open", good_frames=9)
    blind = Thermometer(60_000, NOW - 311, "lost", 0.0, sensor=True)
    dwelt = {"shed_s": NOW - 10}
    cases = [
        Case(
            "device",
            "the first temperature, above recover, no CPU",
            fresh,
            heat(58.001),
            "open",
        ),
        Case(
            "device",
            "the forecast is above trip, no CPU, another device can serve",
            dev("closed"),
            heat(64.0, slope=51.0),
            "shedding",
        ),
        Case(
            "device",
            "the CPU is above its trip",
            dev("closed", limits=CPU),
            heat(65.001),
            "shedding",
        ),
        Case(
            "device",
            "the dwell is over, the forecast is above trip, a step is left",
            dev("shedding", shed=1, **dwelt),
            heat(65.001),
            "shedding",
        ),
        Case(
            "device",
            "the dwell is over, below the exit band, the first step",
            dev("shedding", shed=1, **dwelt),
            heat(61.9),
            "closed",
        ),
        Case(
            "device",
            "the dwell is over, below the exit band, a later step",
            dev("shedding", shed=2, **dwelt),
            heat(61.9),
            "shedding",
        ),
        Case(
            "device",
            "no reading for 5 minutes",
            dev("shedding", shed=1, thermometer=blind),
            Tick(),
            "closed",
        ),
        Case("device", "above trip", dev("half_open"), heat(65.001), "open"),
        Case(
            "device",
            "the hold over, cool, the frames good or waived",
            good,
            heat(57.999),
            "half_open",
        ),
        Case(
            "device",
            "the hold over, cool, the frames good or waived",
            good,
            Tick(),
            "half_open",
        ),
        Case(
            "device",
            "120 s after the load left, not 3 °C cooler",
            warm,
            heat(67.001),
            "open",
            (RefugeHeats,),
        ),
        Case(
            "device",
            "120 s after the load left, not 3 °C cooler",
            warm,
            Tick(),
            "open",
            (RefugeHeats,),
        ),
        Case(
            "device",
            "with it the frames are good, the hold over, cool",
            nine,
            RefugeFrame(True),
            "half_open",
        ),
        Case("device", "otherwise", nine, RefugeFrame(False), "open"),
    ]
    phases: tuple[Phase, ...] = ("closed", "shedding", "open", "half_open", "ramping")
    for phase in phases:
        state = dev(phase, shed=1 if phase == "shedding" else 0, good_frames=0, shed_s=NOW)
        cases.append(Case("device", "otherwise", state, heat(60.0), phase))
        if phase in ("closed", "shedding", "ramping"):
            slow_guard = "no CPU, another device can serve"
            cases.append(Case("device", slow_guard, state, Trip(True), "open"))
            cases.append(Case("device", "no CPU", state, Returned("slept"), "half_open"))
        else:
            cases.append(Case("device", "", state, Returned("slept"), phase))

        if phase != "open":
            cases.append(Case("device", "no CPU", state, Lost("vulkan:-4"), "open"))

    return cases


def backend_cases() -> list[Case]:
    two = Failures(2, ("other",), (Bucket(int(NOW / 5), 0, 2),))
    canary = back("closed", canary=True, breaker=breaker("closed", **LEASED))
    over = back("closed", canary=True, breaker=breaker("closed", lease=4, lease_until_s=NOW))
    return [
        Case(
            "backend",
            "a crash, and another model crashed it in the last 10 minutes",
            back("closed", crashed="other", crashed_s=NOW - 600),
            Fault("crash", "m"),
            "open",
        ),
        Case(
            "backend",
            "enough in a row or in the window, of two models",
            back("closed", failures=two),
            Fault("error", "m"),
            "open",
        ),
        Case("backend", "otherwise", back("closed"), Fault("error", "m"), "closed"),
        Case("backend", "", back("ramping"), Fault("hang", "m"), "open"),
        Case("backend", "", back("closed", failures=two), Served(), "closed"),
        Case("backend", "", back("closed"), Suspect(), "closed"),
        Case("backend", "the canary's lease is over", over, Tick(), "open"),
        Case(
            "backend",
            "a canary is wanted and none is under way",
            back("closed", canary=True),
            Tick(),
            "closed",
            (StartProbe,),
        ),
        Case("backend", "its lease, bad", canary, ProbeDone(4, False), "open"),
        Case("backend", "its lease, good or given up", canary, ProbeDone(4, True), "closed"),
        Case("backend", "the hold is over", back("open"), Tick(), "half_open"),
        Case("backend", "", back("closed"), Returned("there"), "half_open"),
        Case("backend", "", back("ramping"), Returned("there"), "half_open"),
    ]


def pair_cases() -> list[Case]:
    two = {"streak": 2, "streak_s": NOW - 1}
    one_slow = Trial("running", NOW + 10, 70_000, NOW + 50, slow=1)
    running = Trial("running", NOW, 70_000, NOW + 50)
    failed = Failures(2, ("m",), (Bucket(int(NOW / 5), 0, 2),))
    rest_guard = "the hold is over; for slowness also cool, the frames good or waived"
    cases = [
        Case("pair", "", a_pair("open"), RefugeFrame(True), "open"),
        Case("pair", rest_guard, a_pair("open"), Rest(True), "half_open"),
        Case("pair", rest_guard, a_pair("quarantined"), Rest(True), "half_open"),
        Case(
            "pair",
            "an error or a hang",
            a_pair("closed"),
            Failure("error", ""),
            "closed",
        ),
        Case(
            "pair",
            "an error or a hang, enough in a row or in the window",
            a_pair("closed", failures=failed),
            Failure("hang", ""),
            "open",
            (Faulted,),
        ),
        Case(
            "pair",
            "an error or a hang",
            a_pair("ramping"),
            Failure("error", ""),
            "open",
            (Faulted,),
        ),
    ]
    for phase in ("closed", "ramping"):
        cases += _live_pair_cases(phase, two, one_slow, running)

    phases: tuple[Phase, ...] = ("closed", "ramping", "half_open", "open", "quarantined")
    for phase in phases:
        cases.append(Case("pair", "", a_pair(phase), Returned("slept"), phase))
        cases.append(
            Case("pair", "there is a trial", a_pair(phase, trial=running), EndTrial(), phase)
        )
        if phase != "quarantined":
            cases.append(
                Case(
                    "pair",
                    "a crash, wrong numbers, or unsupported",
                    a_pair(phase),
                    Failure("wrong", ""),
                    "quarantined",
                    (Faulted,),
                )
            )

    return cases


def _live_pair_cases(
    phase: Phase, two: dict[str, Any], one_slow: Trial, running: Trial
) -> list[Case]:
    state = a_pair(phase)
    trial = a_pair(phase, trial=one_slow)
    first = Frame(900.0, above=True, learns=False, first_use=True)
    return [
        Case("pair", "first use", state, first, phase),
        Case(
            "pair",
            "a trial, slow, the second in a row",
            trial,
            slow(),
            phase,
            (TrialChanged,),
        ),
        Case(
            "pair",
            "a trial, slow, the first in a row",
            a_pair(phase, trial=running),
            slow(),
            phase,
        ),
        Case(
            "pair",
            "slow, above trip, enough in a row",
            a_pair(phase, **two),
            slow(200.1),
            phase,
            (TripDevice,),
        ),
        Case("pair", "slow, above trip", state, slow(200.1), phase),
        Case("pair", "otherwise", state, slow(200.0), phase),
        Case(
            "pair",
            "above trip, its age makes the slow frames enough",
            a_pair(phase, **two),
            Aging(200.1, True),
            phase,
            (TripDevice,),
        ),
        Case(
            "pair",
            "above trip, its age makes it one more slow frame",
            state,
            Aging(200.1, True),
            phase,
        ),
        Case("pair", "", state, Slow(), "open"),
        Case(
            "pair",
            "no trial under way, or one of an earlier hold",
            state,
            BeginTrial(70_000, NOW + 100),
            phase,
            (TrialChanged,),
        ),
        Case(
            "pair",
            "a trial, at or above the hard limit",
            a_pair(phase, trial=running),
            TrialHeat(80_000, 80_000),
            phase,
            (TrialChanged,),
        ),
        Case(
            "pair",
            "its time is over, the temperature has not fallen",
            a_pair(phase, trial=running),
            TrialHeat(70_000, 80_000),
            phase,
            (TrialChanged,),
        ),
        Case(
            "pair",
            "its time is over",
            a_pair(phase, trial=running),
            TrialHeat(69_999, 80_000),
            phase,
            (TrialChanged,),
        ),
    ]


CASES = [*probing_cases(), *device_cases(), *backend_cases(), *pair_cases()]
