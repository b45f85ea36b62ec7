"""Figures of the device fingerprint: how long it takes, how well it repeats, whom it disturbs.

    python benchmarks/fingerprint.py [--quick] [--runs N] [--json FILE]

Runs the tests as the daemon does, in processes of their own, under SCHED_IDLE; then in a
daemon beside a client. The whole takes some 14 minutes, most of it for the last figure.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from figures import Figures
from fingerprint_beside import add_latency, add_whole

from switchgear.fingerprints.measurement import Report, Value
from switchgear.fingerprints.runner import QUICK_BUDGET_S, WHOLE_BUDGET_S, Plan, Progress, run

if TYPE_CHECKING:
    from collections.abc import Iterable


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="quick tests, under 50 s in all")
    parser.add_argument("--runs", type=int, help="runs for the repeatability: 5, or 2 if quick")
    parser.add_argument("--delegate", default="", help="a TFLite external delegate to measure")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()

    plan = Plan(quick=arguments.quick, delegate=arguments.delegate)
    figures = Figures()
    add_times(figures, plan)
    # The repeats within a run would hide what the figure is about.
    runs = arguments.runs or (2 if arguments.quick else 5)
    add_repeatability(figures, replace(plan, repeat=False, quick=True), runs)
    requests, pairs = (150, 2) if arguments.quick else (300, 5)
    add_latency(figures, quick=arguments.quick, requests=requests, pairs=pairs)
    add_whole(figures, quick=arguments.quick)
    return figures.finish(arguments.json)


def add_times(figures: Figures, plan: Plan) -> None:
    """Time of each test on its own and of the whole, and the policy the tests run under."""
    policies: set[int] = set()
    started = time.monotonic()
    reports = measured(plan, policies)
    whole_s = time.monotonic() - started
    limit_s = QUICK_BUDGET_S if plan.quick else WHOLE_BUDGET_S
    kind = "quick" if plan.quick else "whole"
    for test, seconds in by_test(reports).items():
        figures.add(
            f"{test}_s", seconds, "s", how="within the test's processes, all devices and passes"
        )

    figures.add(
        f"{kind}_s", whole_s, "s", limit_s, how=f"the {kind} fingerprint, processes included"
    )
    figures.add(
        "sched_idle",
        float(policies == {os.SCHED_IDLE}),
        "bool",
        1.0,
        ok=policies == {os.SCHED_IDLE},
        how="policy of the test processes, read while they run",
    )
    noisy = [
        value.noisy for report in reports for value in report.values if isinstance(value, Value)
    ]
    figures.add("noisy_values", sum(noisy), f"of {len(noisy)}", how="the flag, in that run")


def add_repeatability(figures: Figures, plan: Plan, runs: int) -> None:
    """Coefficient of variation of each value's median over the runs."""
    medians: dict[str, list[float]] = defaultdict(list)
    units: dict[str, str] = {}
    for number in range(runs):
        for report in measured(plan, prefix=f"repeatability {number + 1}/{runs}: "):
            index = report.subject.index if report.subject else 0
            for value in report.values:
                if isinstance(value, Value):
                    name = f"{report.test}.{index}.{value.name}"
                    medians[name].append(value.median)
                    units[name] = value.unit

    for name, found in medians.items():
        if len(found) < 2:
            continue

        mean = statistics.mean(found)
        figures.add(
            f"{name}.cv_pct",
            100 * statistics.stdev(found) / mean if mean else 0.0,
            "%",
            how=f"{len(found)} quick runs, mean {mean:.4g} {units[name]}",
        )


def measured(plan: Plan, policies: set[int] | None = None, *, prefix: str = "") -> list[Report]:
    """One run of the plan, with its progress on a terminal."""

    def progress(heard: Progress) -> None:
        if policies is not None and heard.device:
            policies.update(scheduling_of_children())

        if sys.stderr.isatty():
            text = f"{prefix}{heard.done:4.0%} {heard.test}: {heard.text}"
            print(f"\r{text[:100]:<100}", end="", file=sys.stderr, flush=True)

    reports = asyncio.run(run(plan, progress=progress))
    if sys.stderr.isatty():
        print("\r" + " " * 100 + "\r", end="", file=sys.stderr)

    return reports


def by_test(reports: Iterable[Report]) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        seconds[report.test] += report.duration_s

    return dict(seconds)


def scheduling_of_children() -> set[int]:
    """The policies of this process's children at this moment."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            try:
                found.add(os.sched_getscheduler(int(child)))
            except ProcessLookupError:
                continue

    return found


if __name__ == "__main__":
    raise SystemExit(main())
