"""Runs in the guest of `thermal_vm.py`: obeys a line of JSON on a serial line with another.

A line is a command and its arguments; the answer has its status and what it wrote.
"""

from __future__ import annotations

import json
import subprocess
import sys
import termios
import tty

RUN_LIMIT_S = 120


def main() -> None:
    """Serves the serial line in the argument for as long as the guest runs."""
    with open(sys.argv[1], "r+b", buffering=0) as line:
        tty.setraw(line.fileno(), termios.TCSANOW)
        line.write(b'{"ready": true}\n')
        text = b""
        while True:
            text += line.read(4096)
            *commands, text = text.split(b"\n")
            for command in commands:
                line.write(json.dumps(_run(json.loads(command))).encode() + b"\n")


def _run(command: list[str]) -> dict[str, object]:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"status": -1, "stdout": "", "stderr": str(error)}

    return {"status": done.returncode, "stdout": done.stdout, "stderr": done.stderr}


if __name__ == "__main__":
    main()
