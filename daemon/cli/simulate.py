"""`switchgear simulate`: policies against a device that heats up, in virtual time."""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from switchgear.daemon.cli import tables
from switchgear.daemon.cli.command import (
    DONE,
    CommandError,
    Subparsers,
    UsageError,
    add_command,
    print_json,
    say,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from switchgear.daemon.simulation.metrics import Result
    from switchgear.daemon.simulation.run import Trace
    from switchgear.daemon.simulation.scenario import Scenario

_MOST_SEEDS: Final = 1000
# Scenario, policy, seed, and whether the trace is wanted.
Piece: TypeAlias = "tuple[Scenario, str, int, bool]"


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "simulate",
        run,
        "policies against a heating device, in virtual time",
        "switchgear simulate phone",
        "switchgear simulate phone --fps 0 --seeds 20 --policy ours --policy always-npu",
        "switchgear simulate phone --svg phone.svg",
        "switchgear simulate random --count 20 --jobs 2",
    )
    parser.add_argument(
        "scenario",
        metavar="SCENARIO",
        help="a scenario's file, or the name of one that comes along",
    )
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help="run this policy only; may be given more than once (default: all)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the first seed (default: 1)")
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="run N seeds (default: 1)"
    )
    parser.add_argument(
        "--fps",
        type=float,
        metavar="F",
        help="frames offered a second; 0: as fast as it goes (default: the scenario's)",
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="virtual minutes")
    parser.add_argument(
        "--count", type=int, metavar="N", help="of random devices only the first N"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="run N processes at once (default: 1)"
    )
    parser.add_argument("--svg", metavar="FILE", help="draw the first seed's runs into FILE")


def run(options: argparse.Namespace) -> int:
    from switchgear.daemon.simulation import catalogue
    from switchgear.daemon.simulation.random_devices import is_random, random_devices
    from switchgear.daemon.simulation.scenario import find, read_scenario, read_table

    for name in options.policy or ():
        catalogue.check(name)

    if not 1 <= options.seeds <= _MOST_SEEDS or options.jobs < 1:
        raise UsageError(f"--seeds is 1 to {_MOST_SEEDS}, --jobs at least 1")

    path = find(options.scenario)
    if is_random(read_table(path)):
        if options.svg or options.seeds != 1:
            raise UsageError("random devices take neither --svg nor --seeds")

        devices = random_devices(path, count=options.count)
        return _many(options, [_changed(device, options) for device in devices])

    if options.count is not None:
        raise UsageError("--count is for random devices")

    return _one(options, _changed(read_scenario(options.scenario), options))


def _changed(scenario: Scenario, options: argparse.Namespace) -> Scenario:
    """The scenario with what the options say differently."""
    if options.minutes is not None:
        if not 0.0 < options.minutes <= 1e4:
            raise UsageError("--minutes is above 0")

        scenario = dataclasses.replace(scenario, duration_s=options.minutes * 60.0)

    if options.fps is not None:
        if not 0.0 <= options.fps <= 1e4:
            raise UsageError("--fps is 0 or above")

        load = dataclasses.replace(scenario.load, fps=options.fps)
        scenario = dataclasses.replace(scenario, load=load)

    return scenario


def _one(options: argparse.Namespace, scenario: Scenario) -> int:
    from switchgear.daemon.simulation.catalogue import names_for

    names = options.policy or names_for(scenario)
    first = 1 if options.seed is None else options.seed
    seeds = range(first, first + options.seeds)
    work = [
        (scenario, name, seed, bool(options.svg) and seed == first)
        for name in names
        for seed in seeds
    ]
    results: list[tuple[int, Result]] = []
    drawn: list[tuple[str, Trace]] = []
    outcomes = _runs(work, options.jobs)
    for (_, name, seed, _), (result, trace) in zip(work, outcomes, strict=True):
        results.append((seed, result))
        if trace is not None:
            drawn.append((name, trace))

    if options.svg:
        _draw(options.svg, scenario, first, drawn)

    if options.json:
        rows = [{"seed": seed, **dataclasses.asdict(result)} for seed, result in results]
        print_json({"scenario": scenario.name, "fps": scenario.load.fps, "runs": rows})
        return DONE

    print(_headline(scenario, list(seeds)))
    print(_table(names, results))
    return DONE


