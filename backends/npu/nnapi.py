"""NNAPI: Android's own way to accelerators, deprecated since Android 15 but on many devices.

Only devices of the type accelerator count. What one of them does not take of a model runs on
NNAPI's reference CPU, which is slow: so little of the arithmetic may be left.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from switchgear.backends.contract import Coverage, Instance, LoadRequest, ModelInfo
from switchgear.backends.litert.description import Description, describe
from switchgear.backends.npu import nnapi_abi as abi
from switchgear.backends.npu.coverage import (
    arithmetic_of,
    check_coverage,
    coverage_of,
    wanted_share,
)
from switchgear.backends.npu.nnapi_model import NnapiModel
from switchgear.ipc.errors import (
    BadConfiguration,
    DriverError,
    SwitchgearError,
    UnsupportedModel,
)
from switchgear.ipc.slot import SlotEntry

if TYPE_CHECKING:
    from switchgear.backends.opencl.graph import Graph

# What "auto" is here: without leave to compute in half precision most accelerators take no
# floats at all. Whether its numbers are good enough is not decided here.
DEFAULT_PRECISION: Final = "fp16"
_DEAD_OBJECT: Final = 14


class NnapiProvider:
    """The runtime's accelerators, used one at a time.

    Options: `library`, the runtime's path (`libneuralnetworks.so`); `device`, the name of one
    of its devices, of whatever type (without it the first accelerator); `min_arithmetic`.

    :raises BadConfiguration: an option is of a wrong kind.
    :raises DriverError: there is no runtime or no such device, with those that it has.
    """

    name = "nnapi"
    precisions: tuple[str, ...] = ("fp16", "fp32")

    def __init__(self, options: Mapping[str, object]) -> None:
        path, device = options.get("library", abi.LIBRARY), options.get("device", "")
        if not isinstance(path, str) or not isinstance(device, str):
            raise BadConfiguration("library and device are texts")

        self._wanted = wanted_share(options)
        self._library = abi.Library(path)
        devices = self._library.devices()
        self._device = _chosen(devices, device)
        self._reference = next((d for d in devices if d.kind == abi.DEVICE_CPU), None)
        self.engine = f"nnapi on {self._device.name}"
        self.engine_version = f"feature level {self._device.feature_level}"

    def identity(self) -> Mapping[str, str]:
        device = self._device
        kind = abi.DEVICE_TYPES.get(device.kind, "unknown")
        return {
            "device": f"{device.name} ({kind})",
            "driver": f"{device.name} {device.version}, feature level {device.feature_level}",
            "provider": self.name,
            "library": self._library.path,
        }

    def load(self, request: LoadRequest) -> Instance:
        """As the backend's; with `request.cache` a driver that can keeps its compilation there.

        Drivers do not tell whether they found one, so it never says that it is not prepared.
        """
        description = describe(request)
        info = description.info
        if info.state:
            raise UnsupportedModel("the model keeps variables between runs, NNAPI cannot")

        dynamic = [spec.name for spec in info.outputs if spec.dynamic]
        if dynamic:
            raise UnsupportedModel(f"the size of output {dynamic[0]!r} depends on the input")

        precision = DEFAULT_PRECISION if request.precision == "auto" else request.precision
        graph = _graph(request, description)
        model = NnapiModel(self._library, graph, relaxed=precision == "fp16")
        try:
            coverage, devices = self._coverage(model, graph, request)
            token = hashlib.sha256(
                repr((sorted(self.identity().items()), precision)).encode()
            ).digest()
            compilation = Compilation(
                self._library, model, devices, (request.cache, token) if request.cache else None
            )
        except (DriverError, SwitchgearError):
            model.close()
            raise

        own = "int8" if description.precision == "int8" else precision
        return NnapiInstance(self._library, compilation, info, own, coverage)

    def close(self) -> None:
        # The library stays: drivers do not expect to be unloaded.
        pass

    def _coverage(
        self, model: NnapiModel, graph: Graph, request: LoadRequest
    ) -> tuple[Coverage, list[abi.Device]]:
        supported = (ctypes.c_bool * len(model.nodes))()
        self._library.call(
            "Model_getSupportedOperationsForDevices",
            model.handle,
            abi.pointers([self._device.handle]),
            1,
            supported,
        )
        left = {node for node, ok in zip(model.nodes, supported, strict=True) if not ok}
        # What was done with the constants at load is no work for the device.
        taken = [node for node in range(len(graph.operators)) if node not in left]
        coverage = coverage_of(taken, arithmetic_of(request.path))
        names = Counter(graph.operators[node].name for node in left)
        check_coverage(coverage, self._wanted, names)
        if not left:
            return coverage, [self._device]

        if self._reference is None:
            raise UnsupportedModel(
                f"{coverage.nodes} of {coverage.nodes_total} nodes run on the device, and the "
                f"runtime has no CPU for {', '.join(sorted(names))}"
            )

        return coverage, [self._device, self._reference]


class Compilation:
    """A compiled model; it owns the model. `close` frees both.

    :raises DriverError: the driver refuses it.
    """

    def __init__(
        self,
        library: abi.Library,
        model: NnapiModel,
        devices: list[abi.Device],
        cache: tuple[str, bytes] | None,
    ) -> None:
        self._library = library
        self._model = model
        self._devices = devices
        self._cache = cache
        self.handle = 0
        self._compile()

    @property
    def timed(self) -> bool:
        """Whether runs can be timed: on a single device only."""
        return len(self._devices) == 1

    def rebuild(self) -> None:
        """Compiles anew, after the driver's process has died; blocks, raises DriverError."""
        self._library.free("Compilation", self.handle)
        self.handle = 0
        self._compile()

    def close(self) -> None:
        if self.handle:
            self._library.free("Compilation", self.handle)
            self.handle = 0

        self._model.close()

    def _compile(self) -> None:
        library = self._library
        handles = abi.pointers([device.handle for device in self._devices])
        handle = library.create(
            "Compilation_createForDevices", self._model.handle, handles, len(self._devices)
        )
        try:
            library.call("Compilation_setPreference", handle, abi.PREFER_SUSTAINED_SPEED)
            if self._cache is not None:
                folder, token = self._cache
                library.call("Compilation_setCaching", handle, folder.encode(), token)

            library.call("Compilation_finish", handle)
        except DriverError:
            library.free("Compilation", handle)
            raise

        self.handle = handle


