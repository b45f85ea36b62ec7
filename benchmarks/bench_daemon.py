"""A daemon for a benchmark, and how its calls are timed."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from switchgear.client import Client, connect
from switchgear.ipc.errors import NotRunning


class Daemon:
    """A daemon of our own in a temporary folder, ended with the `with` block."""

    def __init__(self, configuration: str = "", cpus: set[int] | None = None) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="switchgear-bench-")
        folder = Path(self.folder.name)
        self.socket = str(folder / "run" / "switchgear.sock")
        config = folder / "switchgear.toml"
        # Its own measuring and preparing in the background would disturb ours.
        config.write_text(configuration + "\n[fingerprint]\nenabled = false\n")
        surroundings = {**os.environ, "SWITCHGEAR_PREPARE__ENABLED": "false"}
        command = [
            *(sys.executable, "-m", "switchgear", "serve", "--log-level=warning"),
            *(f"--socket={self.socket}", f"--config={config}"),
            *(f"--state-dir={folder}/state", f"--cache-dir={folder}/cache"),
        ]
        if cpus is not None:
            command = ["taskset", "-c", ",".join(map(str, sorted(cpus))), *command]

        self.started = time.perf_counter()
        self.process = subprocess.Popen(command, env=surroundings)

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
