"""The OpenCL backend: artefacts that tinygrad compiled, replayed through pyopencl."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Final, cast

from switchgear.backends.contract import Coverage, Instance, LoadRequest, ModelInfo
from switchgear.backends.opencl import artefact as files
from switchgear.backends.opencl.artefact import Artefact, BadArtefactError
from switchgear.backends.opencl.device import Device
from switchgear.backends.opencl.probe import check_known_answer
from switchgear.backends.opencl.replay import Replay, Slot
from switchgear.backends.opencl.tinygrad_jit import installed_version
from switchgear.ipc.errors import DriverError, NotPrepared, OutputTooLarge, UnsupportedModel
from switchgear.ipc.slot import SlotEntry

FILE_SUFFIX: Final = ".clart"
PRECISIONS: Final = ("fp32", "int4")
_CHUNK_BYTES: Final = 1 << 20


def artefact_path(request: LoadRequest, precision: str) -> str:
    """Where the artefact of this precision and these shapes lies."""
    shapes = _shapes_text(request)
    name = hashlib.sha256(shapes.encode()).hexdigest()[:16] if request.shapes else "default"
    return os.path.join(request.cache, f"opencl-{precision}-{name}{FILE_SUFFIX}")


def _shapes_text(request: LoadRequest) -> str:
    return json.dumps({name: list(shape) for name, shape in sorted(request.shapes.items())})


def file_sha256(path: str) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)

    return digest.hexdigest()


class OpenClBackend:
    """Opened once in a worker, on the device that tinygrad would choose too.

    :raises DriverError: there is no OpenCL device, or no pyopencl.
    """

    name = "opencl"
    engine = "tinygrad"
    precisions: tuple[str, ...] = PRECISIONS

    def __init__(self, options: Mapping[str, object]) -> None:
        del options
        self.engine_version = installed_version() or "none"
        self.device = Device()

    def identity(self) -> Mapping[str, str]:
        return self.device.identity()

    def probe(self) -> str:
        return check_known_answer(self.device)

    def key(self, request: LoadRequest, precision: str) -> dict[str, str]:
        """What an artefact for this request has to have been compiled from and for."""
        return {
            "engine": self.engine,
            "engine_version": self.engine_version,
            **self.identity(),
            "model_sha256": file_sha256(request.path),
            "precision": precision,
            "shapes": _shapes_text(request),
        }

    def load(self, request: LoadRequest) -> Instance:
        precision = "fp32" if request.precision == "auto" else request.precision
        if precision not in self.precisions:
            raise UnsupportedModel(
                f"the opencl backend computes in {', '.join(self.precisions)}, not {precision}"
            )

        key = self.key(request, precision)
        path = artefact_path(request, precision) if request.cache else ""
        if request.compile:
            from switchgear.backends.opencl.prepare import prepared

            artefact = prepared(self.device, request, key, path, stored)
            return OpenClInstance(self.device, artefact, "")

        return OpenClInstance(self.device, stored(path, key), path)

    def close(self) -> None:
        pass


def stored(path: str, key: Mapping[str, str]) -> Artefact:
    """The artefact of this key in a file; a damaged file is deleted.

    :raises NotPrepared: there is none, or it is another's.
    :raises OSError: the file cannot be read.
    """
    if not path:
        raise NotPrepared("no folder of prepared files is given")

    try:
        artefact = files.read(path)
    except FileNotFoundError:
        raise NotPrepared("the model has not been compiled for OpenCL") from None
    except BadArtefactError as error:
        with contextlib.suppress(OSError):
            os.unlink(path)

        raise NotPrepared(f"the compiled model was unusable: {error}") from None

    others = [name for name in key if artefact.key.get(name) != key[name]]
    if others:
        have, want = artefact.key.get(others[0], ""), key[others[0]]
        raise NotPrepared(f"the model was compiled for {others[0]} {have!r}, not {want!r}")

    return artefact


class OpenClInstance:
    """An artefact in a replay of its own.

    `path` is the artefact's file where it was read from one: a program binary that the driver
    refuses is deleted from it.
    """

    def __init__(self, device: Device, artefact: Artefact, path: str) -> None:
        self.info: ModelInfo = artefact.info
        self.precision = artefact.precision
        self.coverage: Coverage = artefact.coverage
        self._artefact = artefact
        self._replay = Replay(device, artefact)
        self._entries = tuple(
            SlotEntry(spec.dtype, spec.shape, spec.capacity_bytes) for spec in self.info.outputs
        )
        if path and artefact.binary and not self._replay.from_binary:
            with contextlib.suppress(OSError):
                files.write(files.without_binary(artefact), path)

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


__all__ = ["DriverError", "OpenClBackend", "OpenClInstance", "artefact_path", "stored"]
