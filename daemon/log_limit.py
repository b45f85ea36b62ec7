"""Keeps a client from filling the log: each place that logs has a budget of lines."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import monotonic
from typing import Final

# Lines at once from one place of the code, and how many a second come back.
BURST_LINES: Final = 100
LINES_PER_S: Final = 1.0
# Places are few; those of workers are as many as the workers.
_MAX_PLACES: Final = 1024


@dataclass(slots=True)
class _Budget:
    lines: float
    at_s: float
    left_out: int = 0


class LogLimit(logging.Filter):
    """Lets records through within the budget of their place, and tells how many it left out.

    The place is the line of code; with `extra={"source": ...}` each source has its own. Put it
    on a handler: there it sees the records of all loggers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._budgets: dict[tuple[str, int, str], _Budget] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = monotonic()
        key = (record.pathname, record.lineno, str(getattr(record, "source", "")))
        budget = self._budgets.get(key)
        if budget is None:
            if len(self._budgets) >= _MAX_PLACES:
                self._budgets.clear()

            budget = self._budgets[key] = _Budget(BURST_LINES, now_s)

        earned = (now_s - budget.at_s) * LINES_PER_S
        budget.lines = min(BURST_LINES, budget.lines + earned)
        budget.at_s = now_s
        if budget.lines < 1:
            budget.left_out += 1
            return False

        budget.lines -= 1
        if budget.left_out:
            record.msg = f"{record.getMessage()} ({budget.left_out} lines like this left out)"
            record.args = None
            budget.left_out = 0

        return True
