"""An EVENT record as a daemon sends it, with any of its fields."""

from __future__ import annotations

from switchgear.ipc.event import EventKind, EventRecord, State
from switchgear.ipc.record import Backend, Precision


def told(number: int = 1, **fields: int) -> EventRecord:
    """Of a Vulkan place that sheds, where `fields` do not say otherwise."""
    values = {
        "kind": EventKind.SHEDDING,
        "backend": Backend.VULKAN,
        "precision": Precision.FP16,
        "state": State.SHEDDING,
        "device_state": State.NORMAL,
        **fields,
    }
    return EventRecord(number=number, epoch=1, **{k: int(v) for k, v in values.items()})
