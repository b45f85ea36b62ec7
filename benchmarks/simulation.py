"""The simulator's bars: the phone for many seeds, and random devices.

    ./dev bench simulation [--quick] [--jobs N] [--seeds N] [--devices N] [--draw SEED]
        [--json FILE]

`--draw` takes other random devices than the scenario's own; 0 seeds leave the phone out,
0 devices the random ones.
`--quick` takes 2 seeds of 10 minutes and 20 devices of 5 minutes, and says so in each line. The
whole thing takes about an hour of one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from figures import Figures

from switchgear.daemon.simulation.catalogue import OURS, names_for
from switchgear.daemon.simulation.comparison import WITHIN_SHARE, simulate, standing
from switchgear.daemon.simulation.metrics import Result
from switchgear.daemon.simulation.random_devices import random_devices
from switchgear.daemon.simulation.scenario import SCENARIOS, Scenario, read_scenario

SEEDS: Final = 20
DEVICES: Final = 200
PERFORMANCE: Final = f"{OURS}:max_performance"
FIXED: Final = ("always-gpu", "always-npu", "always-cpu")

Piece: TypeAlias = tuple[Scenario, str, int]
Results: TypeAlias = dict[tuple[str, int], Result]


def run(piece: Piece) -> Result:
    return simulate(*piece)[0]


def phone(figures: Figures, seeds: int, minutes: float, jobs: int) -> None:
    """Both loads of the phone, the worst seed of each figure."""
    scenario = dataclasses.replace(read_scenario("phone"), duration_s=minutes * 60.0)
    how = f"worst of {seeds} seeds, {minutes:g} minutes"
    for load, fps in (("30 fps", 30.0), ("fast", 0.0)):
        loaded = dataclasses.replace(scenario, load=dataclasses.replace(scenario.load, fps=fps))
        names = (*FIXED, "threshold", "latency", "report", OURS, PERFORMANCE)
        work = [(loaded, name, seed) for name in names for seed in range(1, seeds + 1)]
        found: Results = {
            (name, seed): result
            for (_, name, seed), result in zip(work, runs(work, jobs), strict=True)
        }
        for name in names:
            own = [result for (policy, _), result in found.items() if policy == name]
            bars(figures, f"{load}, {name}", name, fps, own, how)

        for name in (OURS, PERFORMANCE):
            if not fps:
                worst = min(
                    found[name, seed].mean_fps
                    / max(found[fixed, seed].mean_fps for fixed in FIXED)
                    for seed in range(1, seeds + 1)
                )
                figures.add(
                    f"{load}, {name}: rate to the best fixed",
                    worst,
                    "x",
                    1.0,
                    ok=worst >= 1.0,
                    how=how,
                )


def bars(
    figures: Figures, title: str, name: str, fps: float, results: list[Result], how: str
) -> None:
    """The figures of one policy, with a limit where it has to hold one."""
    own = name.startswith(OURS)
    least = min(result.swing_pct for result in results)
    most = max(result.swing_pct for result in results)
    if name == "always-gpu":
        figures.add(f"{title}: swing", least, "%", 35.0, ok=least >= 35.0, how=f"least; {how}")
    else:
        limit = (3.0 if fps else 7.0) if own else None
        figures.add(f"{title}: swing", most, "%", limit, how=how)

    rate = min(result.mean_fps for result in results)
    figures.add(f"{title}: rate", rate, "fps", how=how)
    tail = max(result.tail_ratio for result in results)
    figures.add(f"{title}: p97.5 to p50", tail, "x", how=how)
    lost = max(result.lost for result in results)
    figures.add(f"{title}: lost", lost, "frames", 0.0 if own else None, how=how)
    moves = max(result.worst_switches_per_min for result in results)
    figures.add(f"{title}: switches in 60 s", moves, "", 1.0 if own else None, how=how)
    energy = max(result.energy_per_frame_mj for result in results)
    figures.add(f"{title}: energy", energy, "mJ/frame", how=how)


def many(
    figures: Figures, count: int, minutes: float | None, jobs: int, draw: int | None
) -> None:
    """Every policy on each random device; the share on which ours is good."""
    devices = random_devices(SCENARIOS / "random.toml", draw, count)
    if minutes is not None:
        devices = [dataclasses.replace(device, duration_s=minutes * 60.0) for device in devices]

    work = [
        (device, name, number)
        for number, device in enumerate(devices)
        for name in names_for(device)
    ]
    found: dict[str, dict[str, Result]] = {}
    for (device, name, _), result in zip(work, runs(work, jobs), strict=True):
        found.setdefault(device.name, {})[name] = result

    good = 0
    for label, results in found.items():
        where = standing(results)
        good += where.good
        if not where.good:
            print(
                f"{label}: {where.best} is better; ours has {where.frames:+.1%} frames in "
                f"time, {where.energy:+.1%} energy",
                file=sys.stderr,
            )

    how = f"{count} devices, {devices[0].duration_s / 60:g} minutes, 30 fps"
    if draw is not None:
        how += f", draw {draw}"

    share = 100.0 * good / count
    figures.add(
        f"random devices: best or within {WITHIN_SHARE:.0%}",
        share,
        "%",
        95.0,
        share >= 95.0,
        how,
    )
    lost = sum(results[OURS].lost for results in found.values())
    figures.add("random devices: lost", lost, "frames", 0.0, how=how)


def runs(work: Sequence[Piece], jobs: int) -> Iterator[Result]:
    if jobs == 1:
        yield from map(run, work)
        return

    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(run, work)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--devices", type=int)
    parser.add_argument("--draw", type=int, metavar="SEED")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    figures = Figures()
    quick = options.quick
    seeds = (2 if quick else SEEDS) if options.seeds is None else options.seeds
    if seeds:
        phone(figures, seeds, 10.0 if quick else 30.0, options.jobs)

    count = (20 if quick else DEVICES) if options.devices is None else options.devices
    if count:
        many(figures, count, 5.0 if quick else None, options.jobs, options.draw)

    return figures.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
