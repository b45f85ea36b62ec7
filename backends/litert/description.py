"""A model's description as the CPU gives it, for engines that call its tensors otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from switchgear.backends.cpu import CpuBackend, CpuInstance

if TYPE_CHECKING:
    from switchgear.backends.contract import LoadRequest, ModelInfo


@dataclass(frozen=True, slots=True)
class Description:
    """`info` as of the CPU backend, with the file's tensor numbers of inputs and outputs.

    `precision` is what the model itself is made for: fp32, int8, or none without arithmetic.
    """

    info: ModelInfo
    precision: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def nodes(self) -> int:
        """How many operators the model's main graph has."""
        return sum(self.info.operators.values())


class _Plain(CpuBackend):
    """The interpreter without delegates: nothing is repacked for a run that never comes."""

    def interpreter(self, path: str, *, delegates: bool = True) -> Any:
        return super().interpreter(path, delegates=False)


class _Described(CpuInstance):
    def description(self) -> Description:
        return Description(
            self.info,
            self.precision,
            tuple(int(details["index"]) for details in self._inputs),
            tuple(int(details["index"]) for details in self._outputs),
        )


def describe(request: LoadRequest) -> Description:
    """What a model takes and gives; blocks for a few milliseconds and keeps nothing.

    :raises DriverError: the interpreter cannot parse it.
    :raises UnsupportedModel: the interpreter lacks an operator.
    :raises BadShape: a wanted shape is not one the model takes.
    """
    instance = _Described(_Plain({}), request)
    try:
        return instance.description()
    finally:
        instance.close()
