"""Metric families: what a scrape finds, before it is written in any format.

A family is made anew for each scrape and belongs to whoever asked. Names and units follow
Prometheus: base units (seconds, bytes, degrees Celsius), counters end with `_total`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]

# A family with more samples than this is cut: whatever is counted, an answer stays small.
MAX_SAMPLES: Final = 1024


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram's value. `bounds` are the buckets' upper ends in seconds, both included;
    `counts` has one more, for what is above the last one; `total` is the sum in seconds."""

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)


Value = float | Distribution


@dataclass(slots=True)
class Family:
    """One metric with a value for each set of labels. `cut` counts what had no room."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    samples: dict[tuple[str, ...], Value] = field(default_factory=dict)
    cut: int = 0

    def set(self, value: Value, *labels: str) -> None:
        """Sets the value of one set of labels, in the order of the family's.

        :raises ValueError: as many labels as the family has are needed.
        """
        if len(labels) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, not {labels}")

        if labels in self.samples or len(self.samples) < MAX_SAMPLES:
            self.samples[labels] = value
        else:
            self.cut += 1


# Families for one viewer: a user id, or None for what the configuration opened to everybody.
Source = Callable[[int | None], Iterable[Family]]
