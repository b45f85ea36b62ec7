"""A new profile from what was measured now, what was known before, and what the machine says.

Pure functions: no clock, no files. A test that was measured replaces its old results whole; a
test that was not keeps its numbers and the key they belong to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from switchgear.fingerprints.devices import device_of, match_devices
from switchgear.fingerprints.key import merge_parts, with_drivers
from switchgear.fingerprints.measurement import Value
from switchgear.fingerprints.profile import Measurement, Profile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from switchgear.fingerprints.measurement import Report, Subject
    from switchgear.fingerprints.profile import Key
    from switchgear.fingerprints.zones_model import Zone


def assemble(
    reports: Sequence[Report],
    *,
    key: Key,
    measured_at: int,
    old: Profile | None = None,
    zones: Sequence[Zone] = (),
    excluded_zones: Sequence[str] = (),
    operator_c: Mapping[str, float] | None = None,
    measured_c: Mapping[str, float] | None = None,
) -> Profile:
    """The profile after a run. `measured_at` is in seconds since the epoch.

    `key` is the machine's now, `reports` those of the tests that ran (perhaps none). Devices
    are matched anew from all subjects, kept ones included, so that a part keeps its id while
    its drivers keep theirs. `operator_c` and `measured_c`: see `match_devices`.
    """
    tests = tuple(dict.fromkeys(report.test for report in reports))
    kept = [
        entry for entry in (old.measurements if old else ()) if entry.test not in set(tests)
    ]
    fresh = [
        Measurement(
            test=report.test,
            device_id=None,
            subject=report.subject,
            values=report.values,
            notes=report.notes,
            duration_s=report.duration_s,
            measured_at=measured_at,
        )
        for report in reports
    ]
    measurements = sorted(kept + fresh, key=lambda entry: entry.test)
    subjects = [entry.subject for entry in measurements if entry.subject is not None]
    devices = match_devices(
        subjects, zones, operator_c=operator_c, measured_c=measured_c, cpu_name=key.soc
    )
    merged = merge_parts(old.key if old else None, key, tests)
    return Profile(
        key=with_drivers(merged, subjects),
        devices=devices,
        measurements=tuple(
            entry.model_copy(update={"device_id": device_of(entry.subject, devices)})
            for entry in measurements
        ),
        zones=tuple(zones),
        excluded_zones=tuple(excluded_zones),
        measured_at=max((entry.measured_at for entry in measurements), default=measured_at),
    )


def best_value(
    profile: Profile, test: str, name: str, *, highest: bool
) -> tuple[Measurement, Value] | None:
    """The best number of that name over all devices, hardware before software; None without.

    `highest` says that more is better (a bandwidth), else less is (a latency).
    """
    found: list[tuple[bool, float, Measurement, Value]] = []
    for entry in profile.of_test(test):
        value = entry.value(name)
        if isinstance(value, Value):
            software = _on_cpu(entry.subject)
            found.append((software, -value.median if highest else value.median, entry, value))

    if not found:
        return None

    _, _, entry, value = min(found, key=lambda item: item[:2])
    return entry, value


def _on_cpu(subject: Subject | None) -> bool:
    return subject is not None and subject.device_type == "cpu"
