"""What the daemon says of itself, its models and its jobs, as typed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NotRequired, TypedDict

from switchgear.ipc.errors import ProtocolError
from switchgear.ipc.slot import TensorSpec
from switchgear.ipc.worker import spec_from_json

Tensor = TensorSpec


@dataclass(frozen=True, slots=True)
class LoadStep:
    """One line of a model's load timeline; `start_ms` counts from the load's start."""

    name: str
    start_ms: float
    duration_ms: float


@dataclass(frozen=True, slots=True)
class Pair:
    """A model on a backend, as it was asked for: "auto" or a precision.

    `state` is waiting, preparing, ready, absent, unsupported, wrong, refused or failed;
    `reason` says why it is not ready, `step` what is done now. `precision` is what it computes
    in. `figures` are those of the known-answer check and its runs; times in microseconds.
    """

    backend: str
    asked: str
    state: str
    reason: str
    step: str
    precision: str
    figures: Mapping[str, Any]
    timeline: tuple[LoadStep, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model as it was when the daemon was asked.

    `hash` identifies it; `name` is the alias that was given, or empty. `names` says whether the
    tensors are named by the model's "signature" or by its "tensors". `state`: it keeps
    variables between frames. `backends` maps a backend to its state for this model, `pairs` has
    what is known of each but the CPU. `run_ms` is the time of a run when it was checked.
    """

    hash: str
    name: str
    size_bytes: int
    storage: str
    owner_uid: int
    resident: bool
    status: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    names: str
    state: bool
    operators: Mapping[str, int]
    backends: Mapping[str, str]
    run_ms: float
    sessions: int
    timeline: tuple[LoadStep, ...]
    pairs: tuple[Pair, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is; `done` and `total` count bytes or steps of the phase, 0 if unknown."""

    state: str
    phase: str
    done: int
    total: int


class Info(TypedDict):
    version: str
    pid: int
    ready: bool
    state: str
    record_version: int
    uptime_s: float


class BackendStatus(TypedDict):
    name: str
    state: str
    reason: str
    # Of one that is absent.
    again: NotRequired[str]


class WorkerStatus(TypedDict):
    backend: str
    lane: str
    group: str
    pid: int
    state: str
    threads: int
    engine: str
    engine_version: str
    restarts: int
    last_end: str
    queued: int
    running: int
    rss_mb: float


class SessionStatus(TypedDict):
    session: int
    uid: int
    pid: int
    model: str
    slots: int
    priority: str
    on_busy: str
    in_flight: int
    answered: int
    epoch: int
    arena_bytes: int


class JobStatus(TypedDict):
    job: int
    kind: str
    subject: str
    state: str
    phase: str


class FingerprintStatus(TypedDict):
    """`measured_at` (seconds since the epoch), `schema` and `problem` are absent before a first
    measurement, or when there is none."""

    measured_at: NotRequired[int]
    schema: NotRequired[int]
    stale: list[str]
    measuring: bool
    problem: NotRequired[str]


class Status(TypedDict):
    """The daemon's status, as `io.switchgear.GetStatus` gives it; `models` are raw objects."""

    version: str
    pid: int
    ready: bool
    state: str
    uptime_s: float
    rss_mb: float
    problems: list[str]
    backends: list[BackendStatus]
    devices: list[dict[str, Any]]
    workers: list[WorkerStatus]
    models: list[dict[str, Any]]
    sessions: list[SessionStatus]
    jobs: list[JobStatus]
    fingerprint: FingerprintStatus
    connections: int
    idle_connections: int
    counters: dict[str, int]


_PAIR_STRINGS: Final = ("backend", "asked", "state", "reason", "step", "precision")


def model_from_json(data: Mapping[str, Any]) -> Model:
    """A `Model` of the interface.

    :raises ProtocolError: a field is missing or of a wrong type.
    """
    try:
        return Model(
            hash=str(data["model"]),
            name=str(data["name"]),
            size_bytes=int(data["size_bytes"]),
            storage=str(data["storage"]),
            owner_uid=int(data["owner_uid"]),
            resident=bool(data["resident"]),
            status=str(data["status"]),
            inputs=tensors_from_json(data["inputs"]),
            outputs=tensors_from_json(data["outputs"]),
            names=str(data["names"]),
            state=bool(data["state"]),
            operators=dict(data["operators"]),
            backends=dict(data["backends"]),
            run_ms=int(data["run_us"]) / 1000,
            sessions=int(data["sessions"]),
            timeline=_steps(data["timeline"]),
            pairs=tuple(
                Pair(
                    **{name: str(pair[name]) for name in _PAIR_STRINGS},
                    figures=dict(pair["figures"]),
                    timeline=_steps(pair["timeline"]),
                )
                # A daemon of before has none.
                for pair in data.get("pairs", ())
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the daemon's model cannot be read: {error!r}") from None


def _steps(data: list[dict[str, Any]]) -> tuple[LoadStep, ...]:
    return tuple(
        LoadStep(str(s["name"]), s["start_us"] / 1000, s["duration_us"] / 1000) for s in data
    )


def tensors_from_json(data: list[dict[str, Any]]) -> tuple[Tensor, ...]:
    return tuple(spec_from_json(tensor) for tensor in data)
