"""How much of a model a device runs, of its operators and of its arithmetic."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any, Final

from switchgear.backends.contract import Coverage
from switchgear.ipc.errors import BadConfiguration, DriverError, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

DEFAULT_MIN_ARITHMETIC: Final = 0.8
MAX_NAMED: Final = 12


def arithmetic_of(path: str) -> tuple[int, ...]:
    """The multiply-adds of each operator of the main graph, in the file's order.

    Custom operators count as none: what they compute is not in the file.

    :raises DriverError: the file's tables cannot be read.
    """
    # Late: it needs the schema, which only one of the engines brings.
    from switchgear.backends.generate.cost import multiply_adds_by_operator

    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        try:
            return multiply_adds_by_operator(data)
        except ValueError as error:
            raise DriverError("tflite", 1, "ERROR", str(error)) from None


def nodes_in_partitions(
    operators: Sequence[Mapping[str, Any]], partitions: Sequence[Mapping[str, Any]]
) -> frozenset[int]:
    """Which operators run inside the nodes that a delegate has put in their place.

    Both are node descriptions with `inputs` and `outputs` (tensor numbers). A partition is what
    lies between its inputs and its outputs.
    """
    producer = {int(t): i for i, node in enumerate(operators) for t in node["outputs"]}
    taken: set[int] = set()
    for partition in partitions:
        inputs = {int(tensor) for tensor in partition["inputs"]}
        wanted = [int(tensor) for tensor in partition["outputs"]]
        while wanted:
            tensor = wanted.pop()
            node = producer.get(tensor)
            if node is None or tensor in inputs or node in taken:
                continue

            taken.add(node)
            wanted += [int(each) for each in operators[node]["inputs"]]

    return frozenset(taken)


def coverage_of(taken: Collection[int], arithmetic: Sequence[int]) -> Coverage:
    """The share of the operators `taken`; of the operators themselves where none multiplies."""
    total = sum(arithmetic)
    if total:
        share = sum(arithmetic[node] for node in taken) / total
    else:
        share = len(taken) / len(arithmetic) if arithmetic else 0.0

    return Coverage(len(taken), len(arithmetic), share)


def check_coverage(coverage: Coverage, wanted: float, left: Mapping[str, int]) -> None:
    """Refuses a model of which too little runs on the device.

    `left` counts the operators that do not, by name.

    :raises UnsupportedModel: with both figures and those names.
    """
    if coverage.nodes and coverage.arithmetic >= wanted:
        return

    names = sorted(left, key=lambda name: (-left[name], name))
    listed = ", ".join(f"{name} ({left[name]})" for name in names[:MAX_NAMED])
    raise UnsupportedModel(
        f"{coverage.nodes} of {coverage.nodes_total} nodes, {coverage.arithmetic:.2f} of the "
        f"arithmetic runs on the device; {wanted:g} is wanted; on the CPU: {listed}"[:2000]
    )


def wanted_share(options: Mapping[str, object]) -> float:
    """The option `min_arithmetic`, 0 to 1.

    :raises BadConfiguration: it is no such number.
    """
    value = options.get("min_arithmetic", DEFAULT_MIN_ARITHMETIC)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise BadConfiguration("min_arithmetic is a number from 0 to 1")

    return float(value)
