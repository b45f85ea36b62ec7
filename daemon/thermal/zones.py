"""The temperature sensors of the machine, found in sysfs, and one reading of one of them.

Every function here reads sysfs and so can block: a driver may sleep in its read for as long as
its bus takes. Call them from a process or a thread that may wait, never from the event loop.
"""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from switchgear.daemon.thermal.plausible import implausible, trip_temperature_mc
from switchgear.daemon.thermal.roles import name_roles
from switchgear.fingerprints.zones_model import Reading, TripPoint, Zone

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SYSFS_ROOT: Final = Path("/sys")

# An attribute of sysfs is at most one page.
_ATTRIBUTE_BYTES: Final = 4096
_INTEGER: Final = re.compile(r"[+-]?\d{1,12}")
_PCI_ADDRESS: Final = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# What a sensor of hwmon calls the limits that the kernel calls trips.
_HWMON_LIMITS: Final = (("max", "hot"), ("crit", "critical"), ("emergency", "critical"))


@dataclass(frozen=True, slots=True)
class Sensor:
    """A zone and where it is read now; the path is good until the kernel renumbers."""

    zone: Zone
    temperature_path: str
    type_path: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Sensors:
    """All sensors; `excluded` are types without a temperature, `problems` are sentences."""

    sensors: tuple[Sensor, ...]
    excluded: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def zones(self) -> tuple[Zone, ...]:
        return tuple(sensor.zone for sensor in self.sensors)


def find_sensors(root: Path = SYSFS_ROOT, scales: Mapping[str, float] | None = None) -> Sensors:
    """Lists thermal zones, then sensors of hwmon that are no zone already.

    `scales` maps a zone's type to the factor that makes its numbers millidegrees; only an
    operator can know it (65 may be a number in degrees or a very cold chip). A folder that is
    missing or may not be read is told in `problems`, and the rest is found all the same. Blocks
    on sysfs.
    """
    problems: list[str] = []
    folders = _numbered(root / "class/thermal", "thermal_zone", problems)
    kinds = [(folder, _text(folder / "type")) for folder in folders]
    named = [(folder, kind) for folder, kind in kinds if kind]
    namings = name_roles([kind for _, kind in named])
    counts: Counter[str] = Counter()
    sensors: list[Sensor] = []
    excluded: list[str] = []
    for (folder, kind), naming in zip(named, namings, strict=True):
        if not naming.temperature:
            excluded.append(kind)
            continue

        counts[kind] += 1
        zone = Zone(
            zone_id=kind if counts[kind] == 1 else f"{kind}#{counts[kind]}",
            type=kind,
            role=naming.role,
            chip_wide=naming.chip_wide,
            trips=_trips(folder),
            cooling=_cooling(folder),
        )
        scale = (scales or {}).get(kind, 1.0)
        sensors.append(Sensor(zone, f"{folder}/temp", f"{folder}/type", scale))

    sensors += _hwmon_sensors(root, {kind for _, kind in named}, scales or {}, problems)
    return Sensors(tuple(sensors), tuple(excluded), tuple(problems))


def read_sensor(sensor: Sensor) -> Reading:
    """One reading. Never raises: a failed read has its errno, a bad number its reason.

    A sensor whose path now belongs to another type answers `ESTALE`: find the sensors again. An
    `EAGAIN` is reported and not tried again, for a sleeping radio answers it for ever.
    """
    zone_id = sensor.zone.zone_id
    try:
        kind = _read(sensor.type_path)
        if kind != sensor.zone.type:
            return Reading(
                zone_id, None, f"the path now belongs to a zone {kind!r}", errno.ESTALE
            )

        text = _read(sensor.temperature_path)
    except OSError as error:
        code = error.errno or errno.EIO
        name = errno.errorcode.get(code, str(code))
        return Reading(zone_id, None, f"{name}: {os.strerror(code)}", code)

    if not _INTEGER.fullmatch(text):
        return Reading(zone_id, None, f"not a number: {text[:32]!r}")

    temperature_mc = round(int(text) * sensor.scale)
    reason = implausible(temperature_mc, sensor.zone.type)
    return Reading(zone_id, None if reason else temperature_mc, reason)


def hottest_mc(readings: Iterable[Reading]) -> int | None:
    """The temperature of a domain: its hottest sensor that gave one, or None when none did."""
    measured = (reading.temperature_mc for reading in readings)
    return max((value for value in measured if value is not None), default=None)


