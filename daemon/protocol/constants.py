"""The protocol's numbers, each once: name, default, unit and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple

_NEVER: Final = float("inf")
_REPORT: Final = "the field report"
_OURS: Final = "chosen"


def _number(default: Any, unit: str, source: str = _OURS) -> Any:
    return field(default=default, metadata={"unit": unit, "source": source})


@dataclass(frozen=True, slots=True)
class Constants:
    """`Constants()` is the default protocol, `report()` the field report's to the letter."""

    # Trip
    trip_mc: int = _number(65_000, "m°C", f"{_REPORT}; a device's own threshold goes first")
    trip_frames: int = _number(3, "frames", _REPORT)
    slow_ms: float = _number(200.0, "ms", f"{_REPORT}; until a pair's own median is known")
    auto_limits: bool = _number(True, "", "limits that follow the model's own pace")
    slow_factor: float = _number(1.5, "x median", "throttled phones are 1.6 to 2.3 x slower")
    noise_ms: float = _number(
        5.0, "ms", "a scheduler's tick at 250 Hz and a bit: so much more is no slowness"
    )
    learn_frames: int = _number(100, "frames", "a median that one hiccup does not move")
    streak_expiry_s: float = _number(10.0, "s", "a slow frame of long ago says nothing")

    # Failures
    failures: int = _number(3, "failures", "as many as slow frames")
    failure_window_s: float = _number(30.0, "s")
    failure_minimum: int = _number(20, "frames", "below it a share is chance")
    failure_share: float = _number(0.5, "")
    failure_hold_s: float = _number(120.0, "s", "the hold of heat")
    lost_hold_s: float = _number(
        10.0, "s", "a restarted driver is proven by probes, not by rest"
    )
    quarantine_s: float = _number(86_400.0, "s", "one attempt a day at a driver that crashed")
    crash_memory_s: float = _number(600.0, "s", "two models within it accuse the backend")

    # Recover
    recover_below_mc: int = _number(7_000, "m°C", f"{_REPORT}: 65 and 58 °C")
    recover_frames: int = _number(10, "frames", _REPORT)
    recover_factor: float = _number(1.2, "x median", "the refuge runs at its usual pace")
    recover_known_frames: int = _number(10, "frames", "as many as must be good")
    recover_ms: float | None = _number(None, "ms", "none: `recover_factor` decides")
    recover_inclusive: bool = _number(True, "", "at the limit is good enough")
    waive_holds: float = _number(3.0, "holds", "a refuge that is never fast enough")
    idle_holds: float = _number(1.0, "holds", "without traffic no frame can be good")
    refuge_s: float = _number(120.0, "s", "the time constant of a die and its board")
    refuge_cooler_mc: int = _number(3_000, "m°C", "more than noise and quantum of a sensor")
    refuge_faster: bool = _number(
        True, "", "slow frames are no reason to go where it is slower"
    )
    refuge_share: float = _number(1 / 4, "of frames", "what a hot device may still be given")
    start_open: bool = _number(True, "", "a device that is warm at the start was in use")
    reserve: bool = _number(True, "", "closed for heat, it has what is late everywhere else")

    # Hold
    hold_s: float = _number(120.0, "s", "time constants of 20 to 60 s, twice over")
    hold_max_s: float = _number(1_800.0, "s", "the length of the field report's run")
    jitter: float = _number(0.1, "of the hold", "devices that tripped together part")
    retrip_s: float = _number(600.0, "s", "a trip so soon after closing doubles the hold")
    stable_s: float = _number(600.0, "s", "so long without a trip halves the hold")

    # Probes and ramp
    good_probes: int = _number(3, "probes", "as many as slow frames")
    lease_s: float = _number(2.0, "s", "ten slow frames")
    probe_gap_s: float = _number(1.0, "s", "a probe must not heat what it probes")
    probe_busy_s: float = _number(10.0, "s", "waits so long for the device to be idle")
    ramp_shares: tuple[float, ...] = _number((1 / 8, 1 / 2, 1.0), "of frames")
    ramp_step_s: float = _number(10.0, "s", "one step shows itself at the sensor")

    # Shedding
    shedding: bool = _number(True, "", "load moves before the frame rate drops")
    shed_shares: tuple[float, ...] = _number((3 / 4, 1 / 2, 1 / 4, 1 / 8), "of frames")
    shed_horizon_s: float = _number(20.0, "s", "a block's time constant")
    shed_dwell_s: float = _number(10.0, "s", "one step shows itself at the sensor")
    shed_exit_mc: int = _number(3_000, "m°C", "a band: noise must not flip it")

    # Degrade
    degrade_backends: tuple[str, ...] = _number(("npu",), "", _REPORT)
    degrade_codes: tuple[str, ...] = _number(
        ("nnapi:4", "nnapi:5", "errno:-12", "errno:95"),
        "domain:code",
        "what NPU drivers say for `unsupported`",
    )
    refuge_backend: str = _number("opencl", "", _REPORT)
    refuge_precision: str = _number("int4", "", _REPORT)
    degrade_always: bool = _number(False, "", "only where it is faster than the CPU")
    trial: bool = _number(True, "", "INT4 loads the GPU that was hot")
    trial_s: float = _number(30.0, "s")
    trial_frames: int = _number(2, "frames", "slow frames that end it")
    hard_limit_mc: int = _number(80_000, "m°C", "below what phones call severe (95 °C)")
    hard_below_passive_mc: int = _number(5_000, "m°C", "below the kernel's own throttling")

    # Readings
    sensor_hold_s: float = _number(10.0, "s", "a sensor that sleeps wakes by then")
    sensor_warm_s: float = _number(300.0, "s", "any device cools in it")

    def __post_init__(self) -> None:
        if self.trip_frames < 1 or self.failures < 1 or self.good_probes < 1:
            raise ValueError("trip_frames, failures and good_probes are at least 1")

        if self.hold_max_s < max(self.hold_s, self.failure_hold_s, self.lost_hold_s):
            raise ValueError("hold_max_s is below a hold")

    def recover_mc(self, trip_mc: int) -> int:
        """The recover temperature that belongs to a trip temperature, both in m°C."""
        return trip_mc - self.recover_below_mc

    def hard_limit(self, passive_trip_mc: int | None) -> int:
        """Where an INT4 trial ends, in m°C, given the kernel's passive trip of the device."""
        if passive_trip_mc is None:
            return self.hard_limit_mc

        return passive_trip_mc - self.hard_below_passive_mc


class Described(NamedTuple):
    """One constant, for people."""

    name: str
    default: Any
    report: Any
    unit: str
    source: str


def report() -> Constants:
    """The field report's rules to the letter: no holds, no ramps, no shedding, no auto limits.

    What the report is silent on (failures, first-use frames, the last backend) stays.
    """
    return Constants(
        auto_limits=False,
        streak_expiry_s=_NEVER,
        recover_ms=120.0,
        recover_inclusive=False,
        waive_holds=_NEVER,
        idle_holds=_NEVER,
        refuge_s=_NEVER,
        start_open=False,
        hold_s=0.0,
        jitter=0.0,
        good_probes=1,
        ramp_shares=(),
        shedding=False,
        reserve=False,
        refuge_faster=False,
        degrade_always=True,
        trial=False,
    )


def table() -> tuple[Described, ...]:
    """Every constant with its two values, unit and source."""
    default, literal = Constants(), report()
    return tuple(
        Described(
            item.name,
            getattr(default, item.name),
            getattr(literal, item.name),
            item.metadata["unit"],
            item.metadata["source"],
        )
        for item in fields(Constants)
    )
