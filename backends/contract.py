"""The contract between a worker and a backend.

A backend lives in a worker process only. Third-party backends implement `Backend` and register
it in the entry-point group `switchgear.backends`; `CONTRACT_VERSION` is what they were written
for. Everything here runs on the worker's one thread and may block: a hang is ended from outside
by killing the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from switchgear.ipc.slot import SlotEntry, TensorSpec

CONTRACT_VERSION: Final = 1

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What to load.

    `path` is a file this process may open and map (often of `/proc/self/fd`); its bytes never
    change. `shapes` overrides input shapes by tensor name. `cache` is the folder of this
    model's prepared files, empty for none. Only a preparer sets `compile`: without it a backend
    that would need its compiler raises `NotPrepared` instead. `tune_s` is the time that a
    search for faster kernels may take there, in seconds.
    """

    path: str
    precision: str = "auto"
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    cache: str = ""
    compile: bool = False
    tune_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model takes and gives, with the names that an app uses.

    `names` is where those names come from: "signature" or "tensors". `state` says that the
    model keeps variables between runs. `operators` counts operators by name.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    names: str
    state: bool
    operators: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of a model runs on the backend's own device; the rest runs on the CPU.

    `arithmetic` is the share of the multiply-adds, 0 to 1.
    """

    nodes: int
    nodes_total: int
    arithmetic: float


class Instance(Protocol):
    """A loaded model, ready to run. Tensors follow the order of `info`."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def precision(self) -> str:
        """The arithmetic it computes in: fp32, fp16, int8 or int4."""
        ...

    @property
    def coverage(self) -> Coverage: ...

    def attach_input(self, tensors: Sequence[memoryview]) -> object:
        """Prepares an input slot, given the bytes of each tensor in shared memory.

        The handle keeps the memory alive and is passed to `run`. A backend that can reads from
        this memory directly. It may change under the backend at any time.

        :raises ValueError: a tensor's length does not fit.
        """
        ...

    def attach_output(self, tensors: Sequence[memoryview]) -> object:
        """Prepares an output slot, like `attach_input`; a tensor may have room to spare."""
        ...

    def run(self, source: object, target: object) -> Sequence[SlotEntry]:
        """Runs once, blocking; returns what was written to each output.

        :raises DriverError: the engine or the driver failed.
        :raises OutputTooLarge: an output does not fit its room.
        """
        ...

    def reset(self) -> None:
        """Forgets all state: afterwards the instance is as if newly loaded.

        :raises DriverError: the engine failed; the instance is unusable.
        """
        ...

    def close(self) -> None:
        """Frees everything; never raises."""
        ...


class Backend(Protocol):
    """One way to run models, opened once in a worker."""

    name: str
    engine: str
    engine_version: str
    # What a load may ask for beside "auto", the fastest first.
    precisions: tuple[str, ...]

    def identity(self) -> Mapping[str, str]:
        """What the results depend on beside the model: always `device` and `driver` (name and
        version), more where there is more. Verdicts and caches are kept by it and by the
        engine's version; it blocks for a driver at most at the first call.

        :raises DriverError: there is no device.
        """
        ...

    def probe(self) -> str:
        """Runs something with a known answer; returns one line on what ran.

        :raises DriverError: it does not run here, with the reason.
        """
        ...

    def load(self, request: LoadRequest) -> Instance:
        """Loads a model, blocking.

        :raises DriverError: the engine refuses it.
        :raises BadShape: a shape is not one the model takes.
        :raises UnsupportedModel: it uses something the backend does not have.
        :raises NotPrepared: it has to be compiled first, and `compile` is not set.
        """
        ...

    def close(self) -> None:
        """Frees everything; never raises."""
        ...
