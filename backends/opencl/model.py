"""A model that is being compiled: what it takes and gives, its graph, its launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from switchgear.backends.contract import LoadRequest, ModelInfo, Shape
from switchgear.backends.cpu import CpuBackend
from switchgear.backends.opencl import tinygrad_jit
from switchgear.backends.opencl.graph import Graph, read_graph, with_shapes
from switchgear.backends.opencl.products import Layer, LayerList
from switchgear.ipc.errors import UnsupportedModel

if TYPE_CHECKING:
    from switchgear.backends.opencl.device import Device


@dataclass(frozen=True)
class Subject:
    """A model that is being prepared, and what for."""

    device: Device
    request: LoadRequest
    graph: Graph
    info: ModelInfo

    def trace(
        self, hook: Callable[..., Any] | None = None, named: Mapping[int, Any] | None = None
    ) -> tinygrad_jit.Captured:
        """The model's launches; `hook` as the importer's, `named` as `capture` takes it.

        :raises UnsupportedModel: the importer lacks an operator.
        :raises DriverError: the driver refuses a kernel.
        """
        return tinygrad_jit.capture(self._program(hook), self._inputs, named)

    def layers(self) -> dict[int, Layer]:
        """The products with known weights, by operator; nothing is compiled.

        :raises UnsupportedModel: the importer lacks an operator.
        """
        found = LayerList()
        self._program(found)(*tinygrad_jit.placeholders(self._inputs))
        return found.layers

    @property
    def _inputs(self) -> list[tuple[Shape, str]]:
        return [(spec.shape, spec.dtype) for spec in self.info.inputs]

    def _program(self, hook: Callable[..., Any] | None) -> Callable[..., Sequence[Any]]:
        tinygrad_jit.open_device(
            str(self.device.device.name).strip(),
            str(self.device.device.driver_version).strip(),
            group_memory=not self.device.host_memory,
        )
        # It imports tinygrad, which has to be set up first.
        from switchgear.backends.opencl.importer import build

        return build(self.graph, linear=hook)

    def outer_layers(self) -> set[int]:
        """The operators that are the first or the last with weights."""
        from switchgear.backends.opencl.importer import linear_operators

        return {each.index for each in linear_operators(self.graph) if each.first or each.last}


def read_subject(device: Device, request: LoadRequest) -> Subject:
    """Reads a model and says what it takes and gives.

    :raises UnsupportedModel: it keeps state, or has tensors without a fixed size.
    :raises SwitchgearError: as the CPU backend's `load`, and as `read_graph`.
    """
    info = _info(request)
    if info.state:
        raise UnsupportedModel("the opencl backend runs no models that keep state")

    for spec in (*info.inputs, *info.outputs):
        if spec.dynamic or not spec.capacity_bytes:
            raise UnsupportedModel(f"tensor {spec.name!r} has no fixed size")

    # The graph's constants are views of it. Read, not mapped: a mapping's descriptor would stay
    # open for as long as any of them is known.
    with open(request.path, "rb") as file:
        graph = read_graph(file.read())

    shapes = {index: spec.shape for index, spec in zip(graph.inputs, info.inputs, strict=True)}
    return Subject(device, request, with_shapes(graph, shapes), info)


def _info(request: LoadRequest) -> ModelInfo:
    instance = CpuBackend({"threads": 1}).load(
        LoadRequest(request.path, "auto", request.shapes)
    )
    info = instance.info
    instance.close()
    return info
