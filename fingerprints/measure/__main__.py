"""The test process: `python -m switchgear.fingerprints.measure TEST --fd N --json-args JSON`.

Runs one test and writes what it finds to the descriptor, one JSON object a line (`channel`).
By hand, without `--fd`, the lines go to standard output.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import signal
import sys

from switchgear.fingerprints.measure.channel import Channel
from switchgear.fingerprints.measure.options import Options
from switchgear.fingerprints.measurement import TESTS, Failure, Report

_PR_SET_PDEATHSIG = 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="switchgear.fingerprints.measure")
    parser.add_argument("test", choices=TESTS)
    parser.add_argument("--fd", type=int, default=1)
    parser.add_argument("--parent", type=int, default=0)
    parser.add_argument("--json-args", default="{}", dest="json_args")
    arguments = parser.parse_args()
    options = Options.from_json(arguments.json_args)
    if arguments.parent:
        end_with_parent(arguments.parent)

    if options.yield_cpu:
        yield_to_everybody()

    channel = Channel(arguments.fd)
    try:
        test = importlib.import_module(f"switchgear.fingerprints.measure.{arguments.test}")
        test.run(options, channel)
    except MemoryError as error:
        failure = Failure(arguments.test, "errno", 12, "ENOMEM", str(error) or "out of memory")
        channel.report(Report(arguments.test, None, (failure,)))

    channel.end()
    sys.stderr.flush()
    # Drivers register exit handlers that hang or crash: everything is written, so leave.
    os._exit(0)


def yield_to_everybody() -> None:
    """Has this process run only when nobody else wants the CPU.

    Before any thread is there: all of a driver's threads inherit it. It cannot be taken back.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        # A sandbox may forbid the call; niceness is allowed everywhere.
        os.nice(19)


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when `parent` ends; exits if it has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main())
