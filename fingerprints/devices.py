"""The physical parts of a machine, put together from what each API saw.

A GPU seen through Vulkan and OpenCL is one device, since both heat the same chip. Subjects are
joined by device UUID or PCI address; where a driver tells neither, by being the only GPU that
each API sees, or the only one of its vendor's number. Software drivers run on the CPU and
belong to it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from switchgear.fingerprints.profile import (
    DEFAULT_THROTTLE_C,
    Device,
    PartKind,
    ThermalDomain,
    Threshold,
    threshold_of,
)
from switchgear.fingerprints.zones_model import passive_trip_mc

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from switchgear.fingerprints.measurement import Subject
    from switchgear.fingerprints.zones_model import Zone

CPU_ID: Final = "cpu"

_KINDS: Final[dict[str, PartKind]] = {
    "cpu": "cpu",
    "cluster": "cpu",
    "npu": "npu",
    "accelerator": "npu",
}
# UUIDs of drivers that have none: all digits the same.
_PLACEHOLDER_UUID: Final = re.compile(r"(.)\1*")


def kind_of(subject: Subject) -> PartKind:
    """The kind of part behind a subject. A Vulkan or OpenCL device of type `cpu` is the CPU."""
    if subject.api in ("cpu", "npu"):
        return "cpu" if subject.api == "cpu" else "npu"

    return _KINDS.get(subject.device_type, "gpu")


def is_software(subject: Subject) -> bool:
    """Whether an API meant for accelerators is served by the CPU (lavapipe, PoCL)."""
    return subject.api != "cpu" and kind_of(subject) == "cpu"


def match_devices(
    subjects: Iterable[Subject],
    zones: Sequence[Zone] = (),
    *,
    operator_c: Mapping[str, float] | None = None,
    measured_c: Mapping[str, float] | None = None,
    cpu_name: str = "",
) -> tuple[Device, ...]:
    """The devices behind some subjects, each with its thermal domain and throttle threshold.

    The CPU is always among them, first. `operator_c` and `measured_c` are thresholds in degrees
    Celsius by device id, or by kind for all devices of it; the operator's word goes first.
    """
    cpu: list[Subject] = []
    rest: list[tuple[list[Subject], str]] = []
    for subject in dict.fromkeys(subjects):
        if kind_of(subject) == "cpu":
            cpu.append(subject)
        else:
            _join(rest, subject)

    def build(
        device_id: str, kind: PartKind, name: str, apis: Sequence[Subject], matched_by: str
    ) -> Device:
        domain, own = domain_of(kind, apis, zones)
        threshold = choose_threshold(
            own, device_id, kind, operator_c=operator_c or {}, measured_c=measured_c or {}
        )
        return Device(
            device_id=device_id,
            kind=kind,
            name=name,
            apis=tuple(apis),
            matched_by=matched_by,
            domain=domain,
            threshold=threshold,
        )

    devices = [build(CPU_ID, "cpu", cpu_name or _cpu_name(cpu), cpu, _cpu_match(cpu))]
    used = {CPU_ID}
    for members, matched_by in _join_by_elimination(rest):
        device_id = _unique(_device_id(members), used)
        first = members[0]
        devices.append(build(device_id, kind_of(first), first.name, members, matched_by))

    return tuple(devices)


def device_of(subject: Subject | None, devices: Sequence[Device]) -> str | None:
    """The id of the device that has this subject among its APIs, or None."""
    if subject is None:
        return None

    return next((device.device_id for device in devices if subject in device.apis), None)


def domain_of(
    kind: PartKind, apis: Sequence[Subject], zones: Sequence[Zone]
) -> tuple[ThermalDomain, tuple[Zone, ...]]:
    """Which zones tell a device's temperature, and those zones themselves.

    A card has the sensors on its own PCI function and no others. A part of the chip has the
    zones of its role, else those of the whole chip, else the CPU's.
    """
    addresses = {subject.pci_address for subject in apis if subject.pci_address}
    on_card = tuple(zone for zone in zones if zone.pci_address in addresses and addresses)
    if on_card:
        return ThermalDomain(zones=_ids(on_card)), on_card

    if any(subject.device_type == "discrete" for subject in apis):
        return ThermalDomain(note="the card has no sensor that the kernel shows"), ()

    elsewhere = tuple(zone for zone in zones if not zone.pci_address)
    own = tuple(zone for zone in elsewhere if zone.role == kind)
    if own:
        return ThermalDomain(zones=_ids(own)), own

    chip = tuple(zone for zone in elsewhere if zone.chip_wide)
    shared = chip or tuple(zone for zone in elsewhere if zone.role == "cpu")
    if shared:
        note = (
            "no zone of its own: the whole chip's" if chip else "no zone of its own: the CPU's"
        )
        return ThermalDomain(zones=_ids(shared), shared=True, note=note), shared

    return ThermalDomain(note="no temperature sensor of this part"), ()


def choose_threshold(
    zones: tuple[Zone, ...],
    device_id: str,
    kind: PartKind,
    *,
    operator_c: Mapping[str, float],
    measured_c: Mapping[str, float],
) -> Threshold:
    """A device's throttle threshold: the operator's, a measured one, the kernel's, or 65 C.

    The kernel's is the lowest passive trip among the domain's zones.
    """
    for chosen, source in ((operator_c, "operator"), (measured_c, "measured")):
        value_c = chosen.get(device_id, chosen.get(kind))
        if value_c is not None:
            return threshold_of(value_c, "operator" if source == "operator" else "measured")

    trip_mc = passive_trip_mc(zones)
    if trip_mc is not None:
        names = sorted(zone.zone_id for zone in zones if zone.passive_trip_mc == trip_mc)
        return threshold_of(trip_mc / 1000, "kernel_passive_trip", names[0])

    return threshold_of(DEFAULT_THROTTLE_C, "default", "no passive trip is known")


def _join(groups: list[tuple[list[Subject], str]], subject: Subject) -> None:
    """Adds a subject to the groups that it shares an identity with, joining those into one."""
    found: list[Subject] = []
    why = ""
    for group in list(groups):
        reason = next((r for member in group[0] if (r := _same(member, subject))), "")
        if reason:
            groups.remove(group)
            found += group[0]
            why = why or group[1] or reason

    groups.append(([*found, subject], why))


def _same(one: Subject, other: Subject) -> str:
    """How two subjects are known to be one part, or the empty string."""
    if kind_of(one) != kind_of(other):
        return ""

    if one.pci_address and other.pci_address:
        return "PCI address" if one.pci_address == other.pci_address else ""

    uuid = one.device_uuid.lower()
    if uuid and uuid == other.device_uuid.lower() and not _PLACEHOLDER_UUID.fullmatch(uuid):
        return "device UUID"

    return ""


def _join_by_elimination(
    groups: list[tuple[list[Subject], str]],
) -> list[tuple[list[Subject], str]]:
    """Joins GPUs whose drivers told no identity where only one pairing is possible."""
    joined = list(groups)
    for group in groups:
        if group not in joined:
            continue

        others = [other for other in joined if other is not group and _may_be(group, other)]
        if len(others) != 1:
            continue

        # The pairing must be the only one seen from the other side as well.
        back = [
            other for other in joined if other is not others[0] and _may_be(others[0], other)
        ]
        if len(back) == 1:
            joined.remove(group)
            joined.remove(others[0])
            joined.append((group[0] + others[0][0], "the only pairing of what each API saw"))

    return joined


def _may_be(one: tuple[list[Subject], str], other: tuple[list[Subject], str]) -> bool:
    first, second = one[0], other[0]
    if kind_of(first[0]) != "gpu" or kind_of(second[0]) != "gpu":
        return False

    if {subject.api for subject in first} & {subject.api for subject in second}:
        return False

    return not _contradict(first, second)


def _contradict(first: list[Subject], second: list[Subject]) -> bool:
    """Whether two groups told identities that differ. What only one told is no difference.

    Two vendors' drivers may give one GPU two UUIDs. On a chip with one GPU that means nothing;
    a card, of which there may be two, is told apart by it.
    """
    fields = ["vendor_id", "pci_address"]
    if any(
        subject.pci_address or subject.device_type == "discrete" for subject in first + second
    ):
        fields.append("device_uuid")

    for field in fields:
        one = {getattr(subject, field) for subject in first if _tells(subject, field)}
        other = {getattr(subject, field) for subject in second if _tells(subject, field)}
        if one and other and not one & other:
            return True

    return False


def _tells(subject: Subject, field: str) -> bool:
    value = getattr(subject, field)
    return bool(value) and not (field == "device_uuid" and _PLACEHOLDER_UUID.fullmatch(value))


def _cpu_name(subjects: Sequence[Subject]) -> str:
    return next((subject.name for subject in subjects if subject.api == "cpu"), "CPU")


def _cpu_match(subjects: Sequence[Subject]) -> str:
    software = any(is_software(subject) for subject in subjects)
    return "software drivers run on the CPU" if software else ""


def _device_id(members: Sequence[Subject]) -> str:
    """Stable over boots: by PCI address, else by UUID, else by name."""
    kind = kind_of(members[0])
    for subject in members:
        if subject.pci_address:
            return f"{kind}-{subject.pci_address}"

    for subject in members:
        if subject.device_uuid and not _PLACEHOLDER_UUID.fullmatch(subject.device_uuid):
            return f"{kind}-{subject.device_uuid[:8].lower()}"

    name = re.sub(r"[^a-z0-9]+", "-", members[0].name.lower()).strip("-")
    return f"{kind}-{name[:40] or 'unnamed'}"


def _unique(device_id: str, used: set[str]) -> str:
    candidate = device_id
    number = 2
    while candidate in used:
        candidate = f"{device_id}-{number}"
        number += 1

    used.add(candidate)
    return candidate


def _ids(zones: Iterable[Zone]) -> tuple[str, ...]:
    return tuple(zone.zone_id for zone in zones)
