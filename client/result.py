"""What an inference gives: the outputs by name, and how they came about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from switchgear.client.tensors import View
from switchgear.ipc.record import NO_READING, Backend, Flag, Precision, Reason

BACKENDS: Final = tuple(backend.name.lower() for backend in Backend)
PRECISIONS: Final = tuple(precision.name.lower() for precision in Precision)
REASONS: Final = tuple(reason.name.lower() for reason in Reason)


def name_of(names: tuple[str, ...], number: int) -> str:
    """The name of a number of the record; the number itself where a later version made it."""
    return names[number] if number < len(names) else str(number)


class ReplyFields(NamedTuple):
    """The fields of a reply that the client uses, in the order of the record.

    The receive path handles the plain tuple that struct gives; its indices are these.
    """

    kind: int
    version: int
    flags: int
    epoch: int
    request_id: int
    output_slot: int
    domain: int
    backend: int
    precision: int
    code: int
    reason: int
    retries: int
    tried: int
    temperature_age_ms: int
    retry_after_ms: int
    queue_ns: int
    run_ns: int
    total_ns: int


class Result(Mapping[str, View]):
    """Outputs by name, and the report of the daemon.

    Without `copy=True` the outputs are views of the session's memory: they are valid until the
    slot that they came from is used again, which with n slots used in turn is n requests later.
    They may be written to. Views outlive the session: its memory goes with the last of them.
    """

    __slots__ = ("_fields", "_views")

    def __init__(self, views: Mapping[str, View], fields: tuple[int, ...]) -> None:
        self._views = views
        self._fields = fields

    def __getitem__(self, name: str) -> View:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def __repr__(self) -> str:
        return (
            f"<Result {', '.join(self._views)}: {self.backend} {self.precision},"
            f" run {self.run_ms:.2f} ms, total {self.total_ms:.2f} ms>"
        )

    @property
    def _report(self) -> ReplyFields:
        return ReplyFields._make(self._fields)

    @property
    def backend(self) -> str:
        """The backend that computed it: cpu, vulkan, opencl, npu or other."""
        return name_of(BACKENDS, self._report.backend)

    @property
    def precision(self) -> str:
        """The arithmetic: fp32, fp16, int8 or int4."""
        return name_of(PRECISIONS, self._report.precision)

    @property
    def reason(self) -> str:
        """Why this backend: a name of the protocol's table of reasons, such as "only_ready"."""
        return name_of(REASONS, self._report.reason)

    @property
    def retries(self) -> int:
        """How often it was run again after a worker's death."""
        return self._report.retries

    @property
    def tried(self) -> tuple[str, ...]:
        """The backends that were tried before and failed."""
        bits = self._report.tried
        return tuple(name for number, name in enumerate(BACKENDS) if bits >> number & 1)

    @property
    def queue_ms(self) -> float:
        """From the request's arrival at the daemon until a worker had it."""
        return self._report.queue_ns / 1e6

    @property
    def run_ms(self) -> float:
        """The run itself, measured by the worker."""
        return self._report.run_ns / 1e6

    @property
    def total_ms(self) -> float:
        """From the request's arrival at the daemon until its reply left."""
        return self._report.total_ns / 1e6

    @property
    def temperature_age_ms(self) -> int | None:
        """How old the temperature reading was that the choice rests on; None without one."""
        age_ms = self._report.temperature_age_ms
        return None if age_ms == NO_READING else age_ms

    @property
    def request_id(self) -> int:
        return self._report.request_id

    @property
    def epoch(self) -> int:
        """The session's epoch; it changes when a stateful session lost its state."""
        return self._report.epoch

    @property
    def late(self) -> bool:
        """Whether the run ended after the request's deadline."""
        return bool(self._report.flags & Flag.LATE)
