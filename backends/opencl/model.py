"""A model that is being compiled: what it takes and gives, its graph, its launches."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from switchgear.backends.contract import LoadRequest, ModelInfo
from switchgear.backends.cpu import CpuBackend
from switchgear.backends.opencl import tinygrad_jit
from switchgear.backends.opencl.graph import Graph, read_graph, with_shapes
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
        """The model's launches; `hook` as the importer's, `named` as `capture` takes it."""
        tinygrad_jit.open_device(
            str(self.device.device.name).strip(),
            str(self.device.device.driver_version).strip(),
            group_memory=not self.device.host_memory,
        )
        # They import tinygrad, which has to be set up first.
        from switchgear.backends.opencl.importer import build

        program = build(self.graph, linear=hook)
        inputs = [(spec.shape, spec.dtype) for spec in self.info.inputs]
        return tinygrad_jit.capture(program, inputs, named)

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

    with open(request.path, "rb") as file:
        # The graph's constants are views of it.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    graph = read_graph(memoryview(data))
    shapes = {index: spec.shape for index, spec in zip(graph.inputs, info.inputs, strict=True)}
    return Subject(device, request, with_shapes(graph, shapes), info)


def _info(request: LoadRequest) -> ModelInfo:
    instance = CpuBackend({"threads": 1}).load(
        LoadRequest(request.path, "auto", request.shapes)
    )
    info = instance.info
    instance.close()
    return info
