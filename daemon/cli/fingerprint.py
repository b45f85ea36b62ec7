"""`switchgear fingerprint`: measures this device, shows, dumps and compares what was measured.

Where a daemon answers, it measures, and its profile is shown. Without one, `run` measures in
child processes of this command and the others read the stored profile. Results go to standard
output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from switchgear.daemon.thermal.zones import SYSFS_ROOT, find_sensors, read_sensor
from switchgear.fingerprints.measurement import TESTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from switchgear.daemon.cli.fingerprint_daemon import Daemon, Known
    from switchgear.fingerprints.profile import Profile
    from switchgear.fingerprints.runner import Progress
    from switchgear.fingerprints.store import ProfileStore

DONE: Final = 0
FAILED: Final = 1
WRONG_USAGE: Final = 2

_BAR_CELLS: Final = 24
_FILE_BYTES_AT_MOST: Final = 4 * 1024 * 1024


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `fingerprint` with its verbs. Each sets `run` to a function of the arguments that
    returns the exit status."""
    parser = subparsers.add_parser(
        "fingerprint",
        help="measure this device; show, dump or compare what was measured",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    run = _verb(
        verbs, "run", _run, "measure what has changed", "switchgear fingerprint run --quick"
    )
    run.add_argument("--quick", action="store_true", help="8 seconds instead of 30")
    run.add_argument("--force", action="store_true", help="measure everything again")
    run.add_argument("--json", action="store_true", help="print the profile as JSON")
    run.add_argument(
        "--test", action="append", choices=TESTS, help="only this one (may be repeated)"
    )
    run.add_argument(
        "--delegate", metavar="LIB", default="", help="the NPU's TFLite delegate (no daemon)"
    )
    run.add_argument(
        "--sysfs", type=Path, default=SYSFS_ROOT, metavar="DIR", help=argparse.SUPPRESS
    )

    show = _verb(
        verbs,
        "show",
        _show,
        "the stored profile, and what is stale",
        "switchgear fingerprint show",
    )
    show.add_argument("--json", action="store_true", help="print the profile as JSON")
    show.add_argument(
        "--sysfs", type=Path, default=SYSFS_ROOT, metavar="DIR", help=argparse.SUPPRESS
    )

    dump = _verb(
        verbs,
        "dump",
        _dump,
        "the stored profile for a bug report",
        "switchgear fingerprint dump --format xml > device_fingerprint.xml",
    )
    form = dump.add_mutually_exclusive_group()
    form.add_argument("--format", choices=("json", "xml", "table"), default="json")
    form.add_argument("--json", dest="format", action="store_const", const="json")

    diff = _verb(
        verbs,
        "diff",
        _diff,
        "what changed between two profiles",
        "switchgear fingerprint diff before.json",
    )
    diff.add_argument("old", metavar="A", type=Path, help="a dumped or stored profile")
    diff.add_argument(
        "new", metavar="B", type=Path, nargs="?", help="another; else the stored profile"
    )
    diff.add_argument("--all", action="store_true", help="show what did not change too")
    diff.add_argument("--json", action="store_true", help="print the changes as JSON")


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: object,
    text: str,
    example: str,
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text, description=text, epilog=f"example: {example}")
    parser.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help="the folder of the profile, without a daemon (else the daemon's folder)",
    )
    parser.add_argument("--socket", metavar="PATH", help="the daemon's socket")
    parser.add_argument(
        "--no-daemon", action="store_true", help="do without a daemon, even if one answers"
    )
    parser.set_defaults(run=run)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    with _daemon(arguments) as daemon:
        if daemon is None:
            return _run_here(arguments)

        return _run_there(daemon, arguments)


def _run_there(daemon: Daemon, arguments: argparse.Namespace) -> int:
    """The daemon measures, where and when it disturbs nobody."""
    shown = ProgressLines(sys.stderr.isatty())
    try:
        done = daemon.run(
            quick=arguments.quick,
            force=arguments.force,
            tests=arguments.test or (),
            progress=shown.phase,
        )
    except KeyboardInterrupt:
        shown.end()
        _say("interrupted")
        return FAILED

    shown.end()
    for problem in done.problems:
        _say(problem)

    return _print_outcome(daemon.known().profile, done.measured, done.saved, arguments)


def _run_here(arguments: argparse.Namespace) -> int:
    from switchgear.fingerprints.refresh import Surroundings, refresh
    from switchgear.fingerprints.runner import Plan

    sensors = find_sensors(arguments.sysfs)
    plan = Plan(
        tests=tuple(test for test in TESTS if test in (arguments.test or TESTS)),
        quick=arguments.quick,
        delegate=arguments.delegate,
        sysfs=str(arguments.sysfs),
    )
    shown = ProgressLines(sys.stderr.isatty())
    try:
        done = asyncio.run(
            refresh(
                _store(arguments),
                plan,
                Surroundings(sensors.zones, sensors.excluded),
                force=arguments.force,
                progress=shown.update,
            )
        )
    except KeyboardInterrupt:
        shown.end()
        _say("interrupted: nothing was stored")
        return FAILED

    shown.end()
    for problem in (*sensors.problems, *done.problems):
        _say(problem)

    if done.measured_elsewhere:
        _say("nothing was measured")
        return FAILED

    return _print_outcome(done.profile, done.stale, done.saved, arguments)


def _print_outcome(
    profile: Profile | None,
    measured: Mapping[str, Sequence[str]],
    saved: bool,
    arguments: argparse.Namespace,
) -> int:
    """The profile, and why it was measured; success when it is stored."""
    from switchgear.fingerprints.dump import render

    for test, reasons in measured.items():
        _say(f"{test}: {'; '.join(reasons[:3])}")

    if profile is None:
        return FAILED

    if not measured:
        _say("nothing has changed: --force measures again")

    print(render(profile, "json" if arguments.json else "table"), end="")
    return DONE if saved or not measured else FAILED


