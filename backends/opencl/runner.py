"""Runs artefacts on arrays: first dispatches, checks and comparisons."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from switchgear.backends.opencl.artefact import Artefact
from switchgear.backends.opencl.compiler import with_binary
from switchgear.backends.opencl.replay import Replay

if TYPE_CHECKING:
    from switchgear.backends.opencl.device import Device
    from switchgear.ipc.slot import TensorSpec

Array = np.ndarray[Any, Any]
# Runs of each artefact that are compared, one after the other in turns.
_COMPARED_RUNS: Final = 15
_SEED: Final = 4
# Of the largest value: what another order of the same sums makes.
_ROUNDING: Final = 1e-4


class Runner:
    """Runs a replay on arrays."""

    def __init__(self, replay: Replay, artefact: Artefact) -> None:
        info = artefact.info
        self._replay = replay
        self._inputs = [np.zeros(spec.shape, spec.dtype) for spec in info.inputs]
        self._outputs = [np.zeros(spec.shape, spec.dtype) for spec in info.outputs]
        self._source = replay.attach([bytes_of(a) for a in self._inputs], artefact.inputs)
        self._target = replay.attach([bytes_of(a) for a in self._outputs], artefact.outputs)

    def run(self, values: Sequence[Array]) -> list[Array]:
        """The outputs, copied."""
        for mine, given in zip(self._inputs, values, strict=True):
            mine[...] = given

        self.again()
        return [output.copy() for output in self._outputs]

    def again(self) -> None:
        """Once more on the last inputs."""
        self._replay.run(self._source, self._target)


def bytes_of(array: Array) -> memoryview:
    """The memory of a contiguous array."""
    return array.reshape(-1).data.cast("B")


def zeros(spec: TensorSpec) -> Array:
    """A tensor of zeros."""
    return np.zeros(spec.shape, spec.dtype)


def dispatched(device: Device, artefact: Artefact) -> Artefact:
    """The artefact with its program's binary, after a run with the real sizes.

    :raises DriverError: it does not run.
    """
    with contextlib.closing(Replay(device, artefact)) as replay:
        Runner(replay, artefact).run([zeros(spec) for spec in artefact.info.inputs])
        return with_binary(artefact, replay)


def compared_ms(device: Device, artefacts: Sequence[Artefact]) -> list[float]:
    """The median time of a run of each, in milliseconds, taken in turns."""
    with contextlib.ExitStack() as stack:
        runners = []
        for artefact in artefacts:
            replay = stack.enter_context(contextlib.closing(Replay(device, artefact)))
            runners.append(Runner(replay, artefact))
            runners[-1].run([zeros(spec) for spec in artefact.info.inputs])

        times_ms: list[list[float]] = [[] for _ in runners]
        for _ in range(_COMPARED_RUNS):
            for runner, times in zip(runners, times_ms, strict=True):
                begin = time.perf_counter()
                runner.again()
                times.append((time.perf_counter() - begin) * 1e3)

    return [statistics.median(times) for times in times_ms]


def same_answers(device: Device, one: Artefact, other: Artefact) -> bool:
    """Whether both say the same to random inputs, but for rounding."""
    rng = np.random.default_rng(_SEED)
    values = [_random(spec, rng) for spec in one.info.inputs]
    answers = []
    for artefact in (one, other):
        with contextlib.closing(Replay(device, artefact)) as replay:
            answers.append(Runner(replay, artefact).run(values))

    return all(_alike(*pair) for pair in zip(*answers, strict=True))


def _random(spec: TensorSpec, rng: np.random.Generator) -> Array:
    if spec.dtype.startswith("float"):
        return rng.standard_normal(spec.shape).astype(spec.dtype)

    # 0 and 1 are places in any table.
    return rng.integers(0, 2, spec.shape).astype(spec.dtype)


def _alike(one: Array, other: Array) -> bool:
    if one.dtype.kind != "f":
        return bool(np.array_equal(one, other))

    largest = float(np.abs(one).max(initial=0))
    return bool(np.allclose(one, other, rtol=0, atol=_ROUNDING * largest, equal_nan=True))
