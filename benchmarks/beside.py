"""What is served while models are prepared: a GPU's frames, and a new model's first answer.

    python benchmarks/beside.py [--frames N] [--models N] [--json FILE]

- A small network is served on Vulkan, ten frames a second, alone and while MobileNet v1 is
  compiled cold for the same backend: the frames' p99 in both.
- New models are loaded and answer their first frame on the CPU, alone and while another is
  being prepared, in turn: the medians of both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from time import monotonic, perf_counter, sleep
from typing import Any, Final

import numpy as np
from figures import ROOT, Figures

sys.path.insert(0, str(ROOT / "tests"))
from daemon_process import DaemonProcess
from small_network import small_network

from switchgear.backends import generate
from switchgear.client import Client, Session, connect

PERIOD_S: Final = 0.1
ENABLED: Final = {"SWITCHGEAR_PREPARE__ENABLED": "true"}
CONFIGURATION: Final = '[prepare]\nbackends = ["vulkan"]\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=200, help="in each of the two conditions")
    parser.add_argument("--models", type=int, default=9, help="loaded in each condition")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    figures = Figures()
    add_served(figures, arguments.frames)
    add_first_answers(figures, arguments.models)
    return figures.finish(arguments.json)


def add_served(figures: Figures, count: int) -> None:
    with (
        DaemonProcess(config=CONFIGURATION, environment=ENABLED) as daemon,
        connect(daemon.socket) as client,
    ):
        model = client.load_model(small_network(), "served")
        model = client.prepare_model(model)
        if model.pairs[0].state != "ready":
            raise SystemExit(f"vulkan does not serve: {model.pairs[0].reason}")

        inputs = {t.name: np.zeros(t.shape, np.float32) for t in model.inputs}
        with client.open_session(model, backends=["vulkan"], strict=True) as session:
            frames(session, inputs, 20)
            alone = frames(session, inputs, count)
            workers = worker_pids(client)
            client.load_model(generate.mobilenet_v1(), "prepared")
            wait_for_compiler(client)
            beside = frames(session, inputs, count)
            still = preparing(client)

        killed = workers - worker_pids(client)

    how = f"{count} frames, ten a second"
    alone_ms, beside_ms = (float(np.percentile(each, 99)) for each in (alone, beside))
    figures.add("vulkan_p99_alone_ms", alone_ms, "ms", how=how)
    figures.add("vulkan_p99_beside_ms", beside_ms, "ms", how=f"{how}, MobileNet v1 compiled")
    figures.add("vulkan_p99_ratio", beside_ms / alone_ms, "x", 1.5, how="beside over alone")
    medians = statistics.median(beside) / statistics.median(alone)
    figures.add("vulkan_p50_ratio", medians, "x", how="beside over alone")
    figures.add("workers_killed", len(killed), "workers", 0.0)
    figures.add("still_compiling", float(still), "bool", how="1: all frames were beside it")


def frames(session: Session, inputs: dict[str, Any], count: int) -> list[float]:
    """Round trips in milliseconds, one each period."""
    times = []
    due_s = monotonic()
    for _ in range(count):
        due_s += PERIOD_S
        sleep(max(0.0, due_s - monotonic()))
        begin = perf_counter()
        session.run(inputs)
        times.append((perf_counter() - begin) * 1000)

    return times


def worker_pids(client: Client) -> set[int]:
    return {row["pid"] for row in client.status()["workers"] if row["pid"]}


def preparing(client: Client) -> bool:
    pairs = client.describe("prepared").pairs
    return any(pair.state in ("waiting", "preparing") for pair in pairs)


def wait_for_compiler(client: Client) -> None:
    while not any(pair.state == "preparing" for pair in client.describe("prepared").pairs):
        sleep(0.05)


def add_first_answers(figures: Figures, count: int) -> None:
    """Models are all different; conditions alternate, each on a daemon of its own."""
    times: dict[bool, list[float]] = {False: [], True: []}
    quiet = {"SWITCHGEAR_PREPARE__ENABLED": "false"}
    with (
        DaemonProcess(config=CONFIGURATION, environment=quiet) as alone,
        DaemonProcess(config=CONFIGURATION, environment=ENABLED) as busy,
        connect(alone.socket) as quiet_client,
        connect(busy.socket) as busy_client,
    ):
        busy_client.load_model(generate.mobilenet_v1(), "prepared")
        wait_for_compiler(busy_client)
        for number in range(count):
            for beside, client in ((False, quiet_client), (True, busy_client)):
                times[beside].append(first_answer_s(client, 1000 + 2 * number + beside))

        still = preparing(busy_client)

    alone_ms, beside_ms = (1000 * statistics.median(times[each]) for each in (False, True))
    how = f"load to first answer, median of {count} models"
    figures.add("first_answer_alone_ms", alone_ms, "ms", how=how)
    figures.add("first_answer_beside_ms", beside_ms, "ms", how=f"{how}; others are prepared")
    figures.add("first_answer_ratio", beside_ms / alone_ms, "x", 1.1, how="beside over alone")
    figures.add(
        "others_still_prepared", float(still), "bool", how="1: all loads were beside it"
    )


def first_answer_s(client: Client, size: int) -> float:
    values = np.ones(size, np.float32)
    begin = perf_counter()
    model = client.load_model(generate.two_inputs(size))
    with client.open_session(model) as session:
        session.run({"a": values, "b": values})

    return perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