def _show(arguments: argparse.Namespace) -> int:
    from switchgear.fingerprints.dump import render

    known = _known(arguments)
    if known.profile is None:
        return FAILED

    if arguments.json:
        print(render(known.profile, "json"), end="")
        return DONE

    print(render(known.profile, "table"), end="")
    readings = [read_sensor(sensor) for sensor in find_sensors(arguments.sysfs).sensors]
    if readings:
        print("\nTemperatures now")

    for reading in readings:
        value = reading.temperature_mc
        text = f"{value / 1000:.1f} C" if value is not None else f"none: {reading.reason}"
        print(f"  {reading.zone_id:<26} {text}"[:80])

    for test, reasons in known.stale.items():
        _say(f"{test} is out of date: {'; '.join(reasons[:3])}")

    return DONE


def _dump(arguments: argparse.Namespace) -> int:
    from switchgear.fingerprints.dump import render

    profile = _known(arguments).profile
    if profile is None:
        return FAILED

    print(render(profile, arguments.format), end="")
    return DONE


def _diff(arguments: argparse.Namespace) -> int:
    import json

    from switchgear.fingerprints.diff import compare, to_table

    old = _from_file(arguments.old)
    new = _from_file(arguments.new) if arguments.new else _known(arguments).profile
    if old is None or new is None:
        return FAILED

    difference = compare(old, new)
    if arguments.json:
        print(json.dumps(difference.to_json(), indent=1))
    else:
        print(to_table(difference, everything=arguments.all), end="")

    return DONE


@contextmanager
def _daemon(arguments: argparse.Namespace) -> Iterator[Daemon | None]:
    """The daemon to ask, or None: none answers, or what was typed is not for it.

    A folder, a delegate or sensors of the caller's own are not the daemon's.
    """
    own = arguments.no_daemon or arguments.store is not None
    own = own or bool(getattr(arguments, "delegate", ""))
    own = own or getattr(arguments, "sysfs", SYSFS_ROOT) != SYSFS_ROOT
    if own:
        yield None
        return

    from switchgear.daemon.cli.fingerprint_daemon import reached

    with reached(arguments.socket) as daemon:
        yield daemon


def _known(arguments: argparse.Namespace) -> Known:
    """What the daemon knows, else what is stored; what is in the way of a profile is told."""
    with _daemon(arguments) as daemon:
        if daemon is None:
            return _stored(_store(arguments))

        known = daemon.known()

    for problem in known.problems:
        _say(problem)

    if known.measuring:
        _say("the daemon is measuring this device now")
    elif known.profile is None:
        _say("the daemon has no profile: measure one with `switchgear fingerprint run`")

    return known


def _store(arguments: argparse.Namespace) -> ProfileStore:
    from switchgear.fingerprints.store import ProfileStore

    if arguments.store is not None:
        return ProfileStore(arguments.store)

    from switchgear.daemon.paths import state_dir

    return ProfileStore(state_dir())


def _stored(store: ProfileStore) -> Known:
    from switchgear.daemon.cli.fingerprint_daemon import Known
    from switchgear.fingerprints.refresh import staleness, told
    from switchgear.fingerprints.runner import Plan

    loaded = store.load()
    problems = told(loaded)
    for problem in problems:
        _say(problem)

    profile = loaded.profile
    if profile is None:
        if not problems:
            _say(f"no profile in {store.folder}: `switchgear fingerprint run` measures one")

        return Known(None, {}, False, problems)

    # Which delegate it was is in the stored key; whether another is wanted is for `run` to say.
    delegate = next(
        (
            name.removeprefix("file:")
            for name in profile.key.parts.get("npu_utilisation", {})
            if name.startswith("file:")
        ),
        "",
    )
    _, stale = staleness(profile, Plan(quick=True, delegate=delegate))
    return Known(profile, {test: list(why) for test, why in stale.items()}, False, problems)


def _from_file(path: Path) -> Profile | None:
    """A profile as it is stored, or as `dump` and `run --json` print it."""
    from switchgear.fingerprints.profile import Profile
    from switchgear.fingerprints.store import decode

    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_AT_MOST + 1)
    except OSError as error:
        _say(f"{path}: {error.strerror}")
        return None

    try:
        return decode(data)[0]
    except ValueError as stored_error:
        try:
            return Profile.model_validate_json(data)
        except ValueError:
            _say(f"{path}: {stored_error}")
            return None


class ProgressLines:
    """Progress on standard error: one bar that moves on a terminal, else a line per step."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal
        self._last = ""

    def update(self, progress: Progress) -> None:
        """What a run in this process does."""
        what = " ".join(filter(None, (progress.test, progress.device)))
        self.show(f"{progress.test}: {progress.text}", progress.done, what)

    def phase(self, text: str, done: float) -> None:
        """What a daemon's run does; the reasons to wait change with every look."""
        self.show(text, done, text.partition(":")[0] if text.startswith("waiting") else text)

    def show(self, text: str, done: float, what: str) -> None:
        """`done` is the share of the whole; `what` tells the steps apart."""
        if self._terminal:
            full = round(done * _BAR_CELLS)
            bar = "#" * full + "-" * (_BAR_CELLS - full)
            line = f"[{bar}] {done:4.0%} {text}"
            sys.stderr.write(f"\r{line[:79]:<79}")
            sys.stderr.flush()
        elif what != self._last:
            _say(f"{done:4.0%} {text}")

        self._last = what

    def end(self) -> None:
        if self._terminal and self._last:
            sys.stderr.write("\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
