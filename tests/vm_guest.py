"""Runs in the guest of `thermal_vm.py`: obeys the host, and is the app that uses the service.

Each line of JSON on the serial line is `{"do": WORD, ...}`; the answer is one line with its
`result` or its `error`. Everything happens in this one process, since starting another is what
an emulated processor is slowest at. Answers are kept short: each byte is an interrupt.
"""

from __future__ import annotations

import array
import glob
import json
import math
import random
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

sys.path.insert(0, "/opt/tree/src")

from switchgear.client import connect
from switchgear.ipc.errors import SwitchgearError

if TYPE_CHECKING:
    from switchgear.client import Client, Result, Session

RUN_LIMIT_S = 900
# Of a frame: a camera's of 10 frames a second.
DEADLINE_MS = 100.0
CALL_LIMIT_S = 120.0


def now() -> float:
    """The guest's clock, in seconds since it booted."""
    return time.monotonic()


def run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
    )
    return {"status": done.returncode, "stdout": done.stdout, "stderr": done.stderr[-2000:]}


def read(pattern: str) -> list[str]:
    """The contents of each file, in the order of their names."""
    texts = []
    for path in sorted(glob.glob(pattern)):
        with open(path) as file:
            texts.append(file.read().strip())

    return texts


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


class App:
    """A client of the service. The inputs are always the same, and so must be the outputs."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._sessions: dict[str, Session] = {}
        self._inputs: dict[str, dict[str, Any]] = {}
        # By the session's name and the output's.
        self._expected: dict[tuple[str, str], array.array[float]] = {}

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = connect(timeout_s=CALL_LIMIT_S, reconnect_s=CALL_LIMIT_S)

        return self._client

    def status(self, keys: dict[str, list[str]]) -> dict[str, Any]:
        """Parts of the status; of rows of a table these columns."""
        status: Any = self.client.status()
        return {
            key: [{name: row.get(name) for name in columns} for row in status[key]]
            if columns
            else status[key]
            for key, columns in keys.items()
        }

    def load(self, path: str, name: str) -> None:
        self.client.load_model(path, name)

    def pair(self, model: str) -> list[dict[str, Any]]:
        """What became of the model on each backend."""
        pairs = self.client.describe(model).pairs
        return [
            {
                "backend": p.backend,
                "state": p.state,
                "reason": p.reason,
                "precision": p.precision,
            }
            for p in pairs
        ]

    def open(self, name: str, model: str, options: dict[str, Any]) -> None:
        self.close(name)
        self._sessions[name] = self.client.open_session(model, **options)
        draw = random.Random(3)
        self._inputs[name] = {
            tensor.name: array.array(
                "f", (draw.uniform(-1, 1) for _ in range(math.prod(tensor.shape)))
            )
            for tensor in self.client.describe(model).inputs
        }

    def close(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        if session is not None:
            session.close()

    def frames(
        self,
        name: str,
        count: int,
        pause_s: float = 0.0,
        until: str = "",
        limit_s: float = 0.0,
        deadline_ms: float | None = DEADLINE_MS,
    ) -> dict[str, Any]:
        """Runs frames one after another: `count`, or until one ran on the backend `until`, or
        until `limit_s` is over.

        `ran` are the backends in their order, each with how many frames in a row it had; an
        error stands there by its name.
        """
        session, inputs = self._sessions[name], self._inputs[name]
        ran: list[list[Any]] = []
        wrong: list[float] = []
        run_ms: list[float] = []
        told = ""
        begin = time.monotonic()
        done = 0
        while done < count and (not limit_s or time.monotonic() - begin < limit_s):
            done += 1
            try:
                result = session.run(inputs, deadline_ms=deadline_ms)
            except SwitchgearError as error:
                place = type(error).__name__
                told = error.text
            else:
                place = result.backend
                run_ms.append(result.run_ms)
                wrong.append(self._difference(name, result))
                del result

            if ran and ran[-1][0] == place:
                ran[-1][1] += 1
            else:
                ran.append([place, 1])

            if place == until:
                break

            if pause_s:
                time.sleep(pause_s)

        return {
            "ran": ran,
            "told": told,
            "took_s": time.monotonic() - begin,
            "wrong": max(wrong, default=0.0),
            "run_ms": sorted(run_ms)[len(run_ms) // 2] if run_ms else None,
        }

    def _difference(self, name: str, result: Result) -> float:
        """From the first result of a session of that name, at most."""
        worst = 0.0
        for output in result:
            view: Any = result[output]
            found = array.array("f", view.cast("B").tobytes())
            known = self._expected.setdefault((name, output), found)
            worst = max(worst, max(abs(a - b) for a, b in zip(found, known, strict=True)))

        return worst

    def transitions(self, level: str) -> list[dict[str, Any]]:
        """The changes of phase on a level, the oldest first."""
        heard: list[dict[str, Any]] = []
        self.client.watch_events(heard.append, 0.0)
        wanted = ("at", "target", "after", "reason", "temperature_c")
        return [
            {name: event.get(name) for name in wanted}
            for event in heard
            if event["level"] == level and event["kind"] == "transition"
        ]


def main() -> None:
    """Serves the serial line in the argument for as long as the guest runs."""
    app = App()
    obey: dict[str, Callable[..., Any]] = {
        "now": now,
        "run": run,
        "read": read,
        "write": write,
        "status": app.status,
        "load": app.load,
        "pair": app.pair,
        "open": app.open,
        "close": app.close,
        "frames": app.frames,
        "transitions": app.transitions,
    }
    with open(sys.argv[1], "r+b", buffering=0) as line:
        tty.setraw(line.fileno(), termios.TCSANOW)
        line.write(b'{"ready": true}\n')
        text = b""
        while True:
            text += line.read(4096)
            *commands, text = text.split(b"\n")
            for command in commands:
                order = json.loads(command)
                try:
                    answer = {"result": obey[order.pop("do")](**order)}
                except Exception as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}

                line.write(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
