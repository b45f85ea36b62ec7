"""What a client of the daemon notices while the device is measured, and how long that takes.

Part of `fingerprint.py`. The daemon, its worker, the client and the tests are real.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from bench_daemon import Daemon, wait_ready

from switchgear.backends import generate
from switchgear.client import Session
from switchgear.client.control import Control
from switchgear.fingerprints.child import cpu_time_s
from switchgear.fingerprints.measurement import TESTS

if TYPE_CHECKING:
    from figures import Figures

FRAME_S = 1 / 30
MODEL_MS = 4.0
WARM_UP = 30
ANSWER_LIMIT_S = 30.0
WHOLE_LIMIT_S = 600.0
# Little more than what the daemon reserves of it for the tests themselves.
QUICK_PATIENCE_S = 33.0


@dataclass(frozen=True, slots=True)
class Window:
    """Latencies of one window, and how long the window was."""

    p50_ms: float
    p99_ms: float
    took_s: float


def add_latency(figures: Figures, *, quick: bool, requests: int, pairs: int) -> None:
    """A client's latency with over without tests.

    The gate is set to let every test pass at once: the client meets all of them. One that never
    rests meets tests that keep still; one of 30 frames a second meets them at each frame.
    """
    with measuring_daemon(patience_s=0, busy_share=1) as (daemon, session):
        rate = 60 if quick else 30
        how = f"{rate} frames a second"
        _add_ratios(figures, daemon, session, "", 1 / rate, how, requests, pairs)
        if not quick:
            _add_ratios(figures, daemon, session, "unpaced_", 0.0, "no pause", requests, pairs)


def _add_ratios(
    figures: Figures,
    daemon: Daemon,
    session: Session,
    prefix: str,
    interval_s: float,
    how: str,
    requests: int,
    pairs: int,
) -> None:
    p50s, p99s, alone = [], [], []
    used_s = window_s = 0.0
    for number in range(pairs):
        _tell(f"latency ({how}): pair {number + 1} of {pairs}")
        without = window(session, requests, interval_s)
        with tests_running(daemon):
            before_s = tests_cpu_s(daemon.process.pid)
            beside = window(session, requests, interval_s)
            used_s += tests_cpu_s(daemon.process.pid) - before_s
            window_s += beside.took_s

        alone.append(without.p99_ms)
        p50s.append(beside.p50_ms / without.p50_ms)
        p99s.append(beside.p99_ms / without.p99_ms)

    text = f"{how}, {pairs} alternating windows of {requests}"
    figures.add(
        f"{prefix}p99_ratio",
        statistics.median(p99s),
        "x",
        1.3,
        how=f"{text}; each {', '.join(f'{ratio:.2f}' for ratio in p99s)}",
    )
    figures.add(
        f"{prefix}p50_ratio",
        statistics.median(p50s),
        "x",
        1.1,
        how=f"each {', '.join(f'{ratio:.2f}' for ratio in p50s)}",
    )
    figures.add(
        f"{prefix}p99_alone_ms", statistics.median(alone), "ms", how="without tests, the median"
    )
    figures.add(
        f"{prefix}tests_cpu_pct",
        100 * used_s / window_s,
        "%",
        how="CPU time of the tests in the windows with them; 100 is one CPU",
    )


def add_whole(figures: Figures, *, quick: bool) -> None:
    """The time of the whole beside a client that never leaves a gap of 100 ms."""
    patience_s = QUICK_PATIENCE_S if quick else WHOLE_LIMIT_S
    with (
        measuring_daemon(patience_s=patience_s) as (daemon, session),
        sending(session, FRAME_S) as sent,
        closing(Control(daemon.socket, ANSWER_LIMIT_S)) as control,
    ):
        began, count = time.perf_counter(), len(sent)
        job = control.call("RunFingerprint", {"force": True, "quick": quick}).parameters["job"]
        reply = control.call("WatchJob", {"job": job}, more=True)
        while reply.continues:
            said = reply.parameters
            _tell(f"beside 30 fps: {said['done'] / 10:.0f} %, {said['phase']}")
            reply = control.next()

        took_s = time.perf_counter() - began
        rate = (len(sent) - count) / took_s
        measured = list(reply.parameters["result"]["measured"])

    kind = "all tests"
    if quick:
        kind = f"quick tests, a patience of {QUICK_PATIENCE_S:.0f} s instead of 600"

    figures.add(
        "whole_beside_30_fps_s",
        took_s,
        "s",
        WHOLE_LIMIT_S,
        ok=took_s <= WHOLE_LIMIT_S and set(measured) == set(TESTS),
        how=f"{kind}; the client was answered {rate:.1f} times a second",
    )


def tests_cpu_s(daemon_pid: int) -> float:
    """CPU time of the daemon's test processes so far, those that have ended included."""
    # Of its children only test processes end here; their time is in its own line.
    words = Path(f"/proc/{daemon_pid}/stat").read_text().rpartition(")")[2].split()
    ended_s = (int(words[13]) + int(words[14])) / os.sysconf("SC_CLK_TCK")
    mark = f"\0--parent\0{daemon_pid}\0"
    running_s = 0.0
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit():
                line = (folder / "cmdline").read_text(errors="replace")
                if mark in line and "fingerprints.measure" in line:
                    running_s += cpu_time_s(int(folder.name))

    return ended_s + running_s


