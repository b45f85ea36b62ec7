"""hwmon through psutil: a second source of sensors, for systems whose sysfs is not Linux's.

psutil is optional and is imported here alone, in the sensor reader's process.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, Final

from switchgear.daemon.thermal.plausible import implausible
from switchgear.daemon.thermal.roles import name_roles
from switchgear.daemon.thermal.zones import Sensor, Sensors
from switchgear.fingerprints.zones_model import Reading, Zone

if TYPE_CHECKING:
    from collections.abc import Callable

_PATH: Final = "psutil:"


class PsutilSource:
    """Adds psutil's sensors to those of another source, where that one does not have them.

    `temperatures` is `psutil.sensors_temperatures`: degrees Celsius by chip. Blocks as it does.
    """

    def __init__(self, temperatures: Callable[[], Any]) -> None:
        self._temperatures = temperatures

    def add(self, found: Sensors) -> Sensors:
        """What was found, and psutil's sensors of chips that are not among it."""
        chips = {sensor.zone.type for sensor in found.sensors if sensor.zone.source == "hwmon"}
        mirrored = {kind.type.replace("-", "_") for kind in found.zones}
        values = [
            (zone_id, chip)
            for zone_id, chip, _ in self._values()
            if chip not in chips and chip.replace("-", "_") not in mirrored
        ]
        namings = name_roles([chip for _, chip in values])
        added = [
            Sensor(
                Zone(zone_id, chip, naming.role, naming.chip_wide, source="hwmon"),
                _PATH + zone_id,
                _PATH + chip,
            )
            for (zone_id, chip), naming in zip(values, namings, strict=True)
            if naming.temperature
        ]
        return Sensors((*found.sensors, *added), found.excluded, found.problems)

    def read(self, sensor: Sensor) -> Reading | None:
        """A reading of one of psutil's sensors, None where it is another's."""
        if not sensor.temperature_path.startswith(_PATH):
            return None

        zone_id = sensor.zone.zone_id
        for known_id, _, celsius in self._values():
            if known_id == zone_id:
                temperature_mc = round(celsius * 1000)
                reason = implausible(temperature_mc, sensor.zone.type)
                return Reading(zone_id, None if reason else temperature_mc, reason)

        return Reading(zone_id, None, "psutil does not have it any more", errno.ENOENT)

    def _values(self) -> list[tuple[str, str, float]]:
        """Zone id, chip and degrees Celsius of each sensor."""
        found: list[tuple[str, str, float]] = []
        counts: dict[str, int] = {}
        try:
            chips = self._temperatures()
        except (OSError, RuntimeError, ValueError, AttributeError):
            # Not on this platform, or a file that vanished in the middle.
            return []

        for chip, entries in chips.items():
            for number, entry in enumerate(entries, 1):
                base = f"{chip}/{entry.label or f'temp{number}'}"
                counts[base] = counts.get(base, 0) + 1
                zone_id = base if counts[base] == 1 else f"{base}#{counts[base]}"
                if isinstance(entry.current, int | float):
                    found.append((zone_id, chip, float(entry.current)))

        return found


def psutil_source() -> PsutilSource | None:
    """psutil where it is installed and knows temperatures, else None."""
    try:
        import psutil
    except ImportError:
        return None

    temperatures = getattr(psutil, "sensors_temperatures", None)
    return PsutilSource(temperatures) if temperatures is not None else None
