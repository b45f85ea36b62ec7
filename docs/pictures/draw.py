"""Draws the pictures of `switchgear status` and `switchgear top` from a daemon that runs.

    python docs/pictures/draw.py

It starts a daemon of its own, uses it for a while from two apps, kills a worker on the way, and
writes status.svg and top.svg beside this file. Needs `switchgear[screens]`.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from switchgear.backends import generate
from switchgear.client import Client, Session, connect
from switchgear.daemon.cli.top import Looker
from switchgear.daemon.cli.top_screen import TopScreen

HERE = Path(__file__).resolve().parent
COLUMNS, LINES = 80, 24
MODEL = "mobilenet_v1"
WARM_S = 120.0
WATCH_S = 45


def start(folder: Path) -> subprocess.Popen[bytes]:
    places = {
        f"XDG_{name}": str(folder / name.lower())
        for name in ("RUNTIME_DIR", "STATE_HOME", "CACHE_HOME", "CONFIG_HOME")
    }
    environment = {**os.environ, **places, "SWITCHGEAR_FINGERPRINT__ENABLED": "false"}
    command = [sys.executable, "-m", "switchgear", "serve"]
    options = [
        "--socket",
        str(folder / "switchgear.sock"),
        "--state-dir",
        str(folder / "state"),
    ]
    with (folder / "log").open("wb") as sink:
        return subprocess.Popen(command + options, stderr=sink, env=environment)


def settled(client: Client) -> bool:
    """Whether every backend is known to be there or not, and nothing is being prepared."""
    status = client.status()
    return (
        status["ready"]
        and not status["jobs"]
        and all(backend["state"] != "starting" for backend in status["backends"])
    )


def use(socket: Path, stop: threading.Event, pause_s: float) -> None:
    """An app: a frame, a pause, the next frame."""
    with connect(socket) as client, client.open_session(MODEL) as session:
        inputs = frame_of(session)
        while not stop.is_set():
            session.run(inputs)
            stop.wait(pause_s)


def frame_of(session: Session) -> dict[str, Any]:
    return {spec.name: bytes(spec.capacity_bytes) for spec in session.inputs}


async def watch(socket: Path) -> str:
    """The screen after a while; a worker is killed in the middle."""
    app = TopScreen(Looker(str(socket)).look)
    async with app.run_test(size=(COLUMNS, LINES)) as pilot:
        for second in range(WATCH_S):
            await asyncio.sleep(1)
            if second == WATCH_S // 2:
                with connect(socket) as client:
                    worker = next(
                        w for w in client.status()["workers"] if w["backend"] == "cpu"
                    )
                    os.kill(worker["pid"], signal.SIGKILL)

        await pilot.pause()
        return app.export_screenshot(title="switchgear top")


def status_picture(socket: Path) -> str:
    command = [sys.executable, "-m", "switchgear", "status", "--socket", str(socket)]
    done = subprocess.run(command, capture_output=True, text=True)
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        console.print(Text(f"$ switchgear status\n{done.stdout.rstrip()}"))
        return console.export_svg(title="switchgear status")


def write(name: str, svg: str) -> None:
    """Without the fonts that a viewer would fetch: any of fixed width does."""
    plain = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    lines = [line.rstrip() for line in plain.splitlines()]
    (HERE / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="sg-") as name:
        folder = Path(name)
        socket = folder / "switchgear.sock"
        daemon = start(folder)
        stop = threading.Event()
        apps: list[threading.Thread] = []
        try:
            deadline = time.monotonic() + WARM_S
            while not socket.exists() and time.monotonic() < deadline:
                time.sleep(0.1)

            with connect(socket) as client:
                client.load_model(generate.mobilenet_v1(), MODEL)
                while not settled(client) and time.monotonic() < deadline:
                    time.sleep(1)

            for pause_s in (0.02, 0.1):
                apps.append(
                    threading.Thread(target=use, args=(socket, stop, pause_s), daemon=True)
                )
                apps[-1].start()

            top = asyncio.run(watch(socket))
            write("top.svg", top)
            write("status.svg", status_picture(socket))
        finally:
            stop.set()
            for app in apps:
                app.join(10)

            daemon.terminate()
            daemon.wait()


if __name__ == "__main__":
    main()
