"""What share of a place a request finds, by its priority and its deadline."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import pytest

from switchgear.daemon.protocol.answers import ADMITTED, Admission
from switchgear.daemon.request import NO_DEADLINE
from switchgear.daemon.routing.scores import RESERVE_SHARE
from switchgear.daemon.switchboard.board import Switchboard
from switchgear.ipc.record import Priority

RESERVED: Final = Admission(False, 0.0, "tripped", "it is too warm", reserve=True)
SHUT: Final = Admission(False, 0.0, "tripped", "its frames failed")
LOW_WAITS: Final = Admission(True, 1.0, "shedding", "", shed_low=True)


@pytest.mark.parametrize(
    ("answer", "priority", "deadline_ns", "share"),
    [
        (ADMITTED, Priority.BATCH, 5_000, 1.0),
        (RESERVED, Priority.NORMAL, 5_000, RESERVE_SHARE),
        (RESERVED, Priority.HIGH, 5_000, RESERVE_SHARE),
        (RESERVED, Priority.NORMAL, NO_DEADLINE, 0.0),
        (RESERVED, Priority.BATCH, 5_000, 0.0),
        (SHUT, Priority.HIGH, 5_000, 0.0),
        (LOW_WAITS, Priority.NORMAL, 5_000, 1.0),
        (LOW_WAITS, Priority.BATCH, 5_000, 0.0),
    ],
)
def test_share(answer: Admission, priority: int, deadline_ns: int, share: float) -> None:
    request: Any = SimpleNamespace(priority=int(priority), deadline_ns=deadline_ns)

    assert Switchboard._share(answer, request) == share
