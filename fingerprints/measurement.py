"""What a fingerprint test reports: values with their spread, failures with their reason.

Standard library only, so that the daemon, which loads no driver and no numpy, can read what a
test process wrote. Every type goes to a plain JSON object with `to_json` and back with the
`..._from_json` function; unknown keys are ignored, so that an older reader takes newer reports.

Names of the values, per test (the profile and the router look them up):

- `opencl_bandwidth`: `write_mb_s`, `read_mb_s`, `pinned_write_mb_s`, `submit_overhead_us`
- `vulkan_matmul`: `matmul_ms`, `matmul_clock_ms`, `submit_overhead_us`,
  `host_pointer_import_us`
- `npu_utilisation`: `P_utilisation_pct`, `P_latency_ms`, `P_nodes_on_device`, `P_nodes_total`
- `cpu`: `P_1_thread_ms`, `P_all_threads_ms` (MobileNet v1 1.0 224), `memory_copy_mb_s`

`P` is `float` or `int8`, the model's kind. `matmul_ms` is the device's own time where the queue
has timestamps, else the clock's. `cpu` has one report for the whole processor and one more per
cluster where there are several. `mb` is 10**6 bytes. A `Failure` stands under the name of the
value whose place it takes; one named like the test stands for all of it.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

# Part of every report, so its readers find it here too.
from switchgear.backends.subject import Subject as Subject
from switchgear.ipc.errors import BY_NAME, DriverError

if TYPE_CHECKING:
    from collections.abc import Sequence

OPENCL_BANDWIDTH: Final = "opencl_bandwidth"
VULKAN_MATMUL: Final = "vulkan_matmul"
NPU_UTILISATION: Final = "npu_utilisation"
CPU: Final = "cpu"
TESTS: Final = (CPU, OPENCL_BANDWIDTH, VULKAN_MATMUL, NPU_UTILISATION)

# A value whose median absolute deviation exceeds this share of its median is noisy. Ours: on an
# idle machine the tests stay under 3 %, beside one busy core they go well above 5 %.
NOISY_SHARE: Final = 0.05


@dataclass(frozen=True, slots=True)
class Value:
    """One measured number: `median` and `spread` (median absolute deviation) in `unit`.

    `method` says in words how it was taken. `noisy` says that the machine disturbed it: treat
    the number as an order of magnitude.
    """

    name: str
    median: float
    spread: float
    samples: int
    unit: str
    method: str
    noisy: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no number: `domain` is one of `switchgear.ipc.errors.DOMAINS`.

    `code` and `code_name` are that domain's own (`vulkan` -4 `VK_ERROR_DEVICE_LOST`, `signal`
    6 `SIGABRT`, `switchgear` 407 `TimedOut`). `library` is the path of the driver or delegate
    that was opened, empty where none was.
    """

    name: str
    domain: str
    code: int
    code_name: str
    text: str
    library: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Measured: TypeAlias = Value | Failure


@dataclass(frozen=True, slots=True)
class Report:
    """One test on one device; `subject` is None when no device was reached.

    `notes` are sentences that qualify the values (the size used and why, what the driver cannot
    do). `duration_s` is the wall-clock time that the test took on this device.
    """

    test: str
    subject: Subject | None
    values: tuple[Measured, ...]
    notes: tuple[str, ...] = field(default=())
    duration_s: float = 0.0

    def value(self, name: str) -> Measured | None:
        """The value or failure of that name, or None."""
        return next((value for value in self.values if value.name == name), None)

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(value for value in self.values if isinstance(value, Failure))

    @property
    def noisy(self) -> bool:
        return any(isinstance(value, Value) and value.noisy for value in self.values)

    def to_json(self) -> dict[str, Any]:
        return {
            "test": self.test,
            "subject": self.subject.to_json() if self.subject else None,
            "values": [value.to_json() for value in self.values],
            "notes": list(self.notes),
            "duration_s": self.duration_s,
        }


def median_absolute_deviation(samples: Sequence[float]) -> float:
    """The median distance of the samples from their median; raises `ValueError` on none."""
    if not samples:
        raise ValueError("no samples")

    middle = statistics.median(samples)
    return statistics.median(abs(sample - middle) for sample in samples)


def value_of(
    name: str, samples: Sequence[float], unit: str, method: str, *, disturbed: bool = False
) -> Value:
    """The `Value` of at least one sample.

    It is noisy when its spread exceeds `NOISY_SHARE` of the median, or when the caller saw
    something else `disturbed` it.
    """
    spread = float(median_absolute_deviation(samples))
    middle = float(statistics.median(samples))
    noisy = disturbed or spread > NOISY_SHARE * abs(middle)
    return Value(name, middle, spread, len(samples), unit, method, noisy)


def failure_of(name: str, error: DriverError, library: str = "") -> Failure:
    """The `Failure` that stands for what a driver said."""
    return Failure(name, error.domain, error.code, error.name, error.text, library)


def own_failure(name: str, error_name: str, text: str, library: str = "") -> Failure:
    """A `Failure` of Switchgear's own domain; `error_name` is a class of `ipc.errors`."""
    return Failure(name, "switchgear", BY_NAME[error_name].code, error_name, text, library)


def measured_from_json(data: dict[str, Any]) -> Measured:
    """Inverse of both `to_json`; raises `ValueError` on anything else."""
    if "domain" in data:
        return _build(Failure, data)

    return _build(Value, data)


def subject_from_json(data: dict[str, Any]) -> Subject:
    """Inverse of `Subject.to_json`; raises `ValueError` on anything else."""
    return _build(Subject, data)


def report_from_json(data: dict[str, Any]) -> Report:
    """Inverse of `Report.to_json`; raises `ValueError` on anything else."""
    try:
        subject = data["subject"]
        return Report(
            test=_typed(data["test"], str, "test"),
            subject=None if subject is None else _build(Subject, subject),
            values=tuple(measured_from_json(value) for value in data["values"]),
            notes=tuple(_typed(note, str, "notes") for note in data["notes"]),
            duration_s=float(data["duration_s"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a report: {error!r}") from error


_Flat = TypeVar("_Flat", Value, Failure, Subject)
_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
}


def _typed(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {type(value).__name__}, not {kind.__name__}")

    return value


def _build(cls: type[_Flat], data: Any) -> _Flat:
    """A flat dataclass from an object, each field held to its declared type."""
    if not isinstance(data, dict):
        raise ValueError(f"{cls.__name__} is {type(data).__name__}, not an object")

    known: dict[str, Any] = {}
    for part in fields(cls):
        if part.name not in data:
            continue

        value: Any = data[part.name]
        kinds = _KINDS[str(part.type)]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"{cls.__name__}.{part.name} is {value!r}")

        if float in kinds:
            value = float(cast("float", value))
            if not math.isfinite(value):
                raise ValueError(f"{cls.__name__}.{part.name} is {value!r}")

        known[part.name] = value

    try:
        return cls(**known)
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from error
