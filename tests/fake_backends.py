"""Backends that go wrong, for the preparer: each is the cpu backend with one fault.

Started as `--factory fake_backends:open_fake`, with `--options {"fault": NAME, ...}`. The fault
is in what a driver does; all above it is real.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np

from switchgear.backends.contract import Coverage, Instance, LoadRequest
from switchgear.backends.cpu import CpuBackend
from switchgear.ipc.errors import DriverError, NotPrepared, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from switchgear.ipc.slot import SlotEntry


def _twice(values: Any) -> None:
    values *= 2


def _constant(values: Any) -> None:
    values[...] = 1


def _not_a_number(values: Any) -> None:
    values.flat[0] = np.nan


def _as_half(values: Any) -> None:
    values[...] = values.astype(np.float16)


def _too_coarse(values: Any) -> None:
    step = np.abs(values).max() / 4
    values[...] = np.rint(values / step) * step


# What happens to the numbers of each run.
_LIES: dict[str, Callable[[Any], None]] = {
    "twice": _twice,
    "constant": _constant,
    "nan": _not_a_number,
    "half": _as_half,
    "coarse": _too_coarse,
}


class FakeInstance:
    """An instance of the cpu backend behind a driver with a fault."""

    def __init__(self, real: Instance, precision: str, fault: str) -> None:
        self._real = real
        self.info = real.info
        self.precision = precision
        self.coverage = Coverage(9, 10, 0.95)
        self._fault = fault
        self._runs = 0

    def attach_input(self, tensors: Sequence[memoryview]) -> object:
        return self._real.attach_input(tensors)

    def attach_output(self, tensors: Sequence[memoryview]) -> object:
        return self._real.attach_output(tensors), tensors

    def run(self, source: object, target: object) -> Sequence[SlotEntry]:
        self._runs += 1
        if self._fault == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif self._fault == "lost" and self._runs > 3:
            raise DriverError("vulkan", -4, "VK_ERROR_DEVICE_LOST", "vkQueueSubmit")

        assert isinstance(target, tuple)
        handle, memory = target
        entries = self._real.run(source, handle)
        lie = _LIES.get(self._fault)
        if lie is not None:
            for entry, view in zip(entries, memory, strict=True):
                lie(np.frombuffer(view[: entry.length], entry.dtype).reshape(entry.shape))

        return entries

    def reset(self) -> None:
        self._real.reset()

    def close(self) -> None:
        self._real.close()


class FakeBackend:
    """`fault` holds for every precision, `fault_PRECISION` for one."""

    name = "fake"
    engine = "fake-engine"

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._cpu = CpuBackend({"threads": 1})
        self.engine_version = str(options.get("version", "1"))
        self.precisions = tuple(options.get("precisions", ("fp16", "fp32")))
        if options.get("fault") == "no device":
            raise DriverError("opencl", -1001, "CL_PLATFORM_NOT_FOUND_KHR", "clGetPlatformIDs")

    def identity(self) -> Mapping[str, str]:
        return {"device": "fake", "driver": str(self._options.get("driver", "fake 1"))}

    def probe(self) -> str:
        return "fake"

    def load(self, request: LoadRequest) -> Instance:
        precision = request.precision
        fault = str(self._options.get(f"fault_{precision}", self._options.get("fault", "none")))
        if fault == "abort":
            os.abort()
        elif fault == "hang":
            signal.pause()
        elif fault == "talks":
            os.write(1, b'{"ok": true}\n')
        elif fault == "raises":
            raise KeyError("a mistake of its own")
        elif fault == "no memory":
            raise MemoryError
        elif fault == "unsupported":
            raise UnsupportedModel(f"the fake has no operator ADD in {precision}")
        elif fault == "refuses":
            raise DriverError("litert", 3, "kLiteRtStatusErrorCompilation", "no such shader")
        elif not request.compile and not self._options.get("prepared"):
            raise NotPrepared("it has not been compiled")

        if request.cache and request.compile:
            with open(os.path.join(request.cache, "artefact"), "wb") as file:
                file.write(b"x" * 5000)

        real = self._cpu.load(LoadRequest(request.path, "auto", request.shapes))
        return FakeInstance(real, precision, fault)

    def close(self) -> None:
        self._cpu.close()


def open_fake(options: Mapping[str, Any]) -> FakeBackend:
    return FakeBackend(options)
