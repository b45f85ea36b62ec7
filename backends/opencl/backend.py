"""The OpenCL backend: artefacts that tinygrad compiled, replayed through pyopencl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, cast

from switchgear.backends.contract import Coverage, Instance, LoadRequest, ModelInfo
from switchgear.backends.opencl.artefact import Artefact, digest_of, without_constants
from switchgear.backends.opencl.device import Device
from switchgear.backends.opencl.probe import check_known_answer
from switchgear.backends.opencl.replay import Replay, Slot
from switchgear.backends.opencl.store import (
    artefact_key,
    artefact_path,
    drop_binary,
    read_stored,
)
from switchgear.backends.opencl.tinygrad_jit import installed_version
from switchgear.ipc.errors import OutputTooLarge, UnsupportedModel
from switchgear.ipc.slot import SlotEntry

_PRECISIONS: Final = ("fp32", "int4")


class OpenClBackend:
    """Opened once in a worker, on the device that tinygrad would choose too. No options.

    :raises DriverError: there is no OpenCL device, or no pyopencl.
    """

    name = "opencl"
    engine = "tinygrad"
    precisions: tuple[str, ...] = _PRECISIONS

    def __init__(self, options: Mapping[str, object]) -> None:
        del options
        # A serving worker needs its number only.
        self.engine_version = installed_version() or "none"
        self.device = Device()

    def identity(self) -> Mapping[str, str]:
        return self.device.identity()

    def probe(self) -> str:
        return check_known_answer(self.device)

    def load(self, request: LoadRequest) -> Instance:
        """:raises NotPrepared: also where the artefact is for another driver or tinygrad."""
        precision = "fp32" if request.precision == "auto" else request.precision
        if precision not in self.precisions:
            raise UnsupportedModel(
                f"the opencl backend computes in {', '.join(self.precisions)}, not {precision}"
            )

        if request.compile:
            # The compiler and all that it imports is a preparer's.
            from switchgear.backends.opencl.prepare import Preparation

            preparation = Preparation(self.device, request, self.engine_version)
            return OpenClInstance(self.device, preparation.artefact(precision), "")

        key = artefact_key(request, precision, self.identity(), self.engine_version)
        path = artefact_path(request, precision)
        return OpenClInstance(self.device, read_stored(path, key), path)

    def close(self) -> None:
        pass


class OpenClInstance:
    """An artefact in a replay of its own.

    `path` is the artefact's file where it was read from one: a program binary that the driver
    refuses is deleted from it, and the program built from source.
    """

    def __init__(self, device: Device, artefact: Artefact, path: str) -> None:
        self.info: ModelInfo = artefact.info
        self.precision = artefact.precision
        self.coverage: Coverage = artefact.coverage
        # What the compiler found out: layers, ratios, times.
        self.notes: Mapping[str, str] = artefact.notes
        self.artefact_id = digest_of(artefact)
        self._artefact = artefact
        self._replay = Replay(device, artefact)
        self._entries = tuple(
            SlotEntry(spec.dtype, spec.shape, spec.capacity_bytes) for spec in self.info.outputs
        )
        if path and artefact.binary and not self._replay.from_binary:
            drop_binary(path, artefact)

    def attach_input(self, tensors: Sequence[memoryview]) -> object:
        return self._replay.attach(tensors, self._artefact.inputs)

    def attach_output(self, tensors: Sequence[memoryview]) -> object:
        rooms = []
        for spec, memory in zip(self.info.outputs, tensors, strict=True):
            if len(memory) < spec.capacity_bytes:
                raise OutputTooLarge(
                    f"output {spec.name!r} has {spec.capacity_bytes} bytes,"
                    f" its slot {len(memory)}",
                    bytes_needed=spec.capacity_bytes,
                )

            rooms.append(memory[: spec.capacity_bytes])

        return self._replay.attach(rooms, self._artefact.outputs)

    def run(self, source: object, target: object) -> Sequence[SlotEntry]:
        self._replay.run(cast(Slot, source), cast(Slot, target))
        return self._entries

    def reset(self) -> None:
        """Nothing: models with state are refused."""

    def close(self) -> None:
        self._replay.close()
        self._artefact = without_constants(self._artefact)
