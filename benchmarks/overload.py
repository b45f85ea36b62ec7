"""Four times what the CPU can do, with mixed priorities: who is served, who is not, how late.

    python benchmarks/overload.py [--seconds 15] [--run-ms 2] [--times 4] [--json FILE]

A real daemon with its CPU backend; clients are processes that offer requests at random times.
First the capacity, then high priority alone (a fifth of the capacity), then the same among
normal and batch requests, `times` the capacity in all, then among batch requests only, which
have a lane of their own. A fourth of the normal requests have a deadline; so has a stateful
model that counts its own runs, in the same lane.

What holds for the bound is the longest run that a lower priority had in that lane; latencies
are the daemon's, from a request's arrival to its reply.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
from bench_daemon import Daemon, wait_ready
from figures import Figures
from overload_client import PATIENCE_S, Ended, Role, Tally, offer

from switchgear.backends.generate.slow import slow
from switchgear.backends.generate.state import accumulator
from switchgear.client import Client
from switchgear.client.control import Control

CAPACITY_S: Final = 3.0
HIGH_SHARE: Final = 0.2
# Of what is offered beside high priority, in the overload of one lane.
BATCH_SHARE: Final = 0.3
COUNTED_SHARE: Final = 0.1
DEADLINE_MS: Final = 150.0
START_LIMIT_S: Final = 60.0
CONFIGURATION: Final = """
[cpu]
threads = 1
[prepare]
enabled = false
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each phase")
    parser.add_argument("--run-ms", type=float, default=2.0, help="of a run, about")
    parser.add_argument("--times", type=float, default=4.0, help="of the capacity offered")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    figures = Figures()
    with Daemon(CONFIGURATION) as daemon, daemon.connect() as client:
        wait_ready(client)
        client.load_model(slow(arguments.run_ms), "slow")
        client.load_model(accumulator(), "counter")
        bench = Bench(daemon.socket, client, arguments.seconds, arguments.seed)
        measure(bench, figures, arguments.times)

    return figures.finish(arguments.json)


class Bench:
    """Runs phases: clients that begin together and are all answered before the next one."""

    def __init__(self, path: str, client: Client, seconds: float, seed: int) -> None:
        self.client = client
        self._path = path
        self.seconds = seconds
        self._seed = seed
        self._context = multiprocessing.get_context("spawn")

    def handed_over(self, model: str) -> int:
        """Requests of a model that expired when a worker had them already: those may have begun
        in time. The others never left the queue."""
        control = Control(self._path, START_LIMIT_S)
        try:
            text = str(control.call("GetMetrics").parameters["text"])
        finally:
            control.close()

        return sum(
            int(float(line.rpartition(" ")[2]))
            for line in text.splitlines()
            if line.startswith("switchgear_requests_total{")
            and f'model="{model}"' in line
            and 'backend="cpu"' in line
            and 'outcome="DeadlineExceeded"' in line
        )

    def capacity(self) -> float:
        """Runs a second with the interactive lane always full."""
        inputs = {"x": np.ones((1, 1, 1, 128), np.float32)}
        with self.client.open_session("slow", 4) as session, ThreadPoolExecutor(4) as threads:
            end_s = time.monotonic() + CAPACITY_S

            def run() -> int:
                count = 0
                while time.monotonic() < end_s:
                    session.run(inputs)
                    count += 1

                return count

            begin_s = time.monotonic()
            counts = [threads.submit(run) for _ in range(4)]
            total = sum(count.result() for count in counts)
            return total / (time.monotonic() - begin_s)

    def phase(self, *roles: Role) -> dict[str, Tally]:
        """The tallies by the roles' names."""
        begin = self._context.Event()
        out = self._context.Queue()
        clients = []
        for role in roles:
            self._seed += 1
            ready = self._context.Event()
            arguments = (self._path, role, self._seed, ready, begin, self.seconds, out)
            process = self._context.Process(target=offer, args=arguments)
            process.start()
            clients.append((process, ready))

        for process, ready in clients:
            if not ready.wait(START_LIMIT_S):
                raise SystemExit(f"a client did not start: {process.exitcode}")

        begin.set()
        limit_s = self.seconds + PATIENCE_S + START_LIMIT_S
        tallies = [out.get(timeout=limit_s) for _ in clients]
        for process, _ in clients:
            process.join()

        failed = [tally for tally in tallies if isinstance(tally, str)]
        if failed:
            raise SystemExit(f"a client ended: {failed}")

        return {tally.role.name: tally for tally in tallies}


