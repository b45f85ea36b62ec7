"""The profile of a device: everything the fingerprint found, as one checked, versioned model.

Schema 2 is current; schema 1 is described in `switchgear.fingerprints.migrate`. The model is
frozen: a new measurement makes a new profile (`switchgear.fingerprints.assemble`).
Temperatures of zones are millidegrees Celsius, thresholds degrees Celsius, times seconds since
the epoch.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

# Pydantic resolves these at run time.
from switchgear.fingerprints.measurement import Failure, Subject, Value
from switchgear.fingerprints.zones_model import Zone

SCHEMA_VERSION: Final = 2

# The field report's trip; it lies below what phones ship, so that it is safe without knowledge.
DEFAULT_THROTTLE_C: Final = 65.0
# The protocol recovers this far below its trip: the field report's 65 C and 58 C.
RECOVER_BELOW_C: Final = 7.0

PartKind: TypeAlias = Literal["cpu", "gpu", "npu"]
ThresholdSource: TypeAlias = Literal["kernel_passive_trip", "measured", "operator", "default"]
# An operator or a migration may not set a threshold that no chip can reach or live with.
Celsius: TypeAlias = Annotated[float, Field(ge=10.0, le=150.0)]
# Seconds since the epoch, up to the end of the year 9999, which every calendar can show.
Moment: TypeAlias = Annotated[int, Field(ge=0, le=253_402_300_799)]


class _Model(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class DriverIdentity(_Model):
    """One driver as its API names it; empty where the API does not say."""

    api: str
    device: str
    name: str = ""
    version: str = ""
    info: str = ""


class Key(_Model):
    """What the numbers depend on. `parts` has, per test, the inputs whose change makes it
    stale.

    `inputs` of a part are named `soc`, `kernel`, `engine:NAME`, `file:PATH` and so on; a value
    is an opaque text, equal while the thing is the same. `schema_version` is the profile's, at
    the last change of what a value means.
    """

    schema_version: int
    soc: str
    soc_source: str
    kernel: str
    system_image: str = ""
    engines: dict[str, str] = {}
    drivers: tuple[DriverIdentity, ...] = ()
    parts: dict[str, dict[str, str]] = {}


class Threshold(_Model):
    """Where a device is too warm, where it is cool again, and who says so."""

    throttle_c: Celsius
    recover_c: Celsius
    source: ThresholdSource
    note: str = ""


class ThermalDomain(_Model):
    """The zones that tell a device's temperature: the hottest counts.

    `shared` says that the zones belong to another part or to the whole chip, because the device
    has none of its own. Without zones, `note` has the reason.
    """

    zones: tuple[str, ...] = ()
    shared: bool = False
    note: str = ""


class Device(_Model):
    """One physical part and every API through which it was seen.

    `software` APIs (lavapipe, PoCL) are listed at the CPU, which is what they run on.
    `matched_by` says why the APIs were taken for one part.
    """

    device_id: str
    kind: PartKind
    name: str
    apis: tuple[Subject, ...] = ()
    matched_by: str = ""
    domain: ThermalDomain = ThermalDomain()
    threshold: Threshold


class Measurement(_Model):
    """One test on one device, as reported; `device_id` is None when no device was reached."""

    test: str
    device_id: str | None
    subject: Subject | None
    values: tuple[Value | Failure, ...]
    notes: tuple[str, ...] = ()
    duration_s: float = 0.0
    measured_at: Moment

    def value(self, name: str) -> Value | Failure | None:
        return next((value for value in self.values if value.name == name), None)


class Profile(_Model):
    """All of it. `measured_at` is the time of the newest measurement."""

    schema_version: Literal[2] = 2
    key: Key
    devices: tuple[Device, ...]
    measurements: tuple[Measurement, ...]
    zones: tuple[Zone, ...] = ()
    excluded_zones: tuple[str, ...] = ()
    measured_at: Moment

    def device(self, device_id: str | None) -> Device | None:
        return next((device for device in self.devices if device.device_id == device_id), None)

    def of_test(self, test: str) -> tuple[Measurement, ...]:
        return tuple(entry for entry in self.measurements if entry.test == test)


def threshold_of(
    throttle_c: float, source: ThresholdSource, note: str = "", recover_c: float | None = None
) -> Threshold:
    """A threshold with its recover temperature, 7 C below unless an operator sets it."""
    recover = throttle_c - RECOVER_BELOW_C if recover_c is None else recover_c
    return Threshold(throttle_c=throttle_c, recover_c=recover, source=source, note=note)
