"""`switchgear doctor`: what is missing on this machine, and the command that fixes it.

Engines and drivers are opened in child processes only (`doctor_probe`): one that crashes or
hangs costs its line of the report.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from switchgear.daemon.cli import doctor_fixes, doctor_places
from switchgear.daemon.cli.command import (
    DONE,
    FAILED,
    Subparsers,
    add_command,
    add_socket,
    print_json,
)
from switchgear.daemon.cli.doctor_places import ABSENT, MISSING, OK, Check
from switchgear.daemon.cli.progress import ProgressLine
from switchgear.daemon.cli.tables import WIDTH, cut
from switchgear.daemon.config import load
from switchgear.ipc.errors import BadConfiguration

_PYTHON: Final = (3, 11)
_PROBE_LIMIT_S: Final = 30.0
GPU_LIMIT_S: Final = 120.0
# The fingerprint's test that opens the drivers one by one, and so names the bad one.
_TESTS: Final = {"vulkan": "vulkan_matmul", "opencl": "opencl_bandwidth"}
BACKENDS: Final = ("cpu", "vulkan", "opencl", "npu")


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "doctor",
        run,
        "what is missing on this machine for each backend, and the command that fixes it",
        "switchgear doctor",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the configuration file")
    add_socket(parser)


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 when a daemon can serve on this machine, else 1."""
    checks = []
    with ProgressLine("checking") as line:
        for name, check in _checks(options):
            line.update(name)
            checks.append(check())

    if options.json:
        print_json(
            {"ok": usable(checks), "checks": [dataclasses.asdict(check) for check in checks]}
        )
    else:
        print(render(checks))

    return DONE if usable(checks) else FAILED


def usable(checks: list[Check]) -> bool:
    return all(check.state == OK for check in checks if check.required)


def _checks(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Check]]]:
    yield "python", python
    yield "cpu", partial(probe, "cpu")
    for backend in ("vulkan", "opencl"):
        # A software driver compiles for a while.
        yield backend, partial(probe, backend, GPU_LIMIT_S)

    yield "npu", lambda: npu(options.config)
    yield "render nodes", doctor_places.render_nodes
    yield "configuration", lambda: doctor_places.configuration(options.config)
    yield "socket folder", lambda: doctor_places.socket_folder(options.socket)
    yield "daemon", lambda: doctor_places.daemon(options.socket)


def python() -> Check:
    version = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info >= _PYTHON:
        return Check("python", OK, f"{version}, {sys.executable}", required=True)

    text = f"{version} is older than {'.'.join(str(part) for part in _PYTHON)}"
    return Check("python", MISSING, text, doctor_fixes.package("python"), required=True)


def npu(config: Path | None) -> Check:
    """The NPU's own known-answer run; without a library for one, what the kernel presents."""
    try:
        found = probe("npu", GPU_LIMIT_S, load(config).backend_options("npu"))
    except BadConfiguration as error:
        return Check("npu", MISSING, f"the configuration is not readable: {error.text}")

    nodes = doctor_places.npu()
    if found.state == OK or nodes.state == MISSING:
        return found if found.state == OK else nodes

    if nodes.state == ABSENT and "ENOENT" in found.text:
        return nodes

    return found


def probe(
    backend: str, limit_s: float = _PROBE_LIMIT_S, options: dict[str, Any] | None = None
) -> Check:
    """Runs a backend's probe in a process of its own; blocks for `limit_s` at most."""
    module = "switchgear.daemon.cli.doctor_probe"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, backend, json.dumps(options or {})],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Drivers start compilers: all of it ends together.
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        output = b""
        death = f"the probe did not end within {limit_s:g} s"
    except BaseException:
        _end(process)
        raise
    else:
        death = _death(process.returncode, errors)

    _end(process)
    try:
        answer = json.loads(output)
    except ValueError:
        return Check(backend, MISSING, death, _fix_of_crash(backend), required=backend == "cpu")

    return _check_of(backend, answer)


def _check_of(backend: str, answer: dict[str, Any]) -> Check:
    required = backend == "cpu"
    if answer["ok"]:
        return Check(backend, OK, answer["text"], required=required)

    fix = doctor_fixes.fix(answer["what"])
    text = f"{answer['what']}: {answer['text']}"
    return Check(backend, MISSING, text, fix, required=required)


def _death(status: int, errors: bytes) -> str:
    lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    said = f": {lines[-1].strip()}" if lines else ""
    if status == 0:
        return f"a driver ended the probe, or wrote into its answer{said}"

    if status > 0:
        return f"the probe ended with status {status}{said}"

    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"

    return f"the driver killed the probe with {name}{said}"


def _fix_of_crash(backend: str) -> str:
    test = _TESTS.get(backend)
    return f"switchgear fingerprint run --test {test}" if test else doctor_fixes.fix("engine")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a probe and its children."""
    # Before the process is reaped its group's number cannot be another's; a group outlives it.
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass

    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()

    process.wait()


def render(checks: list[Check]) -> str:
    """The report for people: what it comes to, then a line for each check and its fix."""
    lines = [headline(checks)]
    for check in checks:
        word = check.state.upper() if check.state == MISSING else check.state
        lead = f"  {check.name:<14} {word:<8} "
        lines += textwrap.wrap(
            " ".join(check.text.split()),
            WIDTH,
            initial_indent=lead,
            subsequent_indent=" " * len(lead),
            break_on_hyphens=False,
        )
        if check.fix:
            # Whole, whatever its length: it is there to be copied.
            lines.append(f"    fix: {check.fix}")

    return "\n".join(lines)


def headline(checks: list[Check]) -> str:
    stopping = [check.name for check in checks if check.required and check.state != OK]
    if stopping:
        return cut(f"NOT FINE: a daemon cannot serve here: {', '.join(stopping)}")

    ready = [check.name for check in checks if check.name in BACKENDS and check.state == OK]
    lacking = [check.name for check in checks if check.state == MISSING]
    absent = [
        check.name for check in checks if check.name in BACKENDS and check.state == ABSENT
    ]
    text = f"fine: {', '.join(ready)} can run"
    text += f"; missing: {', '.join(lacking)}" if lacking else ""
    return cut(text + (f"; no such device: {', '.join(absent)}" if absent else ""))
