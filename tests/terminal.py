"""A command on a pseudo-terminal of 80 x 24, as a person sees it."""

from __future__ import annotations

import codecs
import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final, Self

COLUMNS: Final = 80
ROWS: Final = 24
_LIMIT_S: Final = 15.0


class Terminal:
    """Runs a command with a terminal as its three streams; `output` is what it wrote so far."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        # COLUMNS would overrule the terminal's own size.
        kept = {name: value for name, value in environment.items() if name != "COLUMNS"}
        self.output = ""
        # What is read may end within a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**kept, "TERM": "xterm"},
            start_new_session=True,
        )
        os.close(slave)

    def read_until(self, text: str, count: int = 1) -> str:
        """Waits until `text` was written `count` times; returns all that was written."""
        deadline = time.monotonic() + _LIMIT_S
        while self.output.count(text) < count:
            assert self._read(deadline), f"it ended without {text!r}: {self.output!r}"

        return self.output

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Waits for its end; returns the exit status."""
        deadline = time.monotonic() + _LIMIT_S
        while self._read(deadline):
            pass

        return self.process.wait(_LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

        os.close(self._master)

    def _read(self, deadline: float) -> bool:
        left_s = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([self._master], [], [], left_s)
        assert ready, f"nothing more within {_LIMIT_S:g} s: {self.output!r}"
        try:
            data = os.read(self._master, 65536)
        except OSError:
            # The other end was closed by its last process.
            return False

        self.output += self._decoder.decode(data)
        return bool(data)
