"""Whether a number from a sensor can be a temperature of a running device."""

from __future__ import annotations

from typing import Final

# Powered-down blocks say -273000, thermistors that are not fitted -127000 or -40000; the ADCs
# and thermal diodes of processors end at 125 C to 150 C.
COLDEST_MC: Final = -40_000
HOTTEST_MC: Final = 150_000
# Within one degree of zero lie the 0 of a driver that never measured and every reading in whole
# or tenths of degrees that was taken for millidegrees. A true reading there is lost, which
# costs one "no reading"; a false one would be taken for a cold device.
ZERO_BAND_MC: Final = 1_000
# Constants of firmware stubs, seen behind ACPI zones only. Elsewhere such a number may well be
# real, and one that never moves is for whoever watches the zone over time.
_ACPI_STUBS_MC: Final = frozenset({16_800, 20_000, 27_800, 95_000})
# A trip below room temperature cannot throttle anything, and no silicon is rated above.
LOWEST_TRIP_MC: Final = 25_000
HIGHEST_TRIP_MC: Final = 150_000


def implausible(temperature_mc: int, zone_type: str) -> str:
    """Why one reading of a zone cannot be a temperature, or the empty string when it can."""
    if temperature_mc <= COLDEST_MC:
        return f"{temperature_mc} is what a sensor without power or without its part says"

    if temperature_mc >= HOTTEST_MC:
        return f"{temperature_mc} is beyond what a sensor of a running chip can say"

    if -ZERO_BAND_MC < temperature_mc < ZERO_BAND_MC:
        return (
            f"{temperature_mc} is a sensor that never measured, or not in millidegrees"
            " (then set the zone's scale)"
        )

    if zone_type.lower().startswith("acpitz") and temperature_mc in _ACPI_STUBS_MC:
        return f"{temperature_mc} is a constant of firmware without a sensor"

    return ""


def trip_temperature_mc(raw_mc: int) -> int | None:
    """A trip point's temperature, or None when the number stands for "not set"."""
    return raw_mc if LOWEST_TRIP_MC <= raw_mc < HIGHEST_TRIP_MC else None
