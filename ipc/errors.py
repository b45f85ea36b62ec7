"""The one exception tree; every class in it is also an error code on the wire.

A class's name is its varlink error (`io.switchgear.<name>`), its `code` stands in a record's
status. Codes: 1xx the caller's mistake, 2xx the request's own end, 3xx no room now, 4xx the
service could not, 5xx the connection. `docs/protocol.md` prints the same table and a test holds
the two together.
"""

from __future__ import annotations

from typing import ClassVar, Final


class SwitchgearError(Exception):
    """Base of all errors of Switchgear.

    `text` is one sentence for people. `details` are JSON values that say the same to a program
    (`retry_after_ms`, `bytes_needed`, ...); they travel in the varlink error's parameters.
    """

    code: ClassVar[int] = 599
    retryable: ClassVar[bool] = False

    def __init__(self, text: str = "", **details: object) -> None:
        super().__init__(text or type(self).__name__)
        self.text = text or type(self).__name__
        self.details = details

    @property
    def name(self) -> str:
        return type(self).__name__


# 1xx: the caller's mistake; the same call fails again.
class BadRequest(SwitchgearError):
    """A parameter is missing, of a wrong type or out of its range."""

    code = 100


class BadRecord(SwitchgearError):
    """A record has a wrong length, version or type; the session is closed after it."""

    code = 101


class BadSlot(SwitchgearError):
    """A record names a slot that the session does not have or does not own."""

    code = 102


class SlotBusy(SwitchgearError):
    """The slot (or, in a client, every slot) still has a request in flight."""

    code = 103


class BadInput(SwitchgearError):
    """The inputs do not fit the model: count, name, dtype or size."""

    code = 104


class BadShape(SwitchgearError):
    """An input shape changes a dimension that the model's signature fixes, or is too large."""

    code = 105


class UnknownModel(SwitchgearError):
    """No loaded model has this name or hash."""

    code = 106


class BadModel(SwitchgearError):
    """The bytes are not a model that the engine can parse, allocate and run."""

    code = 107


class UnsupportedModel(SwitchgearError):
    """The model is sound, but uses something that no backend here has."""

    code = 108


class ModelInUse(SwitchgearError):
    """Open sessions use the model."""

    code = 109


class BadDescriptor(SwitchgearError):
    """A descriptor is missing, of a wrong kind, or changed while it was read."""

    code = 110


class ModelTooLarge(SwitchgearError):
    """The model is larger than the configured limit."""

    code = 111


class UnknownJob(SwitchgearError):
    """No job has this id, or it is another user's."""

    code = 112


class UnknownBackend(SwitchgearError):
    """No backend has this name."""

    code = 113


class NotPrepared(SwitchgearError):
    """The model has not been tried with these input shapes: call PrepareShapes first."""

    code = 114


class PermissionDenied(SwitchgearError):
    """The caller's user may not do this."""

    code = 115


class BadConfiguration(SwitchgearError):
    """The configuration file has an unknown key or a value out of range."""

    code = 116


# 2xx: how the request itself ended.
class Cancelled(SwitchgearError):
    """The request was cancelled before its result was there."""

    code = 200


class Superseded(SwitchgearError):
    """A newer request of the session took its place (`on_busy = replace_oldest`)."""

    code = 201


class DeadlineExceeded(SwitchgearError):
    """The request's time was over before its result was there."""

    code = 202


# 3xx: no room at this moment; `retry_after_ms` says when to try again.
class Busy(SwitchgearError):
    """The queue is full, or the session asked to be rejected when the backend is busy."""

    code = 300
    retryable = True


class Overloaded(SwitchgearError):
    """The bound on model instances or on their memory is reached."""

    code = 301
    retryable = True


class NoSpace(SwitchgearError):
    """Memory or disk is short; `bytes_needed` and `bytes_free` say by how much."""

    code = 302
    retryable = True


class QuotaExceeded(SwitchgearError):
    """The caller's user has as many of these as one user may have."""

    code = 303
    retryable = True


# 4xx: the service could not.
class NoBackend(SwitchgearError):
    """No backend can serve the model at this moment."""

    code = 400
    retryable = True


class WorkerDied(SwitchgearError):
    """The worker died with the request in it, and so did the one that tried it again."""

    code = 401
    retryable = True


class StateLost(SwitchgearError):
    """A stateful session lost its state with its worker; the reply carries the new epoch."""

    code = 402
    retryable = True


class OutputTooLarge(SwitchgearError):
    """An output is larger than its slot; `bytes_needed` says what to open the session with."""

    code = 403


class BackendFailed(SwitchgearError):
    """The backend returned an error; its domain, code, name and text are attached."""

    code = 404


class ShuttingDown(SwitchgearError):
    """The daemon is stopping and takes no new work."""

    code = 405
    retryable = True


class ModelQuarantined(SwitchgearError):
    """The model killed its worker several times in a row and is not run any more."""

    code = 406


class TimedOut(SwitchgearError):
    """A step outran its time limit and was ended."""

    code = 407
    retryable = True


# 5xx: the connection.
class ConnectionLost(SwitchgearError):
    """The daemon went away with the request in flight."""

    code = 500
    retryable = True


class ProtocolError(SwitchgearError):
    """Bytes that are no message, or a message beyond a bound; the connection is closed."""

    code = 501


class NotRunning(SwitchgearError):
    """No daemon answers on the socket."""

    code = 502
    retryable = True


class AlreadyRunning(SwitchgearError):
    """Another daemon holds the socket; `pid` names it."""

    code = 503


class InternalError(SwitchgearError):
    """A fault of the daemon's own; its log has the traceback."""

    code = 599


def _tree(base: type[SwitchgearError]) -> list[type[SwitchgearError]]:
    return [cls for sub in base.__subclasses__() for cls in (sub, *_tree(sub))]


ERRORS: Final[tuple[type[SwitchgearError], ...]] = tuple(
    sorted(_tree(SwitchgearError), key=lambda cls: cls.code)
)
BY_CODE: Final = {cls.code: cls for cls in ERRORS}
BY_NAME: Final = {cls.__name__: cls for cls in ERRORS}

# Where an error's code comes from. `SWITCHGEAR` is the table above; each other domain keeps the
# numbers of its own headers, so that -12 of errno and -12 of OpenCL are never mixed up.
DOMAINS: Final = {
    "ok": 0,
    "switchgear": 1,
    "errno": 2,
    "signal": 3,
    "tflite": 4,
    "vulkan": 5,
    "opencl": 6,
    "nnapi": 7,
    "delegate": 8,
    "litert": 9,
}
DOMAIN_NAMES: Final = {number: name for name, number in DOMAINS.items()}


class DriverError(Exception):
    """What a driver or an engine said: always domain, code, name and text.

    It never crosses a process as an exception: the worker sends its four parts, and the daemon
    answers with `BackendFailed`.
    """

    def __init__(self, domain: str, code: int, name: str, text: str = "") -> None:
        if domain not in DOMAINS:
            raise ValueError(f"unknown error domain {domain!r}")

        super().__init__(f"{domain}:{code} {name}" + (f": {text}" if text else ""))
        self.domain = domain
        self.code = code
        self.name = name
        self.text = text


def error_from_code(code: int, text: str = "", **details: object) -> SwitchgearError:
    """The exception that a status code stands for; `InternalError` for an unknown one."""
    return BY_CODE.get(code, InternalError)(text, **details)
