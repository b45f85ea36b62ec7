"""`switchgear bench`: latency through the daemon beside the same model in this process.

Both write their inputs from an array and copy their outputs out, for each frame. Windows of the
two alternate, so that a machine that gets slower slows both. Each client is a process of its
own; in-process is one loop in this process, on an engine of the same kind and thread count.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from switchgear.daemon.cli import models
from switchgear.daemon.cli.bench_client import make_inputs
from switchgear.daemon.cli.command import (
    DONE,
    CommandError,
    Subparsers,
    UsageError,
    add_command,
    add_socket,
    connected,
    print_json,
)
from switchgear.daemon.cli.progress import ProgressLine
from switchgear.daemon.cli.tables import amount, table
from switchgear.ipc.errors import DriverError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from switchgear.client import Client, Model

_WINDOW_S: Final = 0.5
_WARM_UP_S: Final = 0.2
_PERCENTILES: Final = (50, 90, 99)
_MAX_SLOTS: Final = 16


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "bench",
        run,
        "latency through the daemon beside in-process",
        "switchgear bench face.tflite --clients 4 --seconds 20",
        "switchgear bench generated:mobilenet_v1 --json",
    )
    parser.add_argument("model", metavar="MODEL", help=models.MODEL_HELP)
    parser.add_argument("--clients", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--slots",
        type=int,
        default=1,
        metavar="N",
        help="frames in flight of each (default: 1)",
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="of each side (default: 10)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="of the in-process engine (default: as many as the worker has)",
    )
    add_socket(parser)


@dataclass(slots=True)
class Side:
    """The frames of one of the two: latencies and, of the daemon's, the workers' run times."""

    latencies_ms: list[float] = field(default_factory=list)
    run_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self) -> dict[str, float]:
        """Frames, frames a second, percentiles; there is at least one frame."""
        ordered = sorted(self.latencies_ms)
        return {
            "frames": len(ordered),
            "frames_per_s": len(ordered) / self.seconds,
            **{f"p{p}_ms": percentile(ordered, p) for p in _PERCENTILES},
            "max_ms": ordered[-1],
        }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the sorted values do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def run(options: argparse.Namespace) -> int:
    _check(options)
    with ExitStack() as stack:
        client = stack.enter_context(connected(options))
        model = models.loaded(client, options.model)
        engine = _engine(options, options.threads or daemon_threads(client))
        values = make_inputs(model.inputs)
        clients = [
            stack.enter_context(_client(client.path, model, options.slots))
            for _ in range(options.clients)
        ]
        line = stack.enter_context(ProgressLine(f"measuring {model.name}"))
        line.update("warming up")
        # Thrown away: the first frames set up what the later ones use.
        backend = _daemon_window(clients, Side(), _WARM_UP_S)
        if engine is not None:
            engine.window(values, Side(), _WARM_UP_S)

        daemon, in_process = Side(), Side()
        windows = max(1, round(options.seconds / _WINDOW_S))
        for number in range(windows):
            line.update("running", number, windows)
            _daemon_window(clients, daemon, options.seconds / windows)
            if engine is not None:
                engine.window(values, in_process, options.seconds / windows)

        line.update("running", windows, windows)

    local = None if engine is None else (engine, in_process)
    report = _report(options, model, backend, daemon, local)
    print_json(report) if options.json else print(_text(report))
    return DONE


def _check(options: argparse.Namespace) -> None:
    if options.clients < 1:
        raise UsageError("--clients needs a number above 0")

    if not 1 <= options.slots <= _MAX_SLOTS:
        raise UsageError(f"--slots goes from 1 to {_MAX_SLOTS}")

    if not 0 < options.seconds < math.inf:
        raise UsageError("--seconds needs a number above 0")

    if options.threads is not None and options.threads < 1:
        raise UsageError("--threads needs a number above 0")


def daemon_threads(client: Client) -> int:
    """The threads of the worker that serves us; the model is loaded, so there is one."""
    workers = client.status()["workers"]
    return next((w["threads"] for w in workers if w["lane"] == "interactive"), 1)


class Local:
    """The model in this process, as an app without a daemon would run it."""

    def __init__(self, path: str, threads: int) -> None:
        """:raises DriverError: no engine is installed, or it does not take the model."""
        from switchgear.backends.contract import LoadRequest
        from switchgear.backends.cpu import CpuBackend, installed_engine

        # Names as the daemon gives them; the loop itself is the engine's plain interface.
        backend = CpuBackend({"threads": threads})
        instance = backend.load(LoadRequest(path))
        info = instance.info
        instance.close()
        self.threads = threads
        name, version, module = installed_engine()
        self.engine = f"{name} {version}"
        self._interpreter: Any = module.Interpreter(model_path=path, num_threads=threads)
        self._interpreter.allocate_tensors()
        self._inputs = [
            (spec.name, int(details["index"]))
            for spec, details in zip(
                info.inputs, self._interpreter.get_input_details(), strict=True
            )
        ]
        self._outputs = [int(d["index"]) for d in self._interpreter.get_output_details()]

    def window(self, values: Mapping[str, NDArray[Any]], side: Side, seconds: float) -> None:
        """Runs frames for `seconds`, one at least.

        :raises CommandError: the engine refuses the inputs, or an output.
        """
        interpreter = self._interpreter
        begin = now = time.perf_counter()
        while now - begin < seconds:
            start = now
            for name, index in self._inputs:
                interpreter.set_tensor(index, values[name])

            try:
                interpreter.invoke()
                for index in self._outputs:
                    interpreter.get_tensor(index)
            except (RuntimeError, ValueError) as error:
                raise CommandError(f"the in-process engine failed: {error}") from None

            now = time.perf_counter()
            side.latencies_ms.append((now - start) * 1000)

        side.seconds += now - begin


def _engine(options: argparse.Namespace, threads: int) -> Local | None:
    """None where MODEL is a loaded one: the daemon does not give its bytes away."""
    if not (models.is_file(options.model) or Path(options.model).is_file()):
        return None

    given = models.source(options.model)
    try:
        if isinstance(given, str):
            return Local(given, threads)

        # The engine maps the file; its name may go.
        with tempfile.NamedTemporaryFile(suffix=".tflite") as file:
            file.write(given)
            file.flush()
            return Local(file.name, threads)
    except DriverError as error:
        raise CommandError(f"the in-process engine does not run it: {error.text}") from None


@contextmanager
def _client(socket: str, model: Model, slots: int) -> Iterator[subprocess.Popen[str]]:
    """A client's process with its session open.

    :raises CommandError: it cannot open one.
    """
    arguments = {"socket": socket, "model": model.hash, "slots": slots}
    command = [sys.executable, "-P", "-m", "switchgear.daemon.cli.bench_client"]
    process = subprocess.Popen(
        [*command, "--json-args", json.dumps(arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _answer(process)
        yield process
    except BaseException:
        # Not with its stdin: it would first end the window that it is in.
        process.terminate()
        raise
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

        process.wait()


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise CommandError(f"a client ended with status {process.wait()}")

    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise CommandError(f"a client failed: {answer['error']}: {answer['message']}")

    return answer


def _daemon_window(clients: Sequence[subprocess.Popen[str]], side: Side, seconds: float) -> str:
    """Has all clients run at the same time; returns the backend."""
    for client in clients:
        assert client.stdin is not None
        try:
            client.stdin.write(f"{seconds}\n")
            client.stdin.flush()
        except BrokenPipeError:
            # Why is in what it said last.
            pass

    answers = [_answer(client) for client in clients]
    for answer in answers:
        side.latencies_ms += answer["latencies_ms"]
        side.run_ms += answer["run_ms"]

    side.seconds += max(answer["seconds"] for answer in answers)
    return str(answers[0]["backend"])


def _report(
    options: argparse.Namespace,
    model: Model,
    backend: str,
    daemon: Side,
    local: tuple[Local, Side] | None,
) -> dict[str, Any]:
    """Times are in milliseconds; `overhead_ms` is the medians' round trip less run."""
    summary = daemon.summary()
    run_ms = percentile(sorted(daemon.run_ms), 50)
    report: dict[str, Any] = {
        "model": model.hash,
        "name": model.name,
        "clients": options.clients,
        "slots": options.slots,
        "backend": backend,
        "daemon": summary,
        "worker_run_p50_ms": run_ms,
        "in_process": None,
    }
    if options.slots == 1 and options.clients == 1:
        report["overhead_ms"] = summary["p50_ms"] - run_ms

    if local is not None:
        engine, side = local
        other = side.summary()
        report |= {
            "in_process": other,
            "engine": engine.engine,
            "threads": engine.threads,
            "p50_over_in_process": summary["p50_ms"] / other["p50_ms"],
            "throughput_over_in_process": summary["frames_per_s"] / other["frames_per_s"],
        }

    return report


