"""The reference: the CPU's answers to the check's inputs, by the engine's built-in kernels.

Not by XNNPACK, which is what the cpu backend serves with: so the cpu backend itself can be
checked too, an error of XNNPACK does not become the truth, and quantised models are computed as
their format defines them. XNNPACK's answers are taken beside them: how far the two differ is
how well the model can be computed at all. A few models have operators that XNNPACK alone takes;
it is their reference then. Weights of 8 bits beside float activations are taken as floats
(`dequantised`).

An image in floats may be meant to be in [-1, 1] or in [0, 1], and the file does not say which.
A model for [0, 1] can answer the other with values hundreds of times its usual ones, which no
fp16 holds. So where the answers to the [-1, 1] patterns are more than 4 times as large as those
to the [0, 1] ones, all patterns are given in [0, 1].
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from switchgear.backends.contract import Instance, LoadRequest, ModelInfo, Shape
from switchgear.backends.cpu import CpuBackend
from switchgear.backends.known_answer.dequantised import dequantised, has_dynamic_range
from switchgear.backends.known_answer.inputs import (
    COUNT,
    SIGNED_IMAGES,
    InputFacts,
    known_inputs,
    role_of,
)
from switchgear.backends.trial import FIRST_ROOM_BYTES
from switchgear.ipc.errors import DriverError, OutputTooLarge, UnsupportedModel

Array = np.ndarray[Any, Any]

# Operators and the place of their table and of the index among their inputs.
_LOOKUPS: Final = {
    "GATHER": (0, 1),
    "GATHER_ND": (0, 1),
    "EMBEDDING_LOOKUP": (1, 0),
}
# For integers that the engine refuses, an index beyond its table or a shape that does not fit:
# the same as bits, all zero, all one.
_REPLACEMENTS: Final[tuple[Callable[[Array], Array], ...]] = (
    lambda values: values % 2,
    np.zeros_like,
    np.ones_like,
)
_8_BIT: Final = ("int8", "uint8")
# How many times larger the answers to [-1, 1] are where a model is meant for [0, 1]: of the
# models tried 9 to 400 times, where it is not at most 1.5 times.
_OUT_OF_RANGE: Final = 4


class ReferenceBackend(CpuBackend):
    """The CPU without XNNPACK."""

    def interpreter(self, path: str, *, delegates: bool = True) -> Any:
        return super().interpreter(path, delegates=False)


@dataclass(frozen=True, slots=True)
class OutputFacts:
    """What is known of an output. `step` is one step of its 8-bit quantisation.

    In the output's own numbers: 1 where it holds the integers themselves, the scale where
    they are given as floats; 0 where it is not quantised.
    """

    name: str
    dtype: str
    step: float = 0.0


@dataclass(frozen=True, slots=True)
class Reference:
    """`answers[run][output]` to `inputs[run][input]`, by the `kernels` named.

    `other_answers` are XNNPACK's, None where these are. `quantised` says that the model
    computes with 8-bit activations.
    """

    info: ModelInfo
    inputs: list[list[Array]]
    answers: list[list[Array]]
    outputs: tuple[OutputFacts, ...]
    quantised: bool
    kernels: str = "built-in"
    other_answers: list[list[Array]] | None = None


def compute_reference(path: str, shapes: Mapping[str, Shape], threads: int = 1) -> Reference:
    """Runs the model at `path` on all inputs, twice; blocks.

    Where the engine refuses integers of our choice, smaller ones take their place.

    :raises DriverError: the engine refuses every choice.
    :raises SwitchgearError: as the cpu backend's `load`.
    """
    with _meant(path) as (meant, suffix):
        return _computed(LoadRequest(meant, "auto", shapes), threads, suffix)


@contextlib.contextmanager
def _meant(path: str) -> Iterator[tuple[str, str]]:
    """The file that says what the model means, and what to add to the kernels' name."""
    with contextlib.suppress(UnsupportedModel):
        if has_dynamic_range(ReferenceBackend({}).interpreter(path)):
            with open(path, "rb") as file:
                floats = dequantised(file.read())

            if floats is not None:
                with open(os.memfd_create("dequantised"), "r+b", buffering=0) as copy:
                    copy.write(floats)
                    yield f"/proc/self/fd/{copy.fileno()}", ", weights as floats"
                    return

    yield path, ""


def _computed(request: LoadRequest, threads: int, suffix: str) -> Reference:
    backend: CpuBackend = ReferenceBackend({"threads": threads})
    serving = CpuBackend({"threads": threads})
    kernels = "built-in"
    try:
        instance = backend.load(request)
    except UnsupportedModel:
        backend, kernels = serving, "xnnpack"
        instance = backend.load(request)

    try:
        interpreter = backend.interpreter(request.path)
        facts = _inputs_of(instance.info, interpreter)
        inputs, answers = _answers(instance, facts)
    finally:
        instance.close()

    others = None
    if kernels == "built-in":
        instance = serving.load(request)
        try:
            others = [run_once(instance, values) for values in inputs]
        except DriverError:
            # What the built-in kernels take is the model's meaning.
            others = None
        finally:
            instance.close()

    return Reference(
        instance.info,
        inputs,
        answers,
        _outputs_of(instance.info, interpreter),
        _quantised(interpreter),
        kernels + suffix,
        others,
    )


