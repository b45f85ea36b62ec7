"""The steps of which control-plane work is made, without I/O.

`operations.py` writes each piece of work once, as a generator that yields these steps and is
sent their outcomes. The blocking client and the asyncio one differ only in how they carry a
step out. An error of a step is thrown into the generator.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

T = TypeVar("T")

FIRST_WAIT_S: Final = 0.02
LONGEST_WAIT_S: Final = 0.5


@dataclass(slots=True)
class Attach:
    """Take an idle control connection, or open one. Outcome: None.

    :raises NotRunning: no daemon answers.
    """


@dataclass(slots=True)
class Call:
    """Send one call and receive its first reply. Outcome: `switchgear.client.wire.Reply`.

    The descriptors stay the generator's. `timeout_s`: None is without limit.
    """

    method: str
    parameters: dict[str, object] = field(default_factory=dict)
    descriptors: Sequence[int] = ()
    more: bool = False
    timeout_s: float | None = None


@dataclass(slots=True)
class Next:
    """Receive the next reply of a call with `more`. Outcome: `Reply`."""

    timeout_s: float | None = None


@dataclass(slots=True)
class Wait:
    """Let time pass. Outcome: None."""

    seconds: float


@dataclass(slots=True)
class Blocking:
    """Run something that blocks for a while (copying, mapping). Outcome: what it returns."""

    function: Callable[[], Any]


Step: TypeAlias = Attach | Call | Next | Wait | Blocking
Steps: TypeAlias = Generator[Step, Any, T]


def growing_waits() -> Iterator[float]:
    """Seconds to wait between attempts: 0.02, doubled up to 0.5."""
    seconds = FIRST_WAIT_S
    while True:
        yield seconds
        seconds = min(2 * seconds, LONGEST_WAIT_S)
