"""A model in LiteRT's compiled form, on one accelerator alone.

Never on two: with the CPU beside the GPU LiteRT gives wrong numbers for some models, and says
of everything that it is accelerated. All uses of the package's private names stand here.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np

from switchgear.backends.contract import Coverage, ModelInfo, Shape
from switchgear.backends.litert.said import Said, reasons
from switchgear.backends.litert.status import driver_error, own_words
from switchgear.ipc.errors import DriverError, SwitchgearError, UnsupportedModel
from switchgear.ipc.slot import SlotEntry

if TYPE_CHECKING:
    from switchgear.backends.litert.description import Description
    from switchgear.ipc.slot import TensorSpec

_T = TypeVar("_T")

# The element types that the package's buffers take.
ELEMENT_TYPES: Final = frozenset({"float32", "int32", "int8", "uint8", "bool"})
_LISTED: Final = re.compile(
    r"Following operations are not supported by \w+ delegate:\n(?P<lines>(?:.+: .+\n)+)"
)
# What a compiler plugin says to have taken of the main graph.
PARTITIONED: Final = re.compile(
    r"Partitioned subgraph<0>, selected (?P<taken>\d+) ops, from a total of (?P<total>\d+) ops"
)
# What a compiler plugin's failure looks like: the model is then left as it was.
_NO_PLUGIN_WORKED: Final = "0 compiler plugins were applied successfully"
_NOT_ALL: Final = "Some ops are not accelerated"
# The engine stops at the first operators that it lacks; a model may have many kinds.
MAX_LISTED: Final = 20
DEVICE_LOST: Final = "VK_ERROR_DEVICE_LOST"
TIMED_OUT: Final = "kLiteRtStatusErrorTimeoutExpired"
# Each waits two minutes.
MAX_FIRST_RUNS: Final = 30
# Without a folder the package tries every vendor's plugins that it ships.
NO_PLUGINS: Final = "/nonexistent"


class Engine:
    """One environment of LiteRT, shared by the models of a backend.

    `plugins` are the folders of an NPU's plugins: `compiler_plugin_path` and
    `dispatch_library_path`.

    :raises DriverError: the package is missing or cannot be loaded, or the environment fails.
    """

    def __init__(self, plugins: Mapping[str, str] | None = None) -> None:
        try:
            self.package: Any = importlib.import_module("ai_edge_litert.compiled_model")
            self._buffers: Any = importlib.import_module("ai_edge_litert.tensor_buffer")._tb
        except Exception as error:  # an extension built for another numpy raises anything
            raise DriverError("errno", 2, "ENOENT", f"ai-edge-litert: {error}") from None

        from importlib.metadata import version

        self.version = version("ai-edge-litert")
        self.write: Any = self._buffers.WriteTensorBuffer
        self.read: Any = self._buffers.ReadTensorToBuffer
        self.said = Said()
        self._environment: Any = None
        # Once lost, a device answers nothing more in this process.
        self.lost: DriverError | None = None
        here = os.path.dirname(str(self.package.__file__))
        self._folders = {
            "runtime_path": here,
            "compiler_plugin_path": NO_PLUGINS,
            "dispatch_library_path": NO_PLUGINS,
            **(plugins or {}),
        }

    def environment(self) -> Any:
        if self._environment is None:
            options = self.package.EnvironmentOptions(**self._folders)
            self._environment = self.call(
                lambda: self.package.Environment.create(options=options)
            )

        return self._environment

    def compile(self, path: str, options: Any) -> tuple[Any, str]:
        """The compiled model of a file and what was said meanwhile; blocks, minutes when cold.

        :raises UnsupportedModel: the accelerator does not run all of its operators.
        :raises DriverError: anything else.
        """
        if self.lost is not None:
            raise self.lost

        environment = self.environment()
        try:
            with self.said.listening():
                model = self.package.CompiledModel.from_file(
                    path, environment=environment, options=options
                )
        except (RuntimeError, ValueError, OSError) as error:
            raise refusal(error, self.said.take()) from None

        return model, self.said.take()

    def close(self) -> None:
        self._environment = None
        self.said.close()

    def call(self, call: Callable[[], _T]) -> _T:
        """The result of `call`, whose failure is told with what was said meanwhile.

        :raises DriverError: it failed.
        """
        try:
            with self.said.listening():
                return call()
        except (RuntimeError, ValueError, OSError) as error:
            raise driver_error(error, self.said.take()) from None
        finally:
            self.said.take()


def refusal(error: BaseException, said: str) -> DriverError | SwitchgearError:
    """What a failed compilation means, from its exception and standard error."""
    if _NOT_ALL not in str(error):
        return driver_error(error, said)

    if _NO_PLUGIN_WORKED in said:
        text = "; ".join(reasons(said))[:2000]
        return DriverError("litert", 504, "kLiteRtStatusErrorCompilation", text)

    listed = [
        line.partition(": ")
        for found in _LISTED.finditer(said)
        for line in found["lines"].splitlines()
    ]
    by_name = {name.strip(): why.strip() for name, _, why in listed}
    if not by_name:
        part = PARTITIONED.search(said)
        if part is not None:
            return UnsupportedModel(
                f"{part['taken']} of {part['total']} nodes run on the accelerator"
            )

        return UnsupportedModel(driver_error(error, said).text)

    names = sorted(by_name)[:MAX_LISTED]
    text = "; ".join(f"{name} ({by_name[name]})" for name in names)
    more = f" and {len(by_name) - MAX_LISTED} more" if len(by_name) > MAX_LISTED else ""
    return UnsupportedModel(f"the accelerator does not run {text}{more}"[:2000])


def buffer_types(model: Any) -> set[int]:
    """The memory types (LiteRtTensorBufferType) that the model's inputs and outputs take."""
    types: set[int] = set()
    signature = model.get_signature_by_index(0)
    for index in range(len(signature["inputs"])):
        types |= set(model.get_input_buffer_requirements(index)["supported_types"])

    for index in range(len(signature["outputs"])):
        types |= set(model.get_output_buffer_requirements(index)["supported_types"])

    return types


