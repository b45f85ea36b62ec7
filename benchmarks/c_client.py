"""A request of the C client beside the same of the Python client, through one daemon.

    ./dev bench c_client [--quick] [--json FILE]

The smallest model, measured in turn within one run. Needs a C compiler.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench_daemon import Daemon, median_us, wait_ready
from figures import Figures

from switchgear.backends import generate

FOLDER = Path(__file__).resolve().parent
CLIENT = FOLDER.parent / "client" / "c"


class Program:
    """The compiled client in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def median_us(self, count: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline()) / 1e3


def compile_client(target: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc")
    if not compiler:
        raise SystemExit("no C compiler (cc)")

    sources = [str(FOLDER / "c_client.c"), str(CLIENT / "switchgear.c")]
    options = ["-std=c11", "-O2", f"-I{CLIENT}", "-o", str(target)]
    subprocess.run([compiler, *options, *sources], check=True)


@contextmanager
def running(program: Path, *arguments: str) -> Iterator[Program]:
    with subprocess.Popen(
        [str(program), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Program(process)


def round_trips(
    figures: Figures, program: Path, cpus: set[int], count: int, rounds: int
) -> None:
    for name, allowed in (("", {max(cpus)}), ("_unpinned", cpus)):
        # The program and the daemon inherit it.
        os.sched_setaffinity(0, allowed)
        with Daemon(cpus=allowed) as daemon, daemon.connect() as client:
            wait_ready(client)
            model = client.load_model(generate.identity((1,)), name="null")
            with (
                client.open_session(model) as session,
                session.slot() as slot,
                running(program, daemon.socket, "null") as c_client,
            ):
                median_us(slot.run, count // 4)
                c_client.median_us(count // 4)
                rows = [
                    (c_client.median_us(count), median_us(slot.run, count))
                    for _ in range(rounds)
                ]

        os.sched_setaffinity(0, cpus)
        c_us, python_us = (statistics.median(column) for column in zip(*rows, strict=True))
        where = "all on one CPU" if not name else f"on {len(cpus)} CPUs"
        figures.add(
            f"c_over_python_client{name}",
            statistics.median(c / python for c, python in rows),
            "ratio",
            None if name else 1.0,
            how=f"{c_us:.1f} us over {python_us:.1f} us, {where}, {rounds} rounds of {count}",
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    count, rounds = (500, 5) if options.quick else (3000, 15)
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="switchgear-bench-") as folder:
        program = Path(folder, "c_client")
        compile_client(program)
        round_trips(figures, program, os.sched_getaffinity(0), count, rounds)

    return figures.finish(options.json)


if __name__ == "__main__":
    raise SystemExit(main())
