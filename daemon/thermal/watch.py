"""The daemon's side of the sensors: keeps the reader running and the newest reading of each
device.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Final

from switchgear.daemon.child import Child, describe_end
from switchgear.daemon.protocol.reading import NO_SENSOR, Reading, ReadingKind
from switchgear.daemon.thermal.domain import Domain
from switchgear.daemon.thermal.forecast import headroom_s
from switchgear.daemon.thermal.reader_packets import (
    HANGS,
    IMPLAUSIBLE,
    MAX_PACKET_BYTES,
    OK,
    Found,
    Sample,
    Samples,
    pack_orders,
    unpack,
)
from switchgear.daemon.thermal.stuck import StuckSensors
from switchgear.daemon.thermal.suspend import SuspendWatch
from switchgear.daemon.thermal.zones import SYSFS_ROOT
from switchgear.fingerprints.zones_model import Zone

MODULE: Final = "switchgear.daemon.thermal.reader"
# The reader says something every half second; Python takes a while to start on a busy board.
SILENT_S: Final = 3.0
START_LIMIT_S: Final = 15.0
CHECK_S: Final = 0.5
RESTART_S: Final = 1.0
RESTART_MAX_S: Final = 30.0
# It ran well for so long: the next restart is quick again.
SOUND_S: Final = 60.0
_PACKETS_A_TURN: Final = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceSensors:
    """Which sensors tell a device's temperature, and its lowest limit in m°C.

    Within 10 °C of the limit they are read every 25 ms.
    """

    zones: tuple[str, ...]
    limit_mc: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class ZoneState:
    """One sensor now, for people. `reason` says why there is no temperature."""

    zone: Zone
    temperature_mc: int | None
    kind: ReadingKind
    age_ms: float
    reason: str = ""


@dataclass(slots=True)
class _Latest:
    """What is known of one sensor; `reason` is of the latest try."""

    temperature_mc: int | None = None
    taken_s: float = float("-inf")
    reason: str = ""


class ThermalWatch:
    """Reads the sensors below `root` through a process of its own.

    `scales` are factors to millidegrees by zone type. `on_reading(device, reading, now_s)` is
    called on the loop for every new reading of a followed device, `on_resumed(now_s)` when the
    machine has slept, `on_found()` when the sensors changed. Use it on a running loop; nothing
    blocks.
    """

    def __init__(
        self,
        root: Path = SYSFS_ROOT,
        *,
        scales: Mapping[str, float] | None = None,
        on_reading: Callable[[str, Reading, float], None] | None = None,
        on_resumed: Callable[[float], None] | None = None,
        on_found: Callable[[], None] | None = None,
    ) -> None:
        self._root = root
        self._scales = dict(scales or {})
        self._on_reading = on_reading
        self._on_resumed = on_resumed
        self._on_found = on_found
        self._loop = asyncio.get_running_loop()
        self._child: Child | None = None
        self._socket: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopping = False
        self._started_s = 0.0
        self._heard_s = 0.0
        self._spoke = False
        self._restart_s = RESTART_S
        self._devices: dict[str, DeviceSensors] = {}
        self._domains: dict[str, Domain] = {}
        self._of_zone: dict[str, list[str]] = {}
        self._generation = -1
        self._latest: dict[str, _Latest] = {}
        self._stuck = StuckSensors()
        self._suspend = SuspendWatch()
        self.zones: tuple[Zone, ...] = ()
        self.problems: tuple[str, ...] = ()
        # Since when the sensors are known; None before the reader's first list.
        self.found = asyncio.Event()
        self.restarts = 0

    def start(self) -> None:
        """Starts the reader. It is started again whenever it ends or falls silent."""
        self._stopping = False
        self._spawn()

    async def stop(self) -> None:
        """Ends the reader; returns when it is gone, or hangs beyond SIGKILL."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

        self._close_socket()
        child = self._child
        if child is not None and not await child.end():
            self._child = None

    def follow(self, devices: Mapping[str, DeviceSensors]) -> None:
        """The devices to tell of, in place of those before. What is known of a device whose
        sensors stay the same is kept."""
        domains = {}
        for name, sensors in devices.items():
            known = self._domains.get(name)
            same = known is not None and self._devices[name].zones == sensors.zones
            if known is None or not same:
                known = Domain(sensors.zones, shared=sensors.shared)

            domains[name] = known

        self._devices = dict(devices)
        self._domains = domains
        self._of_zone = {}
        for name, sensors in devices.items():
            for zone_id in sensors.zones:
                self._of_zone.setdefault(zone_id, []).append(name)

        self._order()

    def reading(self, device: str, now_s: float | None = None) -> Reading:
        """The newest reading of a device; `none` for one that is not followed."""
        domain = self._domains.get(device)
        if domain is None:
            return NO_SENSOR

        return domain.reading(monotonic() if now_s is None else now_s)

    def headroom_s(self, device: str, limit_mc: int, now_s: float | None = None) -> float:
        """Seconds until a device reaches a limit at its present slope; infinite while it does
        not rise or nothing is known."""
        reading = self.reading(device, now_s)
        if reading.temperature_mc is None:
            return float("inf")

        return headroom_s(reading.temperature_mc, reading.slope_mc_per_s, limit_mc)

    def states(self, now_s: float | None = None) -> list[ZoneState]:
        """Every sensor, as it was read last."""
        now_s = monotonic() if now_s is None else now_s
        return [self._state(zone, now_s) for zone in self.zones]

    def _state(self, zone: Zone, now_s: float) -> ZoneState:
        latest = self._latest.get(zone.zone_id, _Latest(reason="not read yet"))
        age_ms = (now_s - latest.taken_s) * 1000
        if latest.temperature_mc is None:
            return ZoneState(zone, None, "none", 0.0, latest.reason)

        if latest.reason:
            return ZoneState(zone, latest.temperature_mc, "held", age_ms, latest.reason)

        return ZoneState(zone, latest.temperature_mc, "measured", age_ms)

    # The process.
    def _spawn(self) -> None:
        self._timer = None
        try:
            ours, theirs = socket.socketpair(
                socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC
            )
        except OSError as error:
            self._retry(f"the sensor reader has no socket: {error}")
            return

        with theirs:
            ours.setblocking(False)
            # A list of many sensors is one packet.
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                theirs.setsockopt(socket.SOL_SOCKET, option, MAX_PACKET_BYTES)

            try:
                child = Child(
                    MODULE,
                    [
                        *("--fd", str(theirs.fileno())),
                        *("--root", str(self._root)),
                        *("--scales", json.dumps(self._scales)),
                    ],
                    [theirs.fileno()],
                    self._exited,
                )
            except OSError as error:
                ours.close()
                self._retry(f"the sensor reader does not start: {error}")
                return

        self._child = child
        self._socket = ours
        self._started_s = self._heard_s = monotonic()
        self._spoke = False
        self._generation = -1
        self._loop.add_reader(ours.fileno(), self._receive)
        self._timer = self._loop.call_later(CHECK_S, self._check)
        self._order()

    def _check(self) -> None:
        """Ends a reader that has fallen silent."""
        self._timer = self._loop.call_later(CHECK_S, self._check)
        limit_s = SILENT_S if self._spoke else START_LIMIT_S
        # What lies in the socket was said, though the loop had no time for it.
        self._receive()
        if self._child is not None and monotonic() - self._heard_s > limit_s:
            log.warning("the sensor reader says nothing: it is started anew")
            self._child.kill()
            self._heard_s = monotonic()

    def _exited(self, returncode: int) -> None:
        child, self._child = self._child, None
        self._close_socket()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

        if self._stopping:
            return

        if monotonic() - self._started_s > SOUND_S:
            self._restart_s = RESTART_S

        said = child.stderr.splitlines()[-1:] if child is not None else []
        self._retry(f"the sensor reader ended: {describe_end(returncode)} {' '.join(said)}")

    def _retry(self, why: str) -> None:
        log.warning("%s; again in %g s", why, self._restart_s)
        self.restarts += 1
        self._timer = self._loop.call_later(self._restart_s, self._spawn)
        self._restart_s = min(2 * self._restart_s, RESTART_MAX_S)

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _order(self, *, find: bool = False) -> None:
        if self._socket is None:
            return

        limits: dict[str, int] = {}
        for sensors in self._devices.values():
            for zone_id in sensors.zones:
                limits[zone_id] = min(sensors.limit_mc, limits.get(zone_id, sensors.limit_mc))

        with contextlib.suppress(OSError):
            self._socket.send(pack_orders(limits, find=find))

    # What it says.
    def _receive(self) -> None:
        for _ in range(_PACKETS_A_TURN):
            if self._socket is None:
                return

            try:
                packet = self._socket.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""

            if not packet:
                # Its end is told by the pidfd.
                self._loop.remove_reader(self._socket.fileno())
                return

            try:
                told = unpack(packet)
            except ValueError as error:
                log.warning("the sensor reader speaks nonsense (%s)", error)
                if self._child is not None:
                    self._child.kill()

                return

            self._heard_s = monotonic()
            self._spoke = True
            if isinstance(told, Found):
                self._take_zones(told)
            else:
                self._take_samples(told)

    def _take_zones(self, found: Found) -> None:
        self._generation = found.generation
        known = {zone.zone_id for zone in found.zones}
        now_s = monotonic()
        for zone in self.zones:
            if zone.zone_id not in known:
                self._missing(zone.zone_id, now_s)

        if found.problems != self.problems:
            for problem in found.problems:
                log.warning("sensors: %s", problem, extra={"source": problem})

        self.zones = found.zones
        self.problems = found.problems
        self.found.set()
        if self._on_found is not None:
            self._on_found()

    def _missing(self, zone_id: str, now_s: float) -> None:
        latest = self._latest.get(zone_id)
        if latest is not None and not latest.reason:
            latest.reason = "it vanished"
            log.warning("sensor %s vanished", zone_id, extra={"source": zone_id})

        for device in self._of_zone.get(zone_id, ()):
            self._domains[device].take(zone_id, None, now_s)

    def _take_samples(self, told: Samples) -> None:
        now_s = monotonic()
        if self._suspend.slept_s(told.monotonic_ns, told.boottime_ns) > 0:
            self._resumed(now_s)

        if told.generation != self._generation:
            # Its list of sensors was lost on the way.
            if told.samples:
                self._order(find=True)

            return

        touched: dict[str, None] = {}
        for sample in told.samples:
            if sample.number < len(self.zones):
                zone = self.zones[sample.number]
                self._take_sample(zone, sample)
                for device in self._of_zone.get(zone.zone_id, ()):
                    touched[device] = None

        if self._on_reading is not None:
            for device in touched:
                self._on_reading(device, self._domains[device].reading(now_s), now_s)

    def _take_sample(self, zone: Zone, sample: Sample) -> None:
        taken_s = sample.taken_ns / 1e9
        temperature_mc, reason = self._judged(zone, sample, taken_s)
        latest = self._latest.setdefault(zone.zone_id, _Latest())
        if reason != latest.reason:
            latest.reason = reason
            text = reason or "it answers again"
            # LogLimit keeps a sensor that comes and goes from filling the log.
            log.warning("sensor %s: %s", zone.zone_id, text, extra={"source": zone.zone_id})

        if temperature_mc is not None:
            latest.temperature_mc = temperature_mc
            latest.taken_s = taken_s

        for device in self._of_zone.get(zone.zone_id, ()):
            self._domains[device].take(zone.zone_id, temperature_mc, taken_s)

    def _judged(self, zone: Zone, sample: Sample, taken_s: float) -> tuple[int | None, str]:
        """The temperature, or None and why there is none."""
        if sample.status == OK:
            if zone.role in ("cpu", "gpu", "npu") and self._stuck.take(
                zone.zone_id, sample.temperature_mc, taken_s
            ):
                return None, f"stuck at {sample.temperature_mc / 1000:g} °C while others move"

            return sample.temperature_mc, ""

        if sample.status == HANGS:
            return None, "its driver hangs in the read"

        if sample.status == IMPLAUSIBLE:
            return None, "what it says is no temperature"

        name = errno.errorcode.get(sample.errno, str(sample.errno))
        return None, f"{name}: {os.strerror(sample.errno)}"

    def _resumed(self, now_s: float) -> None:
        log.info("the machine has slept: sensors are read anew")
        for domain in self._domains.values():
            domain.forget()

        self._stuck.forget()
        self._order(find=True)
        if self._on_resumed is not None:
            self._on_resumed(now_s)
