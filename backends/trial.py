"""Runs a model on inputs of our own: first runs, and trials of new models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from switchgear.backends.contract import Instance
from switchgear.ipc.errors import BadModel, DriverError, OutputTooLarge
from switchgear.ipc.slot import SlotEntry, TensorSpec

# First room for an output of unknown size; the engine says how much more it wants.
FIRST_ROOM_BYTES: Final = 1 << 20
# Values that inputs are filled with, one after the other until a run succeeds: an index of 0 is
# always valid, a shape of 0 often is not.
FILL_VALUES: Final = (0, 1)


def _fill(spec: TensorSpec, value: int) -> memoryview:
    import numpy as np

    data = bytearray(spec.capacity_bytes)
    if value:
        np.frombuffer(data, dtype=spec.dtype)[:] = value

    return memoryview(data)


def _run(instance: Instance, value: int) -> Sequence[SlotEntry]:
    """One run with every input element set to `value`; grows the outputs' room as needed."""
    info = instance.info
    source = instance.attach_input([_fill(spec, value) for spec in info.inputs])
    room = FIRST_ROOM_BYTES
    while True:
        sizes = [max(s.capacity_bytes, room if s.dynamic else 0) for s in info.outputs]
        target = instance.attach_output([memoryview(bytearray(size)) for size in sizes])
        try:
            return instance.run(source, target)
        except OutputTooLarge as error:
            needed = error.details.get("bytes_needed")
            if not isinstance(needed, int) or needed <= room:
                raise

            room = needed


def first_run(instance: Instance) -> Sequence[SlotEntry]:
    """Runs a model until one of the fill values works; blocks. It changes a model's state.

    :raises DriverError: none does; the first one's error.
    """
    first: DriverError | None = None
    for value in FILL_VALUES:
        try:
            return _run(instance, value)
        except DriverError as error:
            first = first or error

    if first is None:
        raise BadModel("the model was not run")

    raise first
