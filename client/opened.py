"""What OpenSession returned, checked before anything of it is used."""

from __future__ import annotations

from dataclasses import dataclass

from switchgear.ipc.arena import Layout
from switchgear.ipc.dtypes import DTYPES
from switchgear.ipc.errors import ProtocolError, UnsupportedModel
from switchgear.ipc.slot import ENTRY, HEADER, TensorPlace, TensorSpec


@dataclass(frozen=True, slots=True)
class Opened:
    """What OpenSession returned, without the descriptors."""

    session: int
    epoch: int
    slots: int
    layout: Layout
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    state: bool


def slice_of(memory: memoryview, place: TensorPlace, length: int) -> memoryview:
    return memory[place.offset : place.offset + length]


def bytes_of(spec: TensorSpec) -> int:
    size = DTYPES[spec.dtype].size_bytes
    for dim in spec.shape:
        size *= dim

    return size


def check_opened(opened: Opened) -> None:
    layout = opened.layout
    for spec in (*opened.inputs, *opened.outputs):
        if spec.dtype not in DTYPES:
            raise UnsupportedModel(f"tensor {spec.name!r} is of the unknown dtype {spec.dtype}")

    if not 0 < opened.slots <= min(len(layout.inputs), len(layout.outputs)):
        raise ProtocolError("the layout has fewer slots than the session")

    if len(layout.headers) != len(layout.outputs):
        raise ProtocolError("the layout has not one header for each output slot")

    room = HEADER.size + len(opened.outputs) * ENTRY.size
    fits = all(place.length >= room for place in layout.headers)
    for specs, slots in ((opened.inputs, layout.inputs), (opened.outputs, layout.outputs)):
        for places in slots:
            fits = fits and len(places) == len(specs)
            fits = fits and all(
                place.length >= (0 if spec.dynamic else bytes_of(spec))
                for place, spec in zip(places, specs, strict=False)
            )

    if not fits:
        raise ProtocolError("the layout does not fit the model's tensors")
