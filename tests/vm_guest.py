"""Runs in the guest of `thermal_vm.py`: obeys a line of JSON on a serial line with another.

A line is a command and its arguments; the answer has its status and what it wrote. Two words
are obeyed without a process, which is dear on an emulated processor: `@read PATTERN`, the
first line of each file, and `@call METHOD`, the parameters of the daemon's answer.
"""

from __future__ import annotations

import glob
import json
import socket
import subprocess
import sys
import termios
import tty

RUN_LIMIT_S = 900
CALL_LIMIT_S = 60
SOCKET = "/run/switchgear/switchgear.sock"


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


def _read(pattern: str) -> str:
    lines = []
    for path in sorted(glob.glob(pattern)):
        with open(path) as file:
            lines.append(file.readline().strip())

    return "\n".join(lines)


def _call(method: str) -> str:
    """A call of the daemon; its answer as JSON."""
    call = {"method": f"io.switchgear.{method}", "parameters": {}}
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(CALL_LIMIT_S)
        sock.connect(SOCKET)
        sock.sendall(json.dumps(call).encode() + b"\0")
        answer = b""
        while not answer.endswith(b"\0"):
            part = sock.recv(65536)
            if not part:
                raise ConnectionError("the daemon closed the connection")

            answer += part

    return answer[:-1].decode()


def _run(command: list[str]) -> dict[str, object]:
    if command[0] in ("@read", "@call"):
        obey = _read if command[0] == "@read" else _call
        try:
            return {"status": 0, "stdout": obey(command[1]), "stderr": ""}
        except OSError as error:
            return {"status": 1, "stdout": "", "stderr": str(error)}

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
