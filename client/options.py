"""What a session is opened with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Kept by the client, which opens the session again with them after a loss.

    `model` is a name or a hash. What is None or the default is left to the daemon.
    """

    model: str
    slots: int = 2
    on_busy: str = "wait"
    priority: str = "normal"
    backends: Sequence[str] | None = None
    strict: bool = False
    input_shapes: Mapping[str, Sequence[int]] | None = None
    output_capacity_bytes: int | None = None
    precision: str = "auto"
    policy: str | None = None
    slow_ms: float | None = None
    recover_ms: float | None = None
    events: bool = False
    hedge: bool = False

    def shapes(self) -> dict[str, list[int]] | None:
        if self.input_shapes is None:
            return None

        # int(): a numpy integer is no JSON number.
        return {name: [int(d) for d in dims] for name, dims in self.input_shapes.items()}

    def parameters(self) -> dict[str, object]:
        """The parameters of OpenSession; those left to the daemon are not there."""
        optional = {
            "backends": None if self.backends is None else list(self.backends),
            "input_shapes": self.shapes(),
            "output_capacity_bytes": self.output_capacity_bytes,
            "policy": self.policy,
            "slow_ms": self.slow_ms,
            "recover_ms": self.recover_ms,
        }
        return {
            "model": self.model,
            "slots": self.slots,
            "on_busy": self.on_busy,
            "priority": self.priority,
            "strict": self.strict,
            **({"events": True} if self.events else {}),
            **({"hedge": True} if self.hedge else {}),
            **({} if self.precision == "auto" else {"precision": self.precision}),
            **{name: value for name, value in optional.items() if value is not None},
        }
