"""What systemd is told of the daemon: ready, its status, that it lives, that it needs time.

The protocol is sd_notify(3): datagrams of `NAME=value` lines to the socket in `NOTIFY_SOCKET`.
Where nobody asks for them, nothing is sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from time import monotonic_ns
from typing import Final

# While the start or the stop takes time, each message asks for this much more of it, counted
# from the message; the next one comes long before that is over.
EXTENSION_S: Final = 15.0
BUSY_STEP_S: Final = 1.0
# How often the status text is looked at where no watchdog sets the pace.
IDLE_STEP_S: Final = 5.0
# Of the watchdog's interval; systemd asks for at most half.
WATCHDOG_SHARE: Final = 1 / 3
RETRY_S: Final = 0.1
# Messages that the receiver has no room for are kept, the newest of them.
_UNSENT_KEPT: Final = 16

log = logging.getLogger(__name__)


class Notifier:
    """The sending side. Never blocks; owns its socket until `close`."""

    def __init__(self, address: str, watchdog_s: float = 0.0) -> None:
        """`address`: a path, or an abstract name behind "@"; empty for nobody.

        `watchdog_s`: within this time systemd wants to hear `WATCHDOG=1`; 0 for no watchdog.
        """
        self.watchdog_s = watchdog_s if address else 0.0
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._unsent: deque[bytes] = deque(maxlen=_UNSENT_KEPT)
        self._sock: socket.socket | None = None
        if address:
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._sock.setblocking(False)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> Notifier:
        """Takes the variables out: no child may speak for the daemon."""
        address = environment.pop("NOTIFY_SOCKET", "")
        interval_us = environment.pop("WATCHDOG_USEC", "")
        pid = environment.pop("WATCHDOG_PID", "")
        if address and address[0] not in "/@":
            log.warning("NOTIFY_SOCKET=%s is no address of ours", address)
            address = ""

        meant = not pid or pid == str(os.getpid())
        seconds = int(interval_us) / 1e6 if meant and interval_us.isdecimal() else 0.0
        return cls(address, seconds)

    @property
    def listens(self) -> bool:
        """Whether there is anybody to tell."""
        return self._sock is not None

    def send(self, *lines: str) -> bool:
        """Sends one message. False: there was no room for it, and `flush` sends it later."""
        if self._sock is None:
            return True

        self._unsent.append("\n".join(lines).encode())
        return self.flush()

    def flush(self) -> bool:
        """Sends what is left, in order; whether all of it is away."""
        while self._unsent and self._sock is not None:
            try:
                self._sock.sendto(self._unsent[0], self._address)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                # Its receiver went away: nothing that we could wait for.
                log.warning("cannot tell systemd: %s", error.strerror or error)

            self._unsent.popleft()

        return True

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


@dataclass(frozen=True, slots=True)
class Condition:
    """What the daemon is doing. `state`: starting, failed (it will not become ready), serving
    or stopping; `text` is for people."""

    state: str
    text: str


class Announcer:
    """Tells systemd of the daemon's conditions, from the loop that serves.

    The watchdog is fed by a timer of that loop and by nothing else: a loop that hangs, hangs
    the watchdog.
    """

    def __init__(self, notifier: Notifier, condition: Callable[[], Condition]) -> None:
        """Use it on the running loop. `condition` is asked often and must not block."""
        self._loop = asyncio.get_running_loop()
        self._notifier = notifier
        self._condition = condition
        self._text = ""
        self._ready = False
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._notifier.listens:
            self._tick()

    def update(self) -> None:
        """Call it when the condition has changed; otherwise that is seen at the next tick."""
        if self._notifier.listens and self._timer is not None:
            self._timer.cancel()
            self._tick()

    def reloading(self) -> None:
        """The configuration is being read again; `reloaded` follows."""
        if self._ready and not self._stopping:
            self._notifier.send("RELOADING=1", f"MONOTONIC_USEC={monotonic_ns() // 1000}")

    def reloaded(self) -> None:
        """The end of a reload, with the text of the condition that it left."""
        if self._ready and not self._stopping:
            self._notifier.send("READY=1")
            self.update()

    def close(self) -> None:
        """Ends it: the process is about to exit."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

        self._notifier.flush()
        self._notifier.close()

    def _tick(self) -> None:
        condition = self._condition()
        lines = []
        if condition.state == "serving" and not self._ready:
            self._ready = True
            lines.append("READY=1")

        if condition.state == "stopping" and not self._stopping:
            self._stopping = True
            lines.append("STOPPING=1")

        if condition.state in ("starting", "stopping"):
            lines.append(f"EXTEND_TIMEOUT_USEC={int(EXTENSION_S * 1e6)}")

        if condition.text != self._text:
            self._text = condition.text
            lines.append(f"STATUS={_one_line(condition.text)}")

        if self._notifier.watchdog_s:
            lines.append("WATCHDOG=1")

        away = self._notifier.send(*lines) if lines else self._notifier.flush()
        self._timer = self._loop.call_later(self._step_s(condition, away), self._tick)

    def _step_s(self, condition: Condition, away: bool) -> float:
        if not away:
            return RETRY_S

        step_s = BUSY_STEP_S if condition.state in ("starting", "stopping") else IDLE_STEP_S
        if self._notifier.watchdog_s:
            # While serving, its pace is enough: fewer wake-ups of an idle device.
            pace_s = self._notifier.watchdog_s * WATCHDOG_SHARE
            step_s = pace_s if step_s == IDLE_STEP_S else min(step_s, pace_s)

        return step_s


def _one_line(text: str) -> str:
    """A line break would begin another variable."""
    return " ".join(text.split())[:500]
