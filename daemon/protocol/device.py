"""The device level: heat and a lost device, so that every API of a part heats and rests as one.

`step(state, event, now_s)` is pure. Temperatures are m°C, times monotonic seconds.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from switchgear.daemon.protocol import device_rules as rules
from switchgear.daemon.protocol.device_rules import (
    DeviceState,
    Heat,
    Lost,
    Trip,
    warmth_of,
)
from switchgear.daemon.protocol.probing import probing_rows
from switchgear.daemon.protocol.reading import Warmth
from switchgear.daemon.protocol.table import (
    NOTHING,
    SAME,
    Actions,
    RefugeFrame,
    Returned,
    Row,
    Table,
    Tick,
)

_LIVE: Final = ("closed", "shedding", "ramping")

TABLE: Final[Table[DeviceState]] = Table(
    "device",
    [
        Row(
            ("closed",),
            Heat,
            "the first temperature, above recover, no CPU",
            rules.starts_warm,
            "open",
            "it is warm at the start",
            lambda s, e, now_s: rules.leave(rules.read(s, e, now_s), now_s, "heat"),
        ),
        Row(
            ("closed",),
            Heat,
            "the forecast is above trip, no CPU, another device can serve",
            rules.will_trip,
            "shedding",
            "the temperature rises towards the trip",
            rules.shed,
        ),
        Row(
            ("closed",),
            Heat,
            "the CPU is above its trip",
            rules.cpu_too_warm,
            "shedding",
            "the CPU is too warm: lower priorities wait",
            rules.shed,
        ),
        Row(
            ("shedding",),
            Heat,
            "the dwell is over, the forecast is above trip, a step is left",
            lambda s, e, now_s: (
                rules.dwelt(s, now_s)
                and rules.will_trip(s, e, now_s)
                and s.shed < len(s.constants.shed_shares)
            ),
            SAME,
            "the temperature still rises towards the trip",
            rules.shed,
        ),
        Row(
            ("shedding",),
            Heat,
            "the dwell is over, below the exit band, the first step",
            lambda s, e, now_s: (
                rules.dwelt(s, now_s) and rules.cools(s, e, now_s) and s.shed == 1
            ),
            "closed",
            "the temperature is below the exit band",
            rules.unshed,
        ),
        Row(
            ("shedding",),
            Heat,
            "the dwell is over, below the exit band, a later step",
            lambda s, e, now_s: rules.dwelt(s, now_s) and rules.cools(s, e, now_s),
            SAME,
            "the temperature is below the exit band",
            rules.unshed,
        ),
        Row(
            ("shedding",),
            Tick,
            "no reading for 5 minutes",
            lambda s, e, now_s: warmth_of(s, now_s) is Warmth.NONE,
            "closed",
            "without a sensor latency alone decides",
            rules.blind,
        ),
        Row(
            ("half_open",),
            Heat,
            "above trip",
            lambda s, e, now_s: rules.too_warm(rules.read(s, e, now_s), now_s),
            "open",
            "it is above its trip again",
            lambda s, e, now_s: rules.reopened(rules.read(s, e, now_s), now_s),
        ),
        Row(
            ("open",),
            Heat,
            "the hold over, cool, the frames good or waived",
            lambda s, e, now_s: rules.recovers(rules.read(s, e, now_s), now_s),
            "half_open",
            "cool, and the frames are good",
            lambda s, e, now_s: rules.half_open(rules.read(s, e, now_s), now_s),
        ),
        Row(
            ("open",),
            Heat,
            "120 s after the load left, not 3 °C cooler",
            lambda s, e, now_s: rules.stays_warm(rules.read(s, e, now_s), now_s),
            SAME,
            "its refuge does not let it cool",
            lambda s, e, now_s: rules.heats(rules.read(s, e, now_s), now_s),
        ),
        Row(
            ("closed", "shedding", "open", "half_open", "ramping"),
            Heat,
            "otherwise",
            None,
            SAME,
            "the reading is kept",
            rules.stored,
        ),
        Row(
            _LIVE,
            Trip,
            "no CPU, another device can serve",
            lambda s, e, now_s: e.elsewhere and not s.limits.is_cpu,
            "open",
            "slow frames while it was warm",
            lambda s, e, now_s: rules.leave(s, now_s, "heat"),
        ),
        Row(
            ("closed", "shedding", "half_open", "ramping"),
            Lost,
            "no CPU",
            lambda s, e, now_s: not s.limits.is_cpu,
            "open",
            "the device is lost",
            lambda s, e, now_s: rules.leave(s, now_s, "lost"),
        ),
        Row(
            ("open",),
            RefugeFrame,
            "with it the frames are good, the hold over, cool",
            lambda s, e, now_s: rules.recovers(rules.framed(s, e, now_s), now_s),
            "half_open",
            "cool, and the frames are good",
            lambda s, e, now_s: rules.half_open(rules.framed(s, e, now_s), now_s),
        ),
        Row(
            ("open",),
            RefugeFrame,
            "otherwise",
            None,
            SAME,
            "the frame is counted",
            lambda s, e, now_s: (rules.framed(s, e, now_s), NOTHING),
        ),
        Row(
            ("open",),
            Tick,
            "the hold over, cool, the frames good or waived",
            lambda s, e, now_s: rules.recovers(s, now_s),
            "half_open",
            "cool, and the frames are good",
            lambda s, e, now_s: rules.half_open(s, now_s),
        ),
        Row(
            ("open",),
            Tick,
            "120 s after the load left, not 3 °C cooler",
            lambda s, e, now_s: rules.stays_warm(s, now_s),
            SAME,
            "its refuge does not let it cool",
            lambda s, e, now_s: rules.heats(s, now_s),
        ),
        Row(
            ("open", "half_open"),
            Returned,
            "",
            None,
            SAME,
            "the temperature of before says nothing",
            lambda s, e, now_s: (rules.unread(s, now_s), NOTHING),
        ),
        Row(
            _LIVE,
            Returned,
            "no CPU",
            lambda s, e, now_s: not s.limits.is_cpu,
            "half_open",
            "it came back and has not answered since",
            rules.returned,
        ),
        *probing_rows(rules.put, rules.hold_s, too_warm=rules.too_warm),
    ],
)


def step(state: DeviceState, event: NamedTuple, now_s: float) -> tuple[DeviceState, Actions]:
    """The state after an event (`Heat`, `Trip`, `Lost`, `RefugeFrame`, `Tick`, `ProbeDone`,
    `Returned`) and what to do; the same state where nothing changes."""
    return TABLE.step(state, event, now_s)
