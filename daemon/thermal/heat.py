"""Whether the device is too warm to be heated further: the latest readings against its limits.

Sensors are read in a thread of its own, which ends with the process: a driver may sleep in its
read for ever, and neither the event loop nor a stop may wait for it.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Final

from switchgear.daemon.thermal.zones import Sensors, find_sensors, hottest_mc, read_sensor
from switchgear.fingerprints.devices import choose_threshold, domain_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from switchgear.fingerprints.profile import Device, PartKind, Threshold
    from switchgear.fingerprints.zones_model import Reading, Zone

# A reading is good for this long; a question after that starts the next one.
FRESH_S: Final = 1.0
# A reading this old says nothing any more: its sensor hangs.
FORGOTTEN_S: Final = 10.0
# `look` waits this long for the sensors, in as many waits: where the whole process stands still
# for one of them, the thread that reads has the others.
LOOK_LIMIT_S: Final = 2.0
LOOK_WAITS: Final = 4
KINDS: Final[tuple[PartKind, ...]] = ("cpu", "gpu", "npu")


@dataclass(frozen=True, slots=True)
class Limit:
    """A thermal domain and the temperature in degrees Celsius below which it is cool."""

    name: str
    zones: tuple[str, ...]
    cool_c: float


class Heat:
    """Reads the sensors below `root` and holds them against the recover temperatures.

    `operator_c` are throttle thresholds in degrees Celsius by device id or kind. Use it on a
    running loop. Nothing here blocks.
    """

    def __init__(self, root: Path, operator_c: Mapping[str, float]) -> None:
        self._root = root
        self._operator_c = operator_c
        self._loop = asyncio.get_running_loop()
        self._devices: Sequence[Device] = ()
        self._limits: tuple[Limit, ...] | None = None
        self._readings: tuple[Reading, ...] = ()
        self._read_at = float("-inf")
        self._reading: asyncio.Event | None = None
        # What was found at the last look, None before the first.
        self.sensors: Sensors | None = None

    def use(self, devices: Sequence[Device]) -> None:
        """Takes the domains of a profile's devices; other parts keep those of their zones."""
        self._devices = devices
        self._limits = None

    async def look(self) -> None:
        """Finds the sensors anew and waits for their readings, for 2 s at most."""
        reading = self._begin(find=True)
        for _ in range(LOOK_WAITS):
            try:
                async with asyncio.timeout(LOOK_LIMIT_S / LOOK_WAITS):
                    await reading.wait()
            except TimeoutError:
                continue

            return

        # A sensor hangs: no reading is known, which is not hot.

    def hot(self) -> str:
        """Why the device is too warm, empty while it is not, or while nothing is known."""
        age_s = monotonic() - self._read_at
        if age_s > FRESH_S:
            self._begin()

        if age_s > FORGOTTEN_S or self.sensors is None:
            return ""

        if self._limits is None:
            self._limits = limits(self._devices, self.sensors.zones, self._operator_c)

        for limit in self._limits:
            mine = (reading for reading in self._readings if reading.zone_id in limit.zones)
            now_mc = hottest_mc(mine)
            if now_mc is not None and now_mc >= limit.cool_c * 1000:
                return (
                    f"the {limit.name} is at {now_mc / 1000:.1f} C, tests run below "
                    f"{limit.cool_c:g} C"
                )

        return ""

    def _begin(self, *, find: bool = False) -> asyncio.Event:
        """Starts a reading unless one is under way; its event is set at the end."""
        if self._reading is None:
            self._reading = asyncio.Event()
            known = None if find else self.sensors
            threading.Thread(target=self._read, args=(known,), daemon=True).start()

        return self._reading

    def _read(self, known: Sensors | None) -> None:
        sensors = known or find_sensors(self._root)
        readings = tuple(read_sensor(sensor) for sensor in sensors.sensors)
        if any(reading.errno == errno.ESTALE for reading in readings):
            sensors = find_sensors(self._root)
            readings = tuple(read_sensor(sensor) for sensor in sensors.sensors)

        try:
            self._loop.call_soon_threadsafe(self._took, sensors, readings)
        except RuntimeError:
            # The loop is closed: the daemon has ended meanwhile.
            pass

    def _took(self, sensors: Sensors, readings: tuple[Reading, ...]) -> None:
        if sensors is not self.sensors:
            self.sensors = sensors
            self._limits = None

        self._readings = readings
        self._read_at = monotonic()
        if self._reading is not None:
            self._reading.set()
            self._reading = None


def limits(
    devices: Sequence[Device], zones: Sequence[Zone], operator_c: Mapping[str, float]
) -> tuple[Limit, ...]:
    """The limit of each device's domain, and of the CPU, GPU and NPU zones that no device has.

    The operator's threshold of now goes before the one in the profile.
    """
    found = []
    for device in devices:
        threshold: Threshold = device.threshold
        own = tuple(zone for zone in zones if zone.zone_id in device.domain.zones)
        if threshold.source != "measured" or {device.device_id, device.kind} & set(operator_c):
            threshold = choose_threshold(
                own, device.device_id, device.kind, operator_c=operator_c, measured_c={}
            )

        found.append(Limit(device.kind, device.domain.zones, threshold.recover_c))

    for kind in KINDS:
        if any(device.kind == kind for device in devices):
            continue

        domain, own = domain_of(kind, (), zones)
        if domain.shared and kind != "cpu":
            # The zones of another part, under that part's own limit.
            continue

        threshold = choose_threshold(own, kind, kind, operator_c=operator_c, measured_c={})
        found.append(Limit(kind, domain.zones, threshold.recover_c))

    return tuple(found)