def same_everywhere(readings: Iterable[Reading]) -> bool:
    """Whether four or more sensors gave exactly the same number: a stub, most likely."""
    measured = [r.temperature_mc for r in readings if r.temperature_mc is not None]
    return len(measured) >= 4 and len(set(measured)) == 1


def _hwmon_sensors(
    root: Path, zone_types: set[str], scales: Mapping[str, float], problems: list[str]
) -> list[Sensor]:
    # The kernel mirrors each thermal zone in hwmon under its type with underscores.
    mirrored = {kind.replace("-", "_") for kind in zone_types}
    found: list[tuple[Path, str, str, str]] = []
    for folder in _numbered(root / "class/hwmon", "hwmon", problems):
        name = _text(folder / "name")
        if not name or name.replace("-", "_") in mirrored:
            continue

        for number in _temperature_numbers(folder):
            label = _text(folder / f"temp{number}_label") or f"temp{number}"
            found.append((folder, name, label, number))

    namings = name_roles([name for _, name, _, _ in found])
    counts: Counter[str] = Counter()
    sensors: list[Sensor] = []
    for (folder, name, label, number), naming in zip(found, namings, strict=True):
        if not naming.temperature:
            continue

        base = f"{name}/{label}"
        counts[base] += 1
        zone = Zone(
            zone_id=base if counts[base] == 1 else f"{base}#{counts[base]}",
            type=name,
            role=naming.role,
            chip_wide=naming.chip_wide,
            trips=_hwmon_trips(folder, number),
            source="hwmon",
            pci_address=_pci_address(folder),
        )
        path = f"{folder}/temp{number}_input"
        sensors.append(Sensor(zone, path, f"{folder}/name", scales.get(name, 1.0)))

    return sensors


def _numbered(folder: Path, prefix: str, problems: list[str]) -> list[Path]:
    """The entries `prefix<N>` of a class folder in the order of their numbers."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        # A machine without sensors, or a kernel without the class: nothing is wrong.
        return []
    except OSError as error:
        problems.append(f"{folder}: {error.strerror}")
        return []

    pattern = re.compile(rf"{prefix}(\d+)")
    matches = [match for name in names if (match := pattern.fullmatch(name))]
    return [folder / match[0] for match in sorted(matches, key=lambda match: int(match[1]))]


def _trips(folder: Path) -> tuple[TripPoint, ...]:
    trips: list[TripPoint] = []
    # The kernel numbers the trips of a zone from 0 without gaps, in practice fewer than 20.
    for number in range(64):
        kind = _text(folder / f"trip_point_{number}_type")
        raw_mc = _number(folder / f"trip_point_{number}_temp")
        if not kind or raw_mc is None:
            break

        hysteresis_mc = _number(folder / f"trip_point_{number}_hyst") or 0
        trips.append(TripPoint(kind, raw_mc, trip_temperature_mc(raw_mc), hysteresis_mc))

    return tuple(trips)


def _hwmon_trips(folder: Path, number: str) -> tuple[TripPoint, ...]:
    trips: list[TripPoint] = []
    for suffix, kind in _HWMON_LIMITS:
        raw_mc = _number(folder / f"temp{number}_{suffix}")
        if raw_mc is not None:
            trips.append(TripPoint(kind, raw_mc, trip_temperature_mc(raw_mc)))

    return tuple(trips)


def _cooling(folder: Path) -> tuple[str, ...]:
    """The types of the cooling devices bound to a zone, each once, in the kernel's order."""
    try:
        names = sorted(name for name in os.listdir(folder) if re.fullmatch(r"cdev\d+", name))
    except OSError:
        return ()

    kinds = (_text(folder / name / "type") for name in names)
    return tuple(dict.fromkeys(kind for kind in kinds if kind))


def _temperature_numbers(folder: Path) -> list[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []

    matches = [match for name in names if (match := re.fullmatch(r"temp(\d+)_input", name))]
    return [match[1] for match in sorted(matches, key=lambda match: int(match[1]))]


def _pci_address(folder: Path) -> str:
    """The PCI function that a hwmon entry belongs to, empty when it belongs to none."""
    device = os.path.realpath(folder / "device")
    addresses = _PCI_ADDRESS.findall(device)
    return addresses[-1] if addresses else ""


def _read(path: str | Path) -> str:
    """One attribute, at most a page, without waiting where the driver honours that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        data = os.read(descriptor, _ATTRIBUTE_BYTES)
    finally:
        os.close(descriptor)

    return data.decode("utf-8", "replace").strip("\0 \t\r\n")


def _text(path: Path) -> str:
    try:
        return _read(path)
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if _INTEGER.fullmatch(text) else None