class CompiledInstance:
    """A compiled model with buffers of its own, as a backend's `Instance`.

    `run` copies the inputs to the device, waits for the result and copies it back.

    :raises UnsupportedModel: the engine sees other tensors than the CPU.
    :raises DriverError: there is no memory for the buffers.
    """

    def __init__(
        self,
        engine: Engine,
        description: Description,
        model: Any,
        precision: str,
        coverage: Coverage,
    ) -> None:
        self.info: ModelInfo = description.info
        self.precision = precision
        self.coverage = coverage
        key, signature = next(iter(model.get_signature_list().items()))
        in_places = places(
            signature["inputs"],
            model.get_input_tensor_details(key),
            self.info.inputs,
            description.inputs,
        )
        out_places = places(
            signature["outputs"],
            model.get_output_tensor_details(key),
            self.info.outputs,
            description.outputs,
        )
        inputs, outputs = engine.call(
            lambda: (model.create_input_buffers(0), model.create_output_buffers(0))
        )
        self._engine = engine
        self._warm = False
        # Each of these keeps its memory on the device.
        self._held: tuple[Any, ...] = (inputs, outputs)
        self._compiled: Any = model
        self._model: Any = model._model
        self._sources = [buffer.capsule for buffer in inputs]
        self._targets = [buffer.capsule for buffer in outputs]
        self._inputs = [
            (self._sources[place], spec.dtype)
            for place, spec in zip(in_places, self.info.inputs, strict=True)
        ]
        self._out_places = out_places
        self._outputs = self._placed_outputs()
        self._entries = tuple(
            SlotEntry(spec.dtype, spec.shape, spec.capacity_bytes) for spec in self.info.outputs
        )

    def attach_input(self, tensors: Sequence[memoryview]) -> object:
        arrays = []
        for spec, memory in zip(self.info.inputs, tensors, strict=True):
            if len(memory) != spec.capacity_bytes:
                raise ValueError(f"input {spec.name!r} has {len(memory)} bytes")

            arrays.append(np.frombuffer(memory, spec.dtype))

        return arrays

    def attach_output(self, tensors: Sequence[memoryview]) -> object:
        arrays = []
        for spec, memory in zip(self.info.outputs, tensors, strict=True):
            if len(memory) < spec.capacity_bytes:
                raise ValueError(f"output {spec.name!r} has {len(memory)} bytes")

            arrays.append(np.frombuffer(memory[: spec.capacity_bytes], spec.dtype))

        return arrays

    def run(self, source: object, target: object) -> Sequence[SlotEntry]:
        engine = self._engine
        if engine.lost is not None:
            raise engine.lost

        write, read = engine.write, engine.read
        engine.said.begin()
        try:
            for (capsule, dtype), array in zip(self._inputs, cast(Any, source), strict=True):
                write(capsule, array, dtype)

            self._model.RunByIndex(0, self._sources, self._targets)
            # The run is only queued: a read waits for it.
            for (capsule, dtype), array in zip(self._outputs, cast(Any, target), strict=True):
                read(capsule, array, dtype)
        except (RuntimeError, ValueError) as error:
            engine.said.end()
            failed = driver_error(error, engine.said.take())
            if failed.name == DEVICE_LOST:
                engine.lost = failed

            if self._warm or failed.name != TIMED_OUT:
                raise failed from None

            self._await_compiler(target)
        else:
            if engine.said.end():
                engine.said.take()

        self._warm = True
        return self._entries

    def _await_compiler(self, target: object) -> None:
        """Runs again until the driver's compiler is through with the first run.

        A read gives up after two minutes, in which a slow machine does not compile a model, and
        leaves its buffer locked: so each time the outputs get new ones. What is compiled stays
        so. Whoever runs a model for the first time limits the time from outside.

        :raises DriverError: it failed, or did not end in an hour.
        """
        engine = self._engine
        for left in reversed(range(MAX_FIRST_RUNS)):
            try:
                with engine.said.listening():
                    outputs = self._compiled.create_output_buffers(0)
                    self._held = (*self._held, outputs)
                    self._targets = [buffer.capsule for buffer in outputs]
                    self._outputs = self._placed_outputs()
                    self._model.RunByIndex(0, self._sources, self._targets)
                    for (capsule, dtype), array in zip(
                        self._outputs, cast(Any, target), strict=True
                    ):
                        engine.read(capsule, array, dtype)

                engine.said.take()
                return
            except (RuntimeError, ValueError) as error:
                failed = driver_error(error, engine.said.take())
                if failed.name != TIMED_OUT or not left:
                    raise failed from None

    def _placed_outputs(self) -> list[tuple[Any, str]]:
        return [
            (self._targets[place], spec.dtype)
            for place, spec in zip(self._out_places, self.info.outputs, strict=True)
        ]

    def reset(self) -> None:
        # A model that keeps state is refused at load.
        pass

    def close(self) -> None:
        self._model = self._compiled = None
        self._held = ()
        self._sources = []
        self._targets = []
        self._inputs = []
        self._outputs = []