def _headline(scenario: Scenario, seeds: list[int]) -> str:
    fps = scenario.load.fps
    load = f"{fps:g} frames a second" if fps else "as fast as it goes"
    seed = f"seed {seeds[0]}" + (f" to {seeds[-1]}" if len(seeds) > 1 else "")
    worst = ", the worst of the seeds" if len(seeds) > 1 else ""
    return f"{scenario.name}: {scenario.duration_s / 60:g} minutes, {load}, {seed}{worst}"


def _table(names: Sequence[str], results: Sequence[tuple[int, Result]]) -> str:
    rows = []
    for name in names:
        own = [result for _, result in results if result.policy == name]
        in_time = [
            100.0 * result.in_time / result.offered
            for result in own
            if result.in_time is not None
        ]
        rows.append(
            (
                name,
                f"{min(result.mean_fps for result in own):.1f}",
                f"{max(result.swing_pct for result in own):.1f}",
                f"{max(result.tail_ratio for result in own):.2f}",
                f"{min(in_time):.1f}" if in_time else "-",
                max(result.lost for result in own),
                max(result.switches for result in own),
                max(result.worst_switches_per_min for result in own),
                f"{max(result.energy_per_frame_mj for result in own):.0f}",
            )
        )

    headings = ("policy", "fps", "swing %", "tail", "in time %", "lost", "moves", "/min", "mJ")
    return tables.table(headings, rows)


def _draw(path: str, scenario: Scenario, seed: int, drawn: list[tuple[str, Trace]]) -> None:
    from switchgear.daemon.simulation.picture import picture

    title = _headline(scenario, [seed])
    try:
        with open(path, "w") as file:
            file.write(picture(title, drawn, scenario.duration_s))
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None

    say(f"drawn: {path}")


def _many(options: argparse.Namespace, devices: list[Scenario]) -> int:
    from switchgear.daemon.simulation.catalogue import OURS, names_for
    from switchgear.daemon.simulation.comparison import standing, summaries

    work = []
    for number, device in enumerate(devices):
        seed = number if options.seed is None else options.seed
        known = names_for(device)
        work += [
            (device, name, seed, False)
            for name in options.policy or known
            if name in known or name.startswith(f"{OURS}:")
        ]

    found: dict[str, dict[str, Result]] = {device.name: {} for device in devices}
    for (device, name, _, _), (result, _) in zip(work, _runs(work, options.jobs), strict=True):
        found[device.name][name] = result

    lines = summaries(list(found.values()))
    standings = {name: standing(results) for name, results in found.items() if OURS in results}
    if options.json:
        print_json(
            {
                "policies": [dataclasses.asdict(line) for line in lines],
                "devices": {
                    name: {
                        "results": {
                            policy: dataclasses.asdict(result)
                            for policy, result in results.items()
                        },
                        "ours": _standing_json(standings[name]) if name in standings else None,
                    }
                    for name, results in found.items()
                },
            }
        )
        return DONE

    print(f"{tables.amount(len(devices), 'device')}; good: best, or within 2 % of the best")
    rows = [
        (
            line.policy,
            line.devices,
            f"{100.0 * line.good / line.devices:.1f}",
            f"{100.0 * line.in_time:.1f}",
            f"{line.energy_per_frame_mj:.0f}",
            line.lost,
        )
        for line in lines
    ]
    headings = ("policy", "devices", "good %", "in time %", "mJ", "lost")
    print(tables.table(headings, rows))
    for name, where in standings.items():
        if not where.good:
            print(
                f"  {name}: {where.best} is better; ours has {100 * where.frames:+.1f} % "
                f"frames in time, {100 * where.energy:+.1f} % energy"
            )

    return DONE


def _standing_json(where: Any) -> dict[str, object]:
    return {**dataclasses.asdict(where), "good": where.good}


def _runs(work: list[Piece], jobs: int) -> Iterator[tuple[Result, Trace | None]]:
    """The outcome of each piece of work, in order."""
    if jobs == 1:
        yield from map(_run, work)
        return

    # Forked before there is any thread; spawning would leave a helper process behind.
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(_run, work)
        pool.close()
        pool.join()


def _run(piece: Piece) -> tuple[Result, Trace | None]:
    from switchgear.daemon.simulation.comparison import simulate

    scenario, policy, seed, keep = piece
    result, trace = simulate(scenario, policy, seed)
    return result, trace if keep else None
