"""Which exception a reply's status stands for."""

from __future__ import annotations

import errno
import signal

from switchgear.client.result import BACKENDS, ReplyFields, name_of
from switchgear.ipc.errors import (
    BY_CODE,
    DOMAIN_NAMES,
    DOMAINS,
    BackendFailed,
    InternalError,
    SwitchgearError,
)


def error_of_reply(fields: tuple[int, ...], text: str) -> SwitchgearError:
    """The exception for a reply that is no success; `text`: what the worker wrote, or empty."""
    reply = ReplyFields._make(fields)
    details: dict[str, object] = {"request_id": reply.request_id}
    if reply.retry_after_ms:
        details["retry_after_ms"] = reply.retry_after_ms

    if reply.retries:
        details["retries"] = reply.retries

    if reply.backend:
        details["backend"] = name_of(BACKENDS, reply.backend)

    if reply.domain == DOMAINS["switchgear"]:
        error = error_of_code(reply.code, text, **details)
        error.details["epoch"] = reply.epoch
        return error

    domain = DOMAIN_NAMES.get(reply.domain, str(reply.domain))
    name = driver_name(domain, reply.code)
    where = f"{domain}:{reply.code}" + (f" {name}" if name else "")
    backend = name_of(BACKENDS, reply.backend)
    return BackendFailed(
        f"{backend} failed with {where}" + (f": {text}" if text else ""),
        domain=domain,
        driver_code=reply.code,
        driver_name=name,
        driver_text=text,
        **details,
    )


def fresh(error: SwitchgearError) -> SwitchgearError:
    """A copy to raise: a kept exception would keep the frames it passed, and their memory."""
    made = type(error)(error.text, **error.details)
    made.__cause__ = error.__cause__
    return made


def driver_name(domain: str, code: int) -> str:
    """The name of a code of the system's domains; the others' are in the worker's text."""
    if domain == "errno":
        return errno.errorcode.get(abs(code), "")

    if domain == "signal":
        try:
            return signal.Signals(code).name
        except ValueError:
            return ""

    return ""


def error_of_code(code: int, text: str = "", **details: object) -> SwitchgearError:
    """The exception of a code of the project; without `text` it says what the code means."""
    kind = BY_CODE.get(code)
    if kind is None:
        return InternalError(f"the daemon answered with the unknown code {code}", **details)

    return kind(text or (kind.__doc__ or "").strip(), **details)
