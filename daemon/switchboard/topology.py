"""Which physical part each backend runs on, and by what its heat is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from switchgear.backends.subject import Subject
from switchgear.daemon.protocol.constants import Constants
from switchgear.daemon.protocol.topology import Device, Topology
from switchgear.daemon.thermal.watch import DeviceSensors
from switchgear.fingerprints.devices import choose_threshold, domain_of

if TYPE_CHECKING:
    from switchgear.fingerprints.profile import PartKind
    from switchgear.fingerprints.zones_model import Zone

KINDS: Final[tuple[PartKind, ...]] = ("cpu", "gpu", "npu")
_KINDS: Final[dict[str, PartKind]] = {
    "cpu": "cpu",
    "vulkan": "gpu",
    "opencl": "gpu",
    "npu": "npu",
}


@dataclass(frozen=True, slots=True)
class Part:
    """A physical part: its name, kind, and the APIs through which it was seen."""

    name: str
    kind: PartKind
    apis: tuple[Subject, ...] = ()


def parts_of(
    identities: Mapping[str, Mapping[str, str]], chosen: Mapping[str, str]
) -> dict[str, Part]:
    """The part of each backend, from what the backends say of their devices.

    `chosen` is the operator's word: a part's name by backend. A software driver's part is the
    CPU. Two GPUs are told apart by their addresses and UUIDs; an API that gives neither is
    taken for the first one.
    """
    parts: dict[str, Part] = {"cpu": Part("cpu", "cpu")}
    gpus: list[tuple[str, dict[str, str]]] = []
    for backend, identity in identities.items():
        if backend == "cpu":
            continue

        kind = _KINDS.get(backend, "npu")
        if identity.get("device_type") == "cpu" and kind == "gpu":
            kind = "cpu"

        name: str = kind if kind != "gpu" else _gpu(gpus, identity)
        if wanted := chosen.get(backend):
            name = wanted
            kind = next((known for known in KINDS if wanted.startswith(known)), kind)

        subject = Subject(
            api=backend,
            name=identity.get("device", ""),
            device_type=identity.get("device_type") or "other",
            pci_address=identity.get("pci_address", ""),
        )
        parts[backend] = Part(name, kind, (subject,))

    return parts


def _gpu(known: list[tuple[str, dict[str, str]]], identity: Mapping[str, str]) -> str:
    marks = {
        mark: identity[mark] for mark in ("pci_address", "device_uuid") if identity.get(mark)
    }
    for name, others in known:
        shared = set(marks) & set(others)
        if not marks or not others or any(marks[mark] == others[mark] for mark in shared):
            others.update(marks)
            return name

    name = "gpu" if not known else f"gpu{len(known) + 1}"
    known.append((name, marks))
    return name


@dataclass(frozen=True, slots=True)
class Heat:
    """How a part's temperature is read and what it is held against, in millidegrees."""

    sensors: DeviceSensors
    trip_mc: int
    recover_mc: int
    hard_limit_mc: int
    source: str


def heat_of(
    part: Part, apis: Sequence[Subject], zones: Sequence[Zone], operator_c: Mapping[str, float]
) -> Heat:
    """A part's domain among the zones, and its limits.

    The threshold is the operator's (by the part's name or kind), the kernel's lowest passive
    trip in the domain, or the default.
    """
    domain, own = domain_of(part.kind, apis, zones)
    threshold = choose_threshold(
        own, part.name, part.kind, operator_c=operator_c, measured_c={}
    )
    passive = [zone.passive_trip_mc for zone in own if zone.passive_trip_mc is not None]
    hard_mc = Constants().hard_limit(min(passive, default=None))
    trip_mc = round(threshold.throttle_c * 1000)
    recover_mc = round(threshold.recover_c * 1000)
    return Heat(
        # Read closely from the recover temperature on, which is the lower of the two.
        DeviceSensors(domain.zones, recover_mc, domain.shared),
        trip_mc,
        recover_mc,
        hard_mc,
        threshold.source,
    )


def device_of(part: Part, heat: Heat | None) -> Device:
    """A part as the protocol sees it."""
    return Device(
        part.name,
        trip_mc=heat.trip_mc if heat else None,
        recover_mc=heat.recover_mc if heat else None,
        hard_limit_mc=heat.hard_limit_mc if heat else None,
        is_cpu=part.name == "cpu",
    )


def topology_of(parts: Mapping[str, Part], heats: Mapping[str, Heat]) -> Topology:
    """What the protocol watches over; `heats` by the parts' names."""
    devices = {part.name: device_of(part, heats.get(part.name)) for part in parts.values()}
    return Topology(devices, {backend: part.name for backend, part in parts.items()})
