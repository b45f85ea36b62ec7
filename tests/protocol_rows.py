"""One case for every row of the protocol's tables: a state, an event, what has to follow."""

from __future__ import annotations

from typing import Any

from protocol_case import (
    CPU,
    NOW,
    REPORT,
    Case,
    a_pair,
    back,
    breaker,
    dev,
    heat,
)
from protocol_pair_rows import pair_cases

from switchgear.daemon.protocol.backend import Fault, Served, Suspect
from switchgear.daemon.protocol.breaker import Phase
from switchgear.daemon.protocol.device_rules import (
    Lost,
    RefugeHeats,
    Trip,
)
from switchgear.daemon.protocol.failures import Bucket, Failures
from switchgear.daemon.protocol.reading import Thermometer
from switchgear.daemon.protocol.table import (
    ProbeDone,
    RefugeFrame,
    Returned,
    StartProbe,
    Tick,
)

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


CASES = [*probing_cases(), *device_cases(), *backend_cases(), *pair_cases()]