def measure(bench: Bench, figures: Figures, times: float) -> None:
    capacity = bench.capacity()
    figures.add("capacity", capacity, "1/s", how="interactive lane, one thread, always full")
    high = Role("high", "slow", "high", HIGH_SHARE * capacity)
    alone = bench.phase(high)["high"]
    rest = (times - HIGH_SHARE) * capacity
    batch = rest * BATCH_SHARE
    counted = rest * COUNTED_SHARE
    normal = rest - batch - counted
    deadline = {"deadline_ms": DEADLINE_MS}
    mixed = bench.phase(
        high,
        Role("normal", "slow", "normal", 0.75 * normal, 14),
        Role("normal with a deadline", "slow", "normal", 0.25 * normal, 6, **deadline),
        Role("counter", "counter", "normal", counted, 1, **deadline),
        Role("batch", "slow", "batch", batch, 14),
    )
    beside = bench.phase(high, Role("batch", "slow", "batch", rest, 20))

    unloaded_ms = p99_ms(alone.of("ok"))
    figures.add("unloaded_p99_ms", unloaded_ms, "ms", how=f"{high.rate:.0f}/s of high alone")
    lower = [
        one.run_ms
        for name in ("normal", "normal with a deadline", "counter")
        for one in mixed[name].of("ok")
    ]
    longest_ms = max(lower)
    figures.add("lower_run_p50_ms", float(np.percentile(lower, 50)), "ms", how="their runs")
    figures.add("lower_run_longest_ms", longest_ms, "ms", how="in the same lane")
    bound_ms = unloaded_ms + longest_ms
    figures.add("bound_ms", bound_ms, "ms", how="unloaded p99 + longest lower run")
    offered = sum(tally.sent + tally.unsent for tally in mixed.values()) / bench.seconds
    figures.add("offered", offered / capacity, "times", how="of the capacity, mixed")
    how = "in a lane with normal requests, batch beside"
    figures.add("high_p50_ms", median_ms(mixed["high"].of("ok")), "ms", how=how)
    figures.add("high_p99_ms", p99_ms(mixed["high"].of("ok")), "ms", bound_ms, how=how)
    ok = mixed["high"].of("ok")
    waits = {
        "queue": [one.queue_ms for one in ok],
        "ahead": [one.total_ms - one.queue_ms - one.run_ms for one in ok],
        "run": [one.run_ms for one in ok],
    }
    for name, how in (
        ("queue", "until the worker had it"),
        ("ahead", "in the worker, behind what it had before"),
        ("run", "its own run"),
    ):
        figures.add(f"high_{name}_p99_ms", float(np.percentile(waits[name], 99)), "ms", how=how)

    beside_ms = p99_ms(beside["high"].of("ok"))
    how = "in a lane of its own, batch beside"
    figures.add("high_own_lane_p99_ms", beside_ms, "ms", 2 * unloaded_ms, how=how)
    outcomes(figures, mixed, beside, bench.handed_over("counter"))


def outcomes(
    figures: Figures, mixed: dict[str, Tally], beside: dict[str, Tally], begun: int
) -> None:
    """Who was answered, and how; `begun` requests of the counter expired in the worker."""
    tallies = [*mixed.values(), *beside.values()]
    counts = Counter(one.outcome for tally in tallies for one in tally.ended)
    sent = sum(tally.sent for tally in tallies)
    figures.add("sent", sent, "requests", how="in both overloads")
    figures.add("answered_ok", counts.pop("ok", 0), "requests")
    figures.add("rejected", counts.pop("Busy", 0), "requests", how="Busy, with a retry-after")
    figures.add("expired", counts.pop("DeadlineExceeded", 0), "requests")
    other = ", ".join(f"{name} {count}" for name, count in counts.items())
    figures.add("other_errors", sum(counts.values()), "requests", 0, how=other)
    unanswered = sum(tally.lost for tally in tallies)
    figures.add("unanswered", unanswered, "requests", 0)
    once = sum(len(tally.ended) + tally.lost - tally.sent for tally in tallies)
    figures.add("answered_twice", once, "requests", 0)
    refused = sum(len(tally.of("Busy")) for tally in (mixed["high"], beside["high"]))
    figures.add("high_rejected", refused, "requests", 0, how="while lower ones waited")
    unflagged = [
        one
        for tally in tallies
        for one in tally.of("ok")
        if tally.role.deadline_ms and one.total_ms > tally.role.deadline_ms and not one.late
    ]
    figures.add("late_unflagged", len(unflagged), "requests", 0, how="OK after the deadline")
    counter = mixed["counter"]
    expired = counter.of("DeadlineExceeded")
    extra = max(0, counter.runs - len(counter.of("ok")) - begun)
    how = f"{counter.runs} runs counted by the model; {len(expired)} expired, {begun} at work"
    figures.add("expired_that_ran", extra, "runs", 0, how=how)
    unsent = sum(tally.unsent for tally in tallies)
    figures.add("unsent", unsent, "requests", how="no slot free: the clients' own bound")


def p99_ms(ended: list[Ended]) -> float:
    return float(np.percentile([one.total_ms for one in ended], 99))


def median_ms(ended: list[Ended]) -> float:
    return float(np.percentile([one.total_ms for one in ended], 50))


if __name__ == "__main__":
    sys.exit(main())
