"""Every row of the transition tables is taken by a case, and does what it says."""

from __future__ import annotations

from collections import Counter

import pytest
from protocol_case import TABLES, Case
from protocol_rows import CASES

from switchgear.daemon.protocol.table import NOTHING, SAME, Transition


def named(case: Case) -> str:
    phase = case.state.breaker.phase
    return f"{case.level}-{phase}-{type(case.event).__name__}-{case.guard or 'always'}"


def test_the_cases_are_the_rows() -> None:
    """A row without a case fails, and so does a case without a row."""
    rows = {
        (level, phase, row.event.__name__, row.guard)
        for level, table in TABLES.items()
        for row in table.rows
        for phase in row.phases
    }
    cases = {
        (case.level, case.state.breaker.phase, type(case.event).__name__, case.guard)
        for case in CASES
    }
    assert cases == rows


def test_no_two_rows_read_the_same() -> None:
    for table in TABLES.values():
        keys = Counter(
            (phase, row.event, row.guard) for row in table.rows for phase in row.phases
        )
        assert [key for key, count in keys.items() if count > 1] == []


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_row(case: Case) -> None:
    table = TABLES[case.level]
    row = table.row(case.state, case.event, case.now_s)
    assert row is not None
    assert row.guard == case.guard
    after, actions = table.step(case.state, case.event, case.now_s)
    before = case.state.breaker.phase
    assert after.breaker.phase == case.to
    if row.to == SAME:
        assert case.to == before
        others = actions
    else:
        assert row.to == case.to
        assert actions[0] == Transition(before, case.to, row.why)
        others = actions[1:]

    assert tuple(type(action) for action in others) == case.actions


def test_a_step_changes_nothing_that_was_given() -> None:
    """States are values: the same step twice gives the same."""
    for case in CASES:
        table = TABLES[case.level]
        kept = repr(case.state)
        first = table.step(case.state, case.event, case.now_s)
        assert first == table.step(case.state, case.event, case.now_s), named(case)
        assert repr(case.state) == kept, named(case)


def test_what_has_no_row_changes_nothing() -> None:
    tried = 0
    for case in CASES:
        table = TABLES[case.level]
        phase = case.state.breaker.phase
        events = {row.event for row in table.rows if phase in row.phases}
        for other in CASES:
            if other.level == case.level and type(other.event) not in events:
                tried += 1
                assert table.step(case.state, other.event, case.now_s) == (case.state, NOTHING)

    assert tried > 100
