"""What the metrics and the recorder cost a request, in the daemon.

    ./dev bench telemetry [--json FILE]

The hooks are called as a session calls them, with real records, no process in between; each
figure is the thread's CPU time in the best of several rounds, less the empty loop. A scrape's
longest part is what a frame may have to wait for it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from figures import Figures

from switchgear.daemon.routing.choice import Inputs, Verdict
from switchgear.daemon.routing.ring import DecisionRing
from switchgear.daemon.telemetry.exposition import render
from switchgear.daemon.telemetry.requests import MAX_MODELS, Meter, RequestCounts
from switchgear.ipc.record import Kind, Record

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 7
BACKENDS = ("cpu", "vulkan")
# The bar of a request's cost, metrics and recorder together.
LIMIT_US = 5.0


class FakeWorker:
    """What the recorder reads of a worker."""

    def __init__(self, pid: int) -> None:
        self.pid = pid


def model(name: str) -> Any:
    return SimpleNamespace(digest=hashlib.sha256(name.encode()).hexdigest(), label=name)


def a_request(meter: Meter) -> Any:
    session = SimpleNamespace(
        identity=1,
        peer=SimpleNamespace(pid=1, uid=0),
        model=SimpleNamespace(label="face"),
        meter=meter,
    )
    return SimpleNamespace(
        session=session,
        lane=SimpleNamespace(
            backend="cpu", name="interactive", group="0", worker=FakeWorker(4711)
        ),
        identity=1,
        arrival_ns=1_000_000,
        dispatch_ns=1_060_000,
        attempts=0,
        priority=2,
        reason=5,
    )


def best_us(call: Callable[[], object], count: int) -> float:
    """Microseconds of one call: the best round, less an empty one."""

    def seconds(one: Callable[[], object]) -> float:
        rounds = []
        for _ in range(ROUNDS):
            begin = time.thread_time()
            for _call in range(count):
                one()

            rounds.append(time.thread_time() - begin)

        return min(rounds)

    return 1e6 * (seconds(call) - seconds(lambda: None)) / count


async def measure(figures: Figures, count: int) -> None:
    counts = RequestCounts()
    meter = counts.meter(model("face"))
    request = a_request(meter)
    reply = bytearray(Record(Kind.REPLY).pack())

    def finish() -> None:
        # As in `Session.finish`: the test for a meter is part of the cost.
        if request.session.meter is not None:
            request.session.meter.finished(request, reply, 4_000_000, 6_000_000)

    figures.add("metrics_us", best_us(finish, count), "us", how="no trace runs")
    ring = DecisionRing()
    inputs = Inputs(0.0, 0, 0.0, "cpu", 0.0, "", 0, 0.0, ())
    verdict = Verdict(0, 1, -1, "cpu", 0.0)

    def finish_and_decide() -> None:
        finish()
        ring.add(1, inputs, verdict)

    figures.add(
        "metrics_and_ring_us",
        best_us(finish_and_decide, count),
        "us",
        LIMIT_US,
        how="and the decision, which is made anyway, is kept in its ring",
    )
    watcher = counts.recorder.watch(None)

    def finish_and_record() -> None:
        finish()
        if watcher.wakeup.is_set():
            watcher.take()

    figures.add(
        "metrics_and_recorder_us",
        best_us(finish_and_record, count),
        "us",
        LIMIT_US,
        how="a trace runs; rows are taken out when there are enough for an answer",
    )
    counts.recorder.unwatch(watcher)
    scrape(figures, counts)


def scrape(figures: Figures, counts: RequestCounts) -> None:
    """As many series as there can be."""
    for number in range(MAX_MODELS):
        meter = counts.meter(model(f"model-{number}"))
        request = a_request(meter)
        for backend in BACKENDS:
            request.lane.backend = backend
            reply = bytearray(Record(Kind.REPLY).pack())
            meter.finished(request, reply, 4_000_000, 6_000_000)

    longest, whole, size = 0.0, [], 0
    for _ in range(ROUNDS):
        begin = time.thread_time()
        last, turns, size = begin, [], 0
        for part in render(counts.families(None)):
            size += len(part)
            now = time.thread_time()
            turns.append(now - last)
            last = now

        whole.append(last - begin)
        longest = max(turns) if not longest else min(longest, max(turns))

    figures.add("scrape_ms", 1e3 * min(whole), "ms", how=f"{MAX_MODELS} models, {size} bytes")
    figures.add(
        "scrape_longest_part_ms",
        1e3 * longest,
        "ms",
        how="between two parts: the loop may have its turn",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="fewer calls")
    options = parser.parse_args()
    figures = Figures()
    asyncio.run(measure(figures, 5_000 if options.quick else 50_000))
    return figures.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
