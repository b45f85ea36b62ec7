"""Samples within a budget, drift, and contention."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from switchgear.fingerprints.measure.sampling import (
    WAITED_SHARE,
    Contention,
    collect,
    drifted,
)


def test_takes_the_minimum_without_a_budget() -> None:
    numbers = iter(range(100))
    assert collect(lambda: next(numbers), budget_s=0, minimum=4) == [0, 1, 2, 3]


def test_stops_at_the_maximum() -> None:
    assert len(collect(lambda: 1.0, budget_s=60, minimum=1, maximum=7)) == 7


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of `collect`, to be moved by the samples."""
    now = [1000.0]
    monkeypatch.setattr(f"{collect.__module__}.time.monotonic", lambda: now[0])
    return now


def test_stops_when_the_budget_is_spent(clock: list[float]) -> None:
    def sample() -> float:
        clock[0] += 0.25
        return clock[0]

    assert len(collect(sample, budget_s=1.0, minimum=1, maximum=10**9)) == 4
    assert len(collect(sample, budget_s=1.0, minimum=6, maximum=10**9)) == 6


def test_ticks_only_now_and_then(clock: list[float]) -> None:
    heard: list[float] = []

    def sample() -> float:
        clock[0] += 0.0625
        return 1.0

    collect(sample, budget_s=1.0, minimum=1, maximum=10**9, tick=heard.append)
    assert heard == [0.25, 0.5, 0.75]


def test_what_a_sample_raises_comes_out() -> None:
    def sample() -> float:
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        collect(sample, budget_s=1)


def test_drift() -> None:
    steady = [10.0, 10.1, 9.9, 10.0, 10.1, 9.9, 10.0, 10.1]
    assert not drifted(steady)
    assert drifted([*steady, *[sample * 1.2 for sample in steady]])
    # Under 1 %, and within the spread, it is none.
    assert not drifted([*steady, *[sample * 1.005 for sample in steady]])
    assert not drifted([1.0, 5.0, 1.0, 5.0, 2.0, 6.0, 2.0, 6.0])
    assert not drifted([1.0, 2.0, 3.0])


BESIDE = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print("runs", flush=True)
while True:
    pass
"""

WATCH = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
from switchgear.fingerprints.measure.sampling import Contention
contention = Contention()
limit, share = float(sys.argv[2]), 0.0
end = time.monotonic() + 15
# The other one may stand still for a while.
while share <= limit and time.monotonic() < end:
    look = time.monotonic() + 0.5
    while time.monotonic() < look:
        pass
    share = contention.share()
print(share)
"""


def test_contention_sees_a_process_that_takes_the_same_cpu() -> None:
    """Both spin on one CPU: each waits about half of the time."""
    cpu = str(min(os.sched_getaffinity(0)))
    limit = 2 * WAITED_SHARE
    beside = subprocess.Popen(
        [sys.executable, "-c", BESIDE, cpu], stdout=subprocess.PIPE, text=True
    )
    try:
        assert beside.stdout is not None
        assert beside.stdout.readline() == "runs\n"
        watched = subprocess.run(
            [sys.executable, "-c", WATCH, cpu, str(limit)],
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        beside.kill()
        beside.communicate()

    assert float(watched.stdout) > limit


def test_contention_of_an_instant_is_none() -> None:
    contention = Contention()
    assert 0 <= contention.share() <= 1


def test_a_wait_while_it_looks_is_no_more_than_all_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may lose its CPU between one file and the other; steal is counted in whole ticks."""
    now_s = [1000.0]
    waited_s = [0.0]

    def read() -> dict[str, float]:
        if waited_s[0]:
            now_s[0] += 2.0

        return {"1": waited_s[0]}

    module = Contention.__module__
    monkeypatch.setattr(f"{module}.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr(f"{module}._waited_s", read)
    stolen_s = iter([0.0, 0.0, 0.0, 1e6])
    monkeypatch.setattr(f"{module}._stolen_s", lambda: next(stolen_s))
    contention = Contention()
    now_s[0] += 0.5
    waited_s[0] = 2.0
    assert contention.share() == pytest.approx(0.8)
    assert Contention().share() == 1.0