def _text(report: Mapping[str, Any]) -> str:
    headings = ("", "FRAMES", "FRAMES/S", "P50 MS", "P90 MS", "P99 MS", "MAX MS")
    rows = [(f"daemon, {amount(report['clients'], 'client')}", *_numbers(report["daemon"]))]
    local = report["in_process"]
    if local is not None:
        label = f"in-process, {amount(report['threads'], 'thread')}"
        rows.append((label, *_numbers(local)))

    slots = amount(report["slots"], "frame")
    lines = [
        f"{report['name']} on {report['backend']}, {slots} in flight of each client",
        table(headings, rows),
    ]
    tail = f"worker's run {report['worker_run_p50_ms']:.2f} ms"
    if "overhead_ms" in report:
        tail += f", the daemon's way {report['overhead_ms']:.3f} ms"

    lines.append(tail + " (medians)")
    if local is None:
        lines.append("in-process: give the .tflite file, for a loaded model's is not to be had")
    else:
        lines.append(
            f"daemon over in-process: {report['p50_over_in_process']:.2f} times the median,"
            f" {report['throughput_over_in_process']:.2f} times the frames"
        )

    return "\n".join(lines)


def _numbers(summary: Mapping[str, float]) -> list[str]:
    times = [f"{summary[name]:.3f}" for name in (*(f"p{p}_ms" for p in _PERCENTILES), "max_ms")]
    return [f"{summary['frames']}", f"{summary['frames_per_s']:.1f}", *times]
