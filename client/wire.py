"""Calls and replies of the control plane as bytes and values, without I/O."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any, Final

from switchgear.ipc import varlink
from switchgear.ipc.errors import (
    BY_NAME,
    BadRequest,
    InternalError,
    NotRunning,
    PermissionDenied,
    ProtocolError,
    SwitchgearError,
)

INTERFACE: Final = "io.switchgear"
_SERVICE: Final = "org.varlink.service."


class Reply:
    """A reply's parameters and descriptors; what is not taken is closed with it."""

    __slots__ = ("continues", "descriptors", "parameters")

    def __init__(
        self, parameters: dict[str, Any], descriptors: varlink.Descriptors, continues: bool
    ) -> None:
        self.parameters = parameters
        self.descriptors = descriptors
        self.continues = continues


def call_bytes(method: str, parameters: Mapping[str, object], more: bool) -> bytes:
    """A call's message.

    :raises BadRequest: it is longer than a message may be, or holds what JSON cannot.
    """
    fields: dict[str, object] = {
        "method": f"{INTERFACE}.{method}",
        "parameters": dict(parameters),
    }
    if more:
        fields["more"] = True

    try:
        data = varlink.encode(fields)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"{method}: a parameter cannot be sent: {error}") from None

    if len(data) - 1 > varlink.MAX_MESSAGE_BYTES:
        raise BadRequest(
            f"{method}: a call of {len(data)} bytes, at most {varlink.MAX_MESSAGE_BYTES};"
            " open a session for large tensors"
        )

    return data


def error_of(name: str, parameters: Mapping[str, Any]) -> SwitchgearError:
    """The exception that a varlink error stands for."""
    text = str(parameters.get("message") or "")
    details = parameters.get("details")
    details = {str(key): value for key, value in (details or {}).items() if key != "text"}
    prefix, _, short = name.rpartition(".")
    if prefix == INTERFACE and short in BY_NAME:
        return BY_NAME[short](text, **details)

    if name.startswith(_SERVICE):
        said = ", ".join(f"{key} {value!r}" for key, value in parameters.items())
        return BadRequest(f"the daemon answered {short}" + (f": {said}" if said else ""))

    return InternalError(f"the daemon answered with the unknown error {name}: {text}")


def reply_of(message: varlink.Message) -> Reply:
    """A message as a reply.

    :raises SwitchgearError: it is an error reply: the class of its name.
    :raises ProtocolError: it is no reply.
    """
    fields = message.fields
    parameters = fields.get("parameters")
    parameters = {} if parameters is None else parameters
    name = fields.get("error")
    if not isinstance(parameters, dict) or not (name is None or isinstance(name, str)):
        message.descriptors.close()
        raise ProtocolError("the daemon's message is no varlink reply")

    if name is not None:
        message.descriptors.close()
        raise error_of(name, parameters)

    return Reply(parameters, message.descriptors, fields.get("continues") is True)


def connect_error(path: str, error: OSError) -> SwitchgearError:
    """Why no connection to the daemon's socket came about."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionDenied(f"this user may not connect to {path}")

    if error.errno is None and not isinstance(error, TimeoutError):
        # The path is longer than a socket's address can hold.
        return BadRequest(f"cannot connect to {path}: {error}")

    return NotRunning(
        f"no daemon answers on {path} ({error.strerror or 'it does not accept'});"
        " start one with `switchgear serve`, or `systemctl start switchgear`",
        path=path,
    )