def _answers(
    instance: Instance, facts: Sequence[InputFacts]
) -> tuple[list[list[Array]], list[list[Array]]]:
    """The inputs in the range that the model is meant for, and the answers to them."""
    inputs = known_inputs(facts)
    answers = [_run_or_replace(instance, values, facts) for values in inputs]
    if not any(role_of(each) == "image" and each.dtype.startswith("float") for each in facts):
        return inputs, answers

    largest = [max((_largest(output) for output in answer), default=0.0) for answer in answers]
    signed = [largest[run] for run in range(COUNT) if run in SIGNED_IMAGES]
    unit = [largest[run] for run in range(COUNT) if run not in SIGNED_IMAGES]
    if statistics.median(signed) <= _OUT_OF_RANGE * statistics.median(unit):
        return inputs, answers

    inputs = known_inputs(facts, images_in_unit_range=True)
    return inputs, [_run_or_replace(instance, values, facts) for values in inputs]


def _largest(values: Array) -> float:
    if not values.size:
        return 0.0

    return float(np.abs(np.nan_to_num(values.astype(np.float64), posinf=0, neginf=0)).max())


def run_once(instance: Instance, values: Sequence[Array]) -> list[Array]:
    """One run on these arrays; the outputs, copied, in the shapes that came out.

    :raises DriverError: the engine or the driver failed.
    """
    sources = [memoryview(bytearray(np.ascontiguousarray(v).tobytes())) for v in values]
    room = FIRST_ROOM_BYTES
    while True:
        sizes = [
            max(spec.capacity_bytes, room if spec.dynamic else 0)
            for spec in instance.info.outputs
        ]
        targets = [memoryview(bytearray(size)) for size in sizes]
        try:
            entries = instance.run(
                instance.attach_input(sources), instance.attach_output(targets)
            )
        except OutputTooLarge as error:
            needed = error.details.get("bytes_needed")
            if not isinstance(needed, int) or needed <= room:
                raise

            room = needed
            continue

        return [
            np.frombuffer(memory[: entry.length], entry.dtype).reshape(entry.shape)
            for memory, entry in zip(targets, entries, strict=True)
        ]


def _run_or_replace(
    instance: Instance, values: list[Array], facts: Sequence[InputFacts]
) -> list[Array]:
    """The answer; integers that the engine refuses are replaced in `values`."""
    try:
        return run_once(instance, values)
    except DriverError as error:
        # A copy: the traceback of the first one would keep the interpreter in a cycle.
        first = DriverError(error.domain, error.code, error.name, error.text)

    replaceable = [
        position
        for position, each in enumerate(facts)
        if each.dtype.startswith(("int", "uint")) and not each.scale
    ]
    wanted = {position: values[position] for position in replaceable}
    for replace in _REPLACEMENTS if replaceable else ():
        for position in replaceable:
            values[position] = replace(wanted[position])

        try:
            return run_once(instance, values)
        except DriverError:
            continue

    raise first


def _inputs_of(info: ModelInfo, interpreter: Any) -> list[InputFacts]:
    limits = _index_limits(interpreter)
    found = []
    for spec, details in zip(info.inputs, interpreter.get_input_details(), strict=True):
        scale, zero_point = details["quantization"]
        found.append(
            InputFacts(
                spec.name,
                spec.dtype,
                spec.shape,
                float(scale),
                int(zero_point),
                limits.get(int(details["index"]), 0),
            )
        )

    return found


def _index_limits(interpreter: Any) -> dict[int, int]:
    """The rows of the smallest table that a tensor indexes, by tensor number.

    A table that is indexed along another axis may have fewer: the engine refuses these then.
    """
    shapes = {int(d["index"]): d["shape"] for d in interpreter.get_tensor_details()}
    limits: dict[int, int] = {}
    for operator in interpreter._get_ops_details():
        if operator["op_name"] not in _LOOKUPS:
            continue

        table, index = (int(operator["inputs"][n]) for n in _LOOKUPS[operator["op_name"]])
        sizes = [int(size) for size in shapes.get(table, ())]
        if not sizes:
            continue

        rows = min(sizes) if operator["op_name"] == "GATHER_ND" else sizes[0]
        limits[index] = min(limits.get(index, rows), rows)

    return limits


def _outputs_of(info: ModelInfo, interpreter: Any) -> tuple[OutputFacts, ...]:
    scales = {int(d["index"]): d for d in interpreter.get_tensor_details()}
    made_from = {
        int(operator["outputs"][0]): int(operator["inputs"][0])
        for operator in interpreter._get_ops_details()
        if operator["op_name"] == "DEQUANTIZE"
    }
    found = []
    for spec, details in zip(info.outputs, interpreter.get_output_details(), strict=True):
        index = int(details["index"])
        step = 0.0
        if spec.dtype in _8_BIT:
            step = 1.0
        elif index in made_from:
            source = scales[made_from[index]]
            if np.dtype(source["dtype"]).name in _8_BIT:
                step = float(source["quantization"][0])

        found.append(OutputFacts(spec.name, spec.dtype, step))

    return tuple(found)


def _quantised(interpreter: Any) -> bool:
    """Whether an operator writes an 8-bit tensor with a quantisation."""
    written = {
        int(index)
        for operator in interpreter._get_ops_details()
        for index in operator["outputs"]
    }
    return any(
        int(d["index"]) in written
        and np.dtype(d["dtype"]).name in _8_BIT
        and d["quantization"][0]
        for d in interpreter.get_tensor_details()
    )
