"""From a graph to tinygrad: which operators are missing, and the program of the rest.

Everything that does not depend on the model's inputs is done once, in `build`: half floats are
widened, sparse constants made dense, shapes computed, weights placed on the device. Only
tinygrad's public Tensor is used. The device is tinygrad's default one (`DEV=CL`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from tinygrad import Tensor

from switchgear.backends.opencl.operators import RULES
from switchgear.backends.opencl.operators.convolution import is_product
from switchgear.backends.opencl.rules import TYPES, Node, flat_tensor, on_device, volume
from switchgear.backends.opencl.sparse import dense
from switchgear.backends.opencl.weights import dequantised, unpacked
from switchgear.ipc.errors import BadModel, SwitchgearError, UnsupportedModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from switchgear.backends.opencl.graph import Graph, GraphTensor, Shape
    from switchgear.backends.opencl.rules import Apply, LinearHook, Rule

# Constants up to this size are computed element by element in Python, which needs no compiler.
_FOLDED_ELEMENTS: Final = 1 << 14
_FOLDING_DEVICE: Final = "PYTHON"
# Larger ones are refused: a few bytes of a file could ask for any amount.
_LARGEST_FOLDED: Final = 1 << 24
_LARGEST_SPARSE_BYTES: Final = 1 << 28
# What numpy and tinygrad raise where a file's numbers make no sense to them.
_NONSENSE: Final = (
    ArithmeticError,
    AssertionError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class LinearOperator:
    """A matrix product with known weights [n, k], for `rows` rows at a time.

    `first` and `last`: no other operator with weights stands between it and an input, or an
    output, in the file's order.
    """

    index: int
    n: int
    k: int
    rows: int
    multiply_adds: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class _Step:
    """An operator as it is run: what it does, which tensors it reads and writes."""

    apply: Apply
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Program:
    """A model as a function of tinygrad Tensors.

    `inputs` gives shape and dtype (numpy's name) of each. A call takes realised Tensors of the
    same and returns the lazy outputs in the graph's order; it computes nothing itself.
    """

    def __init__(
        self, graph: Graph, constants: Mapping[int, NDArray[Any] | None], device: str | None
    ) -> None:
        self.inputs: tuple[tuple[Shape, str], ...] = tuple(
            (graph.tensors[i].shape, graph.tensors[i].dtype) for i in graph.inputs
        )
        self._graph = graph
        self._steps: list[_Step] = []
        self._constants = constants
        self._device = device
        self._placed: dict[int, Tensor] = {}
        self._pending: list[Tensor] = []

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """:raises ValueError: a tensor is missing, or has not the shape of the file."""
        given = [tuple(tensor.shape) for tensor in tensors]
        if given != [shape for shape, _ in self.inputs]:
            raise ValueError(f"the program takes {self.inputs}, not {given}")

        values: dict[int, Tensor] = dict(zip(self._graph.inputs, tensors, strict=True))
        for step in self._steps:
            self._run(step, values)

        return [self._value(values, index) for index in self._graph.outputs]

    def append(self, step: _Step, values: dict[int, Tensor]) -> None:
        """Adds a step and runs it on `values`; used while the program is built."""
        self._steps.append(step)
        self._run(step, values)

    def place(self, constants: Sequence[Tensor]) -> None:
        """Copies these constants and its own to the device, blocking; ends the building."""
        for index in self._graph.outputs:
            if index in self._constants:
                self._value({}, index)

        pending = [*constants, *self._pending]
        self._pending = []
        # What a run needs has been placed by the first pass.
        self._constants = {}
        if pending:
            # Once for all: each call goes through every tensor that there is.
            Tensor.realize(*pending)

    def _run(self, step: _Step, values: dict[int, Tensor]) -> None:
        results = step.apply(lambda position: self._value(values, step.inputs[position]))
        listed = [results] if isinstance(results, Tensor) else list(results)
        values.update(zip(step.outputs, listed, strict=True))

    def _value(self, values: Mapping[int, Tensor], index: int) -> Tensor:
        if index in values:
            return values[index]

        if index not in self._placed:
            constant = self._constants[index]
            assert constant is not None
            flat = flat_tensor(constant, self._device)
            self._pending.append(flat)
            self._placed[index] = flat.reshape(constant.shape)

        return self._placed[index]


def unsupported(graph: Graph) -> tuple[str, ...]:
    """Every operator that cannot be imported, each kind once, with the reason; builds nothing.

    An empty tuple means that `build` takes the graph, as far as its structure tells.
    """
    found: dict[str, None] = {}
    for index in graph.inputs:
        tensor = graph.tensors[index]
        if tensor.dtype not in TYPES:
            found[f"input {tensor.name} of {tensor.dtype}"] = None

    for node in _nodes(graph):
        reason = _reason(node)
        if reason:
            found[f"{node.operator.name}: {reason}"] = None

    return tuple(found)


def linear_operators(graph: Graph) -> tuple[LinearOperator, ...]:
    """The operators for which `build` calls its hook, in the order of the file."""
    weighted = []
    found = []
    for node in _nodes(graph):
        name = node.operator.name
        if name in ("CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "FULLY_CONNECTED"):
            weighted.append(node.index)

        product = (name == "CONV_2D" and is_product(node)) or (
            name == "FULLY_CONNECTED" and not node.quantised and node.is_known(1)
        )
        if product:
            shape = node.shape(1)
            n, k = shape[0], shape[-1]
            rows = volume(node.shape(0)) // max(k, 1)
            found.append((node.index, n, k, rows))

    return tuple(
        LinearOperator(
            index,
            n,
            k,
            rows,
            n * k * rows,
            first=index == weighted[0],
            last=index == weighted[-1],
        )
        for index, n, k, rows in found
    )


def build(
    graph: Graph, *, linear: LinearHook | None = None, device: str | None = None
) -> Program:
    """The program of a graph; places all weights on the device, blocking.

    `device` is tinygrad's name of it, None for its default one. `linear` is called for each of
    `linear_operators`, here and again whenever the program is called; it has to take the same
    ones each time.

    :raises UnsupportedModel: an operator is missing; the text names each one.
    :raises BadModel: the graph contradicts itself.
    """
    missing = unsupported(graph)
    if missing:
        raise UnsupportedModel("not possible on OpenCL: " + "; ".join(missing))

    known: dict[int, NDArray[Any] | None] = {
        index: _constant(tensor)
        for index, tensor in enumerate(graph.tensors)
        if tensor.data is not None
    }
    program = Program(graph, known, device)
    # A first pass over tensors without content: it finds the shapes, and places constants.
    values = {index: _placeholder(graph.tensors[index], device) for index in graph.inputs}
    shapes = {index: graph.tensors[index].shape for index in graph.inputs}
    placed: list[Tensor] = []
    for index, operator in enumerate(graph.operators):
        rule = RULES[operator.name]
        if _is_folded(graph, index, known, rule):
            node = Node(graph, index, known, shapes, device)
            with _blamed(node):
                folded = _folded(node)

            known.update(folded)
            shapes.update({i: value.shape for i, value in folded.items()})
            continue

        node = Node(graph, index, known, shapes, device, linear, placed)
        with _blamed(node):
            step = _Step(rule.prepare(node), operator.inputs, operator.outputs)
            program.append(step, values)

        for output in operator.outputs:
            shapes[output] = _checked(node, graph.tensors[output], values[output])

    program.place(placed)
    return program


@contextmanager
def _blamed(node: Node) -> Iterator[None]:
    """Names the operator at which a contradiction shows that no rule looks for."""
    try:
        yield
    except _NONSENSE as error:
        raise BadModel(f"{node.title}: {type(error).__name__} {error}") from error


def _placeholder(tensor: GraphTensor, device: str | None) -> Tensor:
    return Tensor.empty(*tensor.shape, dtype=TYPES[tensor.dtype], device=device)


def _checked(node: Node, tensor: GraphTensor, value: Tensor) -> Shape:
    """The shape of a result, which has to be the file's.

    :raises BadModel: it is another shape or dtype.
    """
    shape = tuple(int(size) for size in value.shape)
    if shape != tensor.shape:
        raise BadModel(
            f"{node.title} gives {list(shape)}, and its result {tensor.name} is"
            f" {list(tensor.shape)} in the file"
        )

    if value.dtype != TYPES.get(tensor.dtype):
        raise BadModel(f"{node.title} gives {value.dtype.name}, the file says {tensor.dtype}")

    return shape


def _nodes(graph: Graph) -> list[Node]:
    """Each operator, with what is known before the model runs (not its values)."""
    known: dict[int, NDArray[Any] | None] = {
        index: None for index, tensor in enumerate(graph.tensors) if tensor.data is not None
    }
    nodes = []
    for index, operator in enumerate(graph.operators):
        nodes.append(Node(graph, index, known))
        rule = RULES.get(operator.name)
        if rule is not None and _is_folded(graph, index, known, rule):
            known |= dict.fromkeys(operator.outputs)

    return nodes


def _reason(node: Node) -> str:
    rule = RULES.get(node.operator.name)
    if rule is None:
        return "not known"

    if node.operator.version > rule.version:
        return f"version {node.operator.version}, up to {rule.version} is known"

    try:
        for position in rule.data:
            if node.dtype(position) not in rule.dtypes:
                return f"on {node.dtype(position)}"

        for position in rule.constants:
            if node.has(position) and not node.is_known(position):
                return f"its input {position} is computed at run time"

        return rule.refuse(node)
    except SwitchgearError as error:
        return error.text
    except _NONSENSE as error:
        return f"{type(error).__name__}: {error}"


def _is_folded(graph: Graph, index: int, known: Mapping[int, Any], rule: Rule) -> bool:
    inputs = graph.operators[index].inputs
    return rule.static or (bool(inputs) and all(i in known for i in inputs if i >= 0))


def _constant(tensor: GraphTensor) -> NDArray[Any]:
    """The elements of a constant in its shape; sparse ones dense."""
    data = tensor.data
    assert data is not None
    if tensor.sparsity is not None:
        return _dense(tensor, data)

    if data.dtype.name != tensor.dtype and tensor.dtype != "int4":
        # Text and the like stay bytes: no rule takes them.
        return data

    return unpacked(tensor, data)


def _dense(tensor: GraphTensor, data: NDArray[Any]) -> NDArray[Any]:
    sparsity = tensor.sparsity
    assert sparsity is not None
    if tensor.dtype not in ("float32", "float16", "int8", "uint8"):
        raise UnsupportedModel(f"{tensor.name}: a sparse constant of {tensor.dtype}")

    kind = np.dtype(tensor.dtype).newbyteorder("<")
    if tensor.size > _LARGEST_SPARSE_BYTES // kind.itemsize:
        raise UnsupportedModel(f"{tensor.name}: a sparse constant of {tensor.size} elements")

    if data.size % kind.itemsize:
        raise BadModel(f"{tensor.name}: {data.size} bytes of {tensor.dtype}")

    return dense(sparsity, np.frombuffer(data, kind), tensor.shape).reshape(tensor.shape)


def _folded(node: Node) -> dict[int, NDArray[Any]]:
    """The results of an operator of constants."""
    operator = node.operator
    if operator.name == "DENSIFY":
        return {operator.outputs[0]: node.constant(0)}

    if operator.name == "DEQUANTIZE":
        value = node.constant(0)
        if value.dtype == np.float16:
            return {operator.outputs[0]: value.astype(np.float32)}

        return {operator.outputs[0]: dequantised(value, node.quantisation(node.tensor(0)))}

    size = sum(volume(node.shape(i)) for i in range(node.count) if node.has(i))
    device = _FOLDING_DEVICE if size <= _FOLDED_ELEMENTS else node.device
    apply = RULES[operator.name].prepare(replace(node, device=device))
    results = apply(lambda position: on_device(node.constant(position), device))
    listed = [results] if isinstance(results, Tensor) else list(results)
    if sum(volume([int(size) for size in result.shape]) for result in listed) > _LARGEST_FOLDED:
        raise UnsupportedModel(f"{node.title}: a constant of over {_LARGEST_FOLDED} elements")

    return {
        index: np.asarray(result.numpy())
        for index, result in zip(operator.outputs, listed, strict=True)
    }
