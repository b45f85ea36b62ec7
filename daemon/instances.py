"""Instances: a model in a choice of input shapes, as one or more workers hold it.

The stateless instance of a model's own shapes always exists. Others (a choice of shapes, and
one for each session of a stateful model) are bounded in number and memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from switchgear.daemon.validation import shapes_key
from switchgear.ipc.errors import Overloaded
from switchgear.ipc.slot import TensorSpec

if TYPE_CHECKING:
    from switchgear.daemon.models import Model


@dataclass(eq=False, slots=True)
class Instance:
    """`identity` is its number in every worker. `holders` counts the sessions that use it."""

    identity: int
    model: Model
    shapes: dict[str, tuple[int, ...]]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    bytes_estimate: int
    stateful: bool
    holders: int = field(default=0)


class Instances:
    """Gives out instances and counts the extra ones against the limits."""

    def __init__(self, per_model: int, total_bytes: int) -> None:
        self._per_model = per_model
        self._total_bytes = total_bytes
        self._next = 1
        self._shared: dict[tuple[str, str], Instance] = {}
        self._extra: Counter[str] = Counter()
        self._extra_bytes = 0

    def acquire(
        self,
        model: Model,
        shapes: dict[str, tuple[int, ...]],
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        bytes_estimate: int,
    ) -> Instance:
        """An instance for one session; give it back with `release`.

        :raises Overloaded: the model has as many as it may, or their memory is used up.
        """
        key = (model.digest, shapes_key(shapes))
        instance = None if model.state else self._shared.get(key)
        if instance is None:
            if self._is_extra(model, shapes):
                self._admit(model, bytes_estimate)

            instance = Instance(
                self._next, model, shapes, inputs, outputs, bytes_estimate, model.state
            )
            self._next += 1
            if not model.state:
                self._shared[key] = instance

        instance.holders += 1
        return instance

    @staticmethod
    def _is_extra(model: Model, shapes: dict[str, tuple[int, ...]]) -> bool:
        return model.state or bool(shapes)

    def _admit(self, model: Model, size: int) -> None:
        if self._extra[model.digest] >= self._per_model:
            raise Overloaded(
                f"model {model.label} has {self._per_model} instances, the most it may have",
                retry_after_ms=1000,
            )

        if self._extra_bytes + size > self._total_bytes:
            raise Overloaded(
                f"instances use {self._extra_bytes} bytes, one more needs {size} and the limit "
                f"is {self._total_bytes}",
                bytes_needed=size,
                bytes_free=self._total_bytes - self._extra_bytes,
                retry_after_ms=1000,
            )

        self._extra[model.digest] += 1
        self._extra_bytes += size

    def release(self, instance: Instance) -> bool:
        """Gives one hold back; True when nobody uses the instance any more."""
        instance.holders -= 1
        if instance.holders:
            return False

        model = instance.model
        if not instance.stateful:
            del self._shared[(model.digest, shapes_key(instance.shapes))]

        if self._is_extra(model, instance.shapes):
            self._extra[model.digest] -= 1
            self._extra_bytes -= instance.bytes_estimate
            if not self._extra[model.digest]:
                del self._extra[model.digest]

        return True
