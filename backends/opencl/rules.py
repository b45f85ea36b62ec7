"""How an operator becomes tinygrad calls: what a rule says of it, and what it may look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, dtypes

from switchgear.ipc.errors import BadModel, UnsupportedModel

if TYPE_CHECKING:
    from switchgear.backends.opencl.graph import (
        Graph,
        GraphTensor,
        Operator,
        OptionValue,
        Quantisation,
        Shape,
    )

# The dtypes that tensors have on the device, by numpy's name.
TYPES: Final[Mapping[str, Any]] = {
    "float32": dtypes.float32,
    "int8": dtypes.int8,
    "uint8": dtypes.uint8,
    "int16": dtypes.int16,
    "uint16": dtypes.uint16,
    "int32": dtypes.int32,
    "uint32": dtypes.uint32,
    "int64": dtypes.int64,
    "bool": dtypes.bool,
}

# Given (operator's index, x [rows, k], weight float32 [n, k]) a hook returns [rows, n], or None
# to have the product computed in float.
LinearHook = Callable[[int, Tensor, NDArray[np.float32]], Tensor | None]

# The tensor of one of the operator's inputs, by position; constants are placed on the device at
# their first use.
Inputs = Callable[[int], Tensor]
Apply = Callable[[Inputs], "Tensor | Sequence[Tensor]"]

FLOAT: Final = frozenset({"float32"})
QUANTISED: Final = frozenset({"int8", "uint8"})
WHOLE: Final = frozenset({"int32", "int64"})
NUMBERS: Final = FLOAT | QUANTISED | WHOLE
ANY: Final = NUMBERS | {"bool", "int16", "uint16", "uint32"}


@dataclass(frozen=True)
class Node:
    """One operator in its graph, as a rule sees it.

    `known` holds the tensors whose elements are known before the model runs: constants, and
    what was computed from them; the values are None where only that much is asked for.
    `shapes` are the shapes as computed so far; the file's stand in for others.
    `device` is where constants are placed, None for tinygrad's default; `placed` collects them.
    """

    graph: Graph
    index: int
    known: Mapping[int, NDArray[Any] | None]
    shapes: Mapping[int, Shape] = field(default_factory=dict)
    device: str | None = None
    linear: LinearHook | None = None
    placed: list[Tensor] = field(default_factory=list)

    @property
    def operator(self) -> Operator:
        return self.graph.operators[self.index]

    @property
    def count(self) -> int:
        """Number of inputs that the file lists."""
        return len(self.operator.inputs)

    def has(self, position: int) -> bool:
        """Whether this input is given: optional ones may be left out."""
        return position < self.count and self.operator.inputs[position] >= 0

    def tensor(self, position: int) -> GraphTensor:
        """The file's tensor at an input.

        :raises BadModel: the operator lacks this input.
        """
        if not self.has(position):
            raise BadModel(f"{self.title} lacks its input {position}")

        return self.graph.tensors[self.operator.inputs[position]]

    def result(self, position: int = 0) -> GraphTensor:
        """The file's tensor at an output."""
        if position >= len(self.operator.outputs):
            raise BadModel(f"{self.title} lacks its output {position}")

        return self.graph.tensors[self.operator.outputs[position]]

    def shape(self, position: int, *, rank: int | None = None) -> Shape:
        """The shape of an input, of `rank` dimensions where that is given."""
        shape = self.tensor(position).shape
        shape = self.shapes.get(self.operator.inputs[position], shape)
        if rank is not None and len(shape) != rank:
            raise UnsupportedModel(
                f"{self.title}: its input {position} has {len(shape)} dimensions, not {rank}"
            )

        return shape

    def dtype(self, position: int) -> str:
        return self.tensor(position).dtype

    @property
    def quantised(self) -> bool:
        """Whether it computes on quantised values: its first input and output are stored so."""
        tensors = (self.tensor(0), self.result())
        return all(t.dtype in QUANTISED and t.quantisation is not None for t in tensors)

    def quantisation(self, tensor: GraphTensor) -> Quantisation:
        """:raises BadModel: the tensor has none."""
        if tensor.quantisation is None:
            raise BadModel(f"{self.title}: tensor {tensor.name} has no scale")

        return tensor.quantisation

    def is_known(self, position: int) -> bool:
        return self.has(position) and self.operator.inputs[position] in self.known

    def constant(self, position: int) -> NDArray[Any]:
        """The elements of an input that must be known before the model runs, in its shape.

        :raises UnsupportedModel: they are computed from the model's inputs.
        """
        tensor = self.tensor(position)
        value = self.known.get(self.operator.inputs[position])
        if value is None:
            raise UnsupportedModel(
                f"{self.title}: its input {position} ({tensor.name}) is computed at run time"
            )

        return value

    def numbers(self, position: int) -> tuple[int, ...]:
        """The elements of a constant of whole numbers, flat."""
        value = self.constant(position).reshape(-1)
        if value.dtype.kind not in "iu":
            raise BadModel(f"{self.title}: its input {position} holds no whole numbers")

        return tuple(int(element) for element in value)

    def option(self, name: str, default: int = 0) -> int:
        """A whole number of its options."""
        value: OptionValue = self.operator.options.get(name, default)
        return int(value) if isinstance(value, int | float) else default

    def place(self, value: NDArray[Any]) -> Tensor:
        """A constant for the device; all are copied at once when the model is built."""
        flat = flat_tensor(value, self.device)
        self.placed.append(flat)
        return flat.reshape(value.shape)

    @property
    def title(self) -> str:
        """The operator's name and number, for messages."""
        return f"operator {self.index} ({self.operator.name})"

    def axis(self, axis: int, rank: int) -> int:
        """An axis counted from the front.

        :raises BadModel: there is none such.
        """
        if not -rank <= axis < rank:
            raise BadModel(f"{self.title} names axis {axis} of {rank}")

        return axis % rank if rank else 0


@dataclass(frozen=True, slots=True)
class Rule:
    """What is known of an operator.

    `version` is the newest that is understood. `dtypes` are those of the inputs at `data`.
    Inputs at `constants` must be known before the model runs. `refuse` returns why this one
    is not possible, empty when it is; it may raise like `prepare`, which does everything that
    is done once and returns what is done in each run. `static`: the result depends on shapes
    only, so it is known before the model runs.
    """

    prepare: Callable[[Node], Apply]
    version: int = 1
    dtypes: frozenset[str] = FLOAT
    data: tuple[int, ...] = (0,)
    constants: tuple[int, ...] = ()
    static: bool = False
    refuse: Callable[[Node], str] = field(default=lambda node: "")


def on_device(value: NDArray[Any], device: str | None) -> Tensor:
    """A realised Tensor of an array's elements; blocks for the copy."""
    return flat_tensor(value, device).realize().reshape(value.shape)


def flat_tensor(value: NDArray[Any], device: str | None) -> Tensor:
    """A Tensor of an array's elements, flat, not realised."""
    # A copy: tinygrad takes no views of read-only memory. Flat: it would make a single number
    # part of the kernels instead, which has no device.
    return Tensor(np.array(value, order="C").reshape(-1), device=device)


def volume(shape: Sequence[int]) -> int:
    """Number of elements of a shape."""
    return math.prod(shape)