def places(
    names: list[str],
    details: Mapping[str, Any],
    specs: Sequence[TensorSpec],
    numbers: Sequence[int],
) -> list[int]:
    """Where the engine has each tensor of the CPU's description.

    :raises UnsupportedModel: the two descriptions differ.
    """
    by_number = {int(details[name]["index"]): (i, name) for i, name in enumerate(names)}
    if len(by_number) != len(specs) or set(by_number) != set(numbers):
        raise UnsupportedModel(
            f"the engine sees the tensors {sorted(names)}, the CPU "
            f"{sorted(spec.name for spec in specs)}"
        )

    places = []
    for spec, number in zip(specs, numbers, strict=True):
        place, name = by_number[number]
        shape = tuple(int(size) for size in details[name]["shape"])
        dtype = str(details[name]["dtype"])
        if shape != spec.shape or dtype != spec.dtype:
            raise UnsupportedModel(
                f"the engine has {spec.name!r} as {dtype} {list(shape)}, the CPU as "
                f"{spec.dtype} {list(spec.shape)}"
            )

        places.append(place)

    return places


def check_plain(info: ModelInfo) -> None:
    """Refuses what no accelerator of this engine takes, before anything is compiled.

    :raises UnsupportedModel: it keeps state, or a tensor has an element type of no buffer.
    """
    if info.state:
        raise UnsupportedModel("the model keeps variables between runs, the engine cannot")

    for spec in (*info.inputs, *info.outputs):
        if spec.dtype not in ELEMENT_TYPES:
            raise UnsupportedModel(
                f"tensor {spec.name!r} is {spec.dtype}; the engine's buffers take "
                f"{', '.join(sorted(ELEMENT_TYPES))}"
            )

        if spec.dynamic:
            raise UnsupportedModel(f"the size of output {spec.name!r} depends on the input")


def resize(
    engine: Engine, model: Any, description: Description, shapes: Mapping[str, Shape]
) -> None:
    """Gives a compiled model the wanted input shapes.

    :raises UnsupportedModel: the engine cannot, with its reason.
    """
    key, signature = next(iter(model.get_signature_list().items()))
    details = model.get_input_tensor_details(key)
    places = {int(details[name]["index"]): i for i, name in enumerate(signature["inputs"])}
    for spec, number in zip(description.info.inputs, description.inputs, strict=True):
        wanted = shapes.get(spec.name)
        if wanted is None:
            continue

        try:
            with engine.said.listening():
                model.resize_input_tensor(places[number], list(wanted))
        except (RuntimeError, ValueError, KeyError) as error:
            why = "; ".join(own_words(error)) or str(error)
            raise UnsupportedModel(
                f"input {spec.name!r} cannot be {list(wanted)} on this engine: {why}"[:2000]
            ) from None
        finally:
            engine.said.take()
