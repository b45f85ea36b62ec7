"""The bound on what one place of the code may log."""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING

import pytest

from switchgear.daemon import log_limit
from switchgear.daemon.log_limit import BURST_LINES, LogLimit

if TYPE_CHECKING:
    from collections.abc import Iterator


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(log_limit, "monotonic", clock)
    return clock


@pytest.fixture
def logged() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(LogLimit())
    logger = logging.getLogger("limited")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    yield logger, stream
    logger.removeHandler(handler)


def test_a_flood_is_cut_and_told(
    clock: Clock, logged: tuple[logging.Logger, io.StringIO]
) -> None:
    logger, stream = logged

    def flood(number: int) -> None:
        logger.warning("line %d", number)

    for number in range(BURST_LINES + 50):
        flood(number)

    logger.warning("from elsewhere")
    lines = stream.getvalue().splitlines()
    expected = [f"line {number}" for number in range(BURST_LINES)]
    assert lines == [*expected, "from elsewhere"]
    clock.now_s += 2.5
    for number in range(3):
        flood(number)

    assert stream.getvalue().splitlines()[len(lines) :] == [
        "line 0 (50 lines like this left out)",
        "line 1",
    ]


def test_each_source_has_a_budget_of_its_own(
    clock: Clock, logged: tuple[logging.Logger, io.StringIO]
) -> None:
    logger, stream = logged
    for _ in range(2 * BURST_LINES):
        for source in ("one", "other"):
            logger.info("of %s", source, extra={"source": source})

    lines = stream.getvalue().splitlines()
    assert lines.count("of one") == lines.count("of other") == BURST_LINES
