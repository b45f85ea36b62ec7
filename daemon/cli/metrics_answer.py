"""The daemon's metrics as a client asks for them: on the control socket, as text."""

from __future__ import annotations

from typing import Final

from switchgear.client.control import Control
from switchgear.client.paths import default_socket
from switchgear.daemon.telemetry.exposition import parse
from switchgear.daemon.telemetry.families import Family
from switchgear.ipc.errors import ProtocolError

ANSWER_LIMIT_S: Final = 10.0


def reach(socket: str | None) -> Control:
    """A connection to the daemon on that socket, or on the usual one; the caller closes it.

    :raises NotRunning: no daemon answers.
    :raises PermissionDenied: this user may not connect.
    """
    return Control(socket or default_socket(), ANSWER_LIMIT_S)


def metrics_text(control: Control) -> str:
    """The daemon's metrics as Prometheus text; blocks.

    :raises SwitchgearError: what the daemon answered, or that it went away.
    """
    reply = control.call("GetMetrics", timeout_s=ANSWER_LIMIT_S)
    text = reply.parameters.get("text")
    if not isinstance(text, str):
        raise ProtocolError("GetMetrics answered no text")

    return text


def read(text: str) -> list[Family]:
    """The families of a daemon's answer.

    :raises ProtocolError: it is of another format.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise ProtocolError(f"the daemon's metrics cannot be read: {error}") from None