def window(session: Session, requests: int, interval_s: float) -> Window:
    """Sends that many requests, one each `interval_s`, and waits for each."""
    frame = np.ones((1, 1, 1, 128), np.float32)
    for _ in range(WARM_UP):
        session.run(x=frame)

    times_ms = []
    began = due = time.perf_counter()
    for _ in range(requests):
        due = _pause(due, interval_s)
        start = time.perf_counter()
        session.run(x=frame)
        times_ms.append((time.perf_counter() - start) * 1000)

    took_s = time.perf_counter() - began
    times_ms.sort()
    return Window(statistics.median(times_ms), times_ms[int(0.99 * len(times_ms))], took_s)


def _pause(due: float, interval_s: float) -> float:
    left_s = due - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)

    return max(due, time.perf_counter() - interval_s) + interval_s


@contextmanager
def tests_running(daemon: Daemon) -> Iterator[None]:
    """Has the daemon measure all the time; yields as soon as a test is at a device."""
    at_device, ended = threading.Event(), threading.Event()

    def measure() -> None:
        while not ended.is_set():
            with closing(Control(daemon.socket, ANSWER_LIMIT_S)) as control:
                reply = control.call("RunFingerprint", {"force": True})
                reply = control.call("WatchJob", reply.parameters, more=True)
                while reply.continues and not ended.is_set():
                    test, _, device = reply.parameters["phase"].partition(": ")
                    if test in TESTS and device and not device.startswith("waiting"):
                        at_device.set()

                    reply = control.next()

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        at_device.wait()
        yield
    finally:
        ended.set()
        with closing(Control(daemon.socket, ANSWER_LIMIT_S)) as control:
            while thread.is_alive():
                for job in control.call("GetStatus").parameters["jobs"]:
                    control.call("CancelJob", {"job": job["job"]})

                thread.join(0.1)


@contextmanager
def sending(session: Session, interval_s: float) -> Iterator[list[float]]:
    """A thread that sends a request each `interval_s`; the list grows by each reply's time."""
    times: list[float] = []
    ended = threading.Event()

    def send() -> None:
        frame = np.ones((1, 1, 1, 128), np.float32)
        due = time.perf_counter()
        while not ended.is_set():
            due = _pause(due, interval_s)
            session.run(x=frame)
            times.append(time.perf_counter())

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield times
    finally:
        ended.set()
        thread.join()


@contextmanager
def measuring_daemon(**settings: float) -> Iterator[tuple[Daemon, Session]]:
    """A daemon with these keys of [fingerprint], and a session with a model of some ms."""
    for key, value in settings.items():
        os.environ[f"SWITCHGEAR_FINGERPRINT__{key.upper()}"] = str(value)

    try:
        daemon = Daemon()
    finally:
        for key in settings:
            del os.environ[f"SWITCHGEAR_FINGERPRINT__{key.upper()}"]

    with daemon, daemon.connect() as client:
        wait_ready(client)
        client.load_model(generate.slow(MODEL_MS), "client")
        with client.open_session("client") as session:
            yield daemon, session


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text[:100]:<100}", end="", file=sys.stderr, flush=True)