class NnapiInstance:
    """A compiled model. The driver reads and writes the slots' memory itself."""

    def __init__(
        self,
        library: abi.Library,
        compilation: Compilation,
        info: ModelInfo,
        precision: str,
        coverage: Coverage,
    ) -> None:
        self.info = info
        self.precision = precision
        self.coverage = coverage
        # Of the last run on the hardware itself, in nanoseconds; None where it is not told.
        self.duration_ns: int | None = None
        self._library = library
        self._compilation = compilation
        self._dead = False
        self._entries = tuple(
            SlotEntry(spec.dtype, spec.shape, spec.capacity_bytes) for spec in info.outputs
        )

    def attach_input(self, tensors: Sequence[memoryview]) -> object:
        arrays = []
        for spec, memory in zip(self.info.inputs, tensors, strict=True):
            if len(memory) != spec.capacity_bytes:
                raise ValueError(f"input {spec.name!r} has {len(memory)} bytes")

            arrays.append(np.frombuffer(memory, np.uint8))

        return [(array.ctypes.data, array.nbytes, array) for array in arrays]

    def attach_output(self, tensors: Sequence[memoryview]) -> object:
        arrays = []
        for spec, memory in zip(self.info.outputs, tensors, strict=True):
            if len(memory) < spec.capacity_bytes:
                raise ValueError(f"output {spec.name!r} has {len(memory)} bytes")

            arrays.append(np.frombuffer(memory[: spec.capacity_bytes], np.uint8))

        return [(array.ctypes.data, array.nbytes, array) for array in arrays]

    def run(self, source: object, target: object) -> Sequence[SlotEntry]:
        inputs = cast("list[tuple[int, int, object]]", source)
        outputs = cast("list[tuple[int, int, object]]", target)
        library, compilation = self._library, self._compilation
        if self._dead:
            compilation.rebuild()
            self._dead = False

        execution = library.create("Execution_create", compilation.handle)
        try:
            for index, (address, size, _) in enumerate(inputs):
                library.call("Execution_setInput", execution, index, None, address, size)

            for index, (address, size, _) in enumerate(outputs):
                library.call("Execution_setOutput", execution, index, None, address, size)

            if compilation.timed:
                library.call("Execution_setMeasureTiming", execution, True)

            library.call("Execution_compute", execution)
            self.duration_ns = self._duration(execution) if compilation.timed else None
        except DriverError as error:
            # The next run starts with a new compilation.
            self._dead = error.code == _DEAD_OBJECT
            raise
        finally:
            library.free("Execution", execution)

        return self._entries

    def reset(self) -> None:
        # A model that keeps state is refused at load.
        pass

    def close(self) -> None:
        self._compilation.close()

    def _duration(self, execution: int) -> int | None:
        took = ctypes.c_uint64()
        self._library.call(
            "Execution_getDuration", execution, abi.DURATION_ON_HARDWARE, ctypes.byref(took)
        )
        return None if took.value == abi.NO_DURATION else took.value


def _chosen(devices: list[abi.Device], name: str) -> abi.Device:
    for device in devices:
        if device.name == name or (not name and device.kind == abi.DEVICE_ACCELERATOR):
            return device

    have = ", ".join(f"{d.name} ({abi.DEVICE_TYPES.get(d.kind, 'unknown')})" for d in devices)
    wanted = f"no device {name!r}" if name else "no accelerator"
    raise DriverError(
        "errno", errno.ENODEV, "ENODEV", f"NNAPI has {wanted}; it has {have or 'no device'}"
    )


def _graph(request: LoadRequest, description: Description) -> Graph:
    # Late: the reader needs the engine's schema.
    from switchgear.backends.opencl.graph import read_graph, with_shapes

    with open(request.path, "rb") as file:
        # The graph's constants are views of it and keep it mapped.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    graph = read_graph(memoryview(data))
    specs = zip(description.inputs, description.info.inputs, strict=True)
    return with_shapes(graph, {index: spec.shape for index, spec in specs})
