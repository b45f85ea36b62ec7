"""What the runner tells a test process, as one JSON object on its command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Options:
    """`yield_cpu` has the process run only when nobody else wants the CPU.

    `skip` holds the indices of devices that are done, or that killed an earlier process.

    `budget_s` is the time that the samples of one device may take; the least number of samples
    is taken whatever it is. `max_transfer_bytes` bounds the OpenCL test's size, 0 does not.
    `delegate` is the path of a TFLite external delegate, empty where
    none is configured; `delegate_options` are its own. `sysfs` is where sysfs is mounted.
    """

    quick: bool = False
    yield_cpu: bool = True
    budget_s: float = 4.0
    skip: tuple[int, ...] = ()
    max_transfer_bytes: int = 0
    delegate: str = ""
    delegate_options: dict[str, str] = field(default_factory=dict)
    sysfs: str = "/sys"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Options:
        """Raises `ValueError` or `TypeError` on what `to_json` does not write."""
        data: dict[str, Any] = json.loads(text)
        data["skip"] = tuple(data.get("skip", ()))
        return cls(**data)
