"""Prepares one pair of a model and a backend: loads it, compiles, runs and checks it.

The steps, in order: `open` (the backend), `reference` (the CPU's answers), and for each
precision that is tried `compile`, `first run`, `check`, `warm`. Blocks all the while.
"""

from __future__ import annotations

import errno
import resource
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic_ns
from typing import Final

from switchgear.backends.cache_store import size_of
from switchgear.backends.contract import Backend, Instance, LoadRequest, Shape
from switchgear.backends.crash_marker import CrashMarkers
from switchgear.backends.known_answer.check import CheckReport, compare, has_spread
from switchgear.backends.known_answer.golden import write_golden
from switchgear.backends.known_answer.reference import Reference, compute_reference, run_once
from switchgear.backends.worker import failure
from switchgear.ipc.errors import (
    BackendFailed,
    DriverError,
    InternalError,
    NotPrepared,
    SwitchgearError,
    UnsupportedModel,
)
from switchgear.ipc.worker import Packet

MIN_WARM_RUNS: Final = 5
MAX_WARM_RUNS: Final = 100
WARM_NS: Final = 300_000_000
# Never chosen by itself: it is a pair of its own, prepared for a degrade.
_ASKED_FOR_ONLY: Final = ("int4",)


@dataclass(frozen=True, slots=True)
class Order:
    """What to prepare.

    `path` is the model, `digest` its hash. `cache` is the folder of its prepared files. With
    `again` it has been prepared before: it is loaded as a serving worker loads it, which shows
    what that takes and that what lies in the cache is right. `markers` is the folder of crash
    markers, None for none.
    """

    path: str
    precision: str = "auto"
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    cache: str = ""
    tune_s: float = 0.0
    again: bool = False
    digest: str = ""
    markers: Path | None = None


class Preparation:
    """One order; `said` is called with each step as it begins."""

    def __init__(
        self, open_backend: Callable[[], Backend], order: Order, said: Callable[[Packet], None]
    ) -> None:
        self._open_backend = open_backend
        self._order = order
        self._said = said
        self._begin_ns = monotonic_ns()

    def run(self) -> Packet:
        """The result; see `docs/prepare.md`. Never raises but for what must end a process."""
        try:
            return self._run()
        except Exception as error:  # a third-party backend may raise anything
            return _failed(error)

    def _run(self) -> Packet:
        self._step("open")
        backend = self._open_backend()
        try:
            about = {
                "backend": backend.name,
                "engine": backend.engine,
                "engine_version": backend.engine_version,
                "identity": dict(backend.identity()),
                "asked": self._order.precision,
            }
            self._step("reference", **about)
            reference = compute_reference(self._order.path, self._order.shapes)
            if reference.info.state:
                raise UnsupportedModel("stateful models stay on the cpu")

            if not has_spread(reference):
                text = "the model answers the same to each of the check's inputs"
                return {**about, **_refused(text), "inputs": len(reference.inputs)}

            return {**about, **self._first_that_holds(backend, reference, about)}
        finally:
            backend.close()

    def _first_that_holds(
        self, backend: Backend, reference: Reference, about: Packet
    ) -> Packet:
        """The result of the first precision that is right, else of the last one tried."""
        tried: list[Packet] = []
        result: Packet = {}
        for precision in self._precisions(backend):
            result = self._try(backend, reference, precision, about)
            tried.append(
                {
                    "precision": precision,
                    **{name: result[name] for name in _TOLD_OF_EACH if name in result},
                }
            )
            if result["ok"]:
                break

        return {**result, "tried": tried}

    def _precisions(self, backend: Backend) -> list[str]:
        if self._order.precision != "auto":
            return [self._order.precision]

        return [each for each in backend.precisions if each not in _ASKED_FOR_ONLY] or ["auto"]

    def _try(
        self, backend: Backend, reference: Reference, precision: str, about: Packet
    ) -> Packet:
        key = {
            "backend": backend.name,
            "engine": f"{backend.engine} {backend.engine_version}",
            "model": self._order.digest,
            "precision": precision,
            "shapes": repr(sorted(self._order.shapes.items())),
            **{f"identity.{name}": value for name, value in about["identity"].items()},
        }
        marks = None if self._order.markers is None else CrashMarkers(self._order.markers)
        reason = "" if marks is None else marks.reason(key)
        if reason:
            return _refused(reason)

        try:
            if marks is not None:
                marks.begin(key)

            result = self._load_and_check(backend, reference, precision)
        except Exception as error:  # a third-party backend may raise anything
            result = _failed(error)

        if marks is not None:
            marks.clear(key)

        return result

    def _load_and_check(self, backend: Backend, reference: Reference, precision: str) -> Packet:
        order = self._order
        request = LoadRequest(
            order.path,
            precision,
            order.shapes,
            order.cache,
            compile=not order.again,
            tune_s=order.tune_s,
        )
        self._step("compile", precision=precision)
        begin_ns = monotonic_ns()
        instance = backend.load(request)
        try:
            loaded_ns = monotonic_ns()
            self._step("first run", precision=precision)
            first = run_once(instance, reference.inputs[0])
            first_ns = monotonic_ns()
            self._step("check", precision=precision)
            results = [first, *(run_once(instance, each) for each in reference.inputs[1:])]
            report = compare(reference, results, instance.precision)
            measured = {
                "precision": instance.precision,
                "inputs": len(reference.inputs),
                "reference": reference.kernels,
                "coverage": asdict(instance.coverage),
                # A backend may have more to say of what it compiled.
                "artefact": str(getattr(instance, "artefact_id", "")),
                "notes": {str(n): str(v) for n, v in getattr(instance, "notes", {}).items()},
                "load_us": (loaded_ns - begin_ns) // 1000,
                "first_run_us": (first_ns - loaded_ns) // 1000,
                "cache_bytes": size_of(Path(order.cache)) if order.cache else 0,
                **report.figures(),
            }
            if not report.ok:
                return {**measured, **_verdict_of(report, instance.precision)}

            if order.cache and not order.again and not order.shapes:
                folder = Path(order.cache)
                write_golden(folder, backend.name, instance.precision, reference, report)

            self._step("warm", precision=precision)
            return {**measured, "ok": True, **_warm_runs(instance, reference)}
        finally:
            instance.close()

    def _step(self, step: str, **more: object) -> None:
        elapsed_us = (monotonic_ns() - self._begin_ns) // 1000
        self._said({"step": step, "us": elapsed_us, **more})


# What `tried` tells of each precision.
_TOLD_OF_EACH: Final = (
    "ok",
    "verdict",
    "error",
    "snr_db",
    "tolerance",
    "rule",
    "domain",
    "code",
    "name",
    "text",
)


def _warm_runs(instance: Instance, reference: Reference) -> Packet:
    """Times of runs that follow each other, on one of the inputs, in one slot."""
    info = instance.info
    source = instance.attach_input(
        [memoryview(bytearray(values.tobytes())) for values in reference.inputs[0]]
    )
    answer = reference.answers[0]
    target = instance.attach_output(
        [
            memoryview(bytearray(max(spec.capacity_bytes, values.nbytes)))
            for spec, values in zip(info.outputs, answer, strict=True)
        ]
    )
    times_ns: list[int] = []
    cpu_begin_us = _cpu_us()
    until_ns = monotonic_ns() + WARM_NS
    while len(times_ns) < MIN_WARM_RUNS or (
        monotonic_ns() < until_ns and len(times_ns) < MAX_WARM_RUNS
    ):
        begin_ns = monotonic_ns()
        instance.run(source, target)
        times_ns.append(monotonic_ns() - begin_ns)

    return {
        "run_us": int(statistics.median(times_ns)) // 1000,
        "fastest_us": min(times_ns) // 1000,
        "cpu_us": (_cpu_us() - cpu_begin_us) // len(times_ns),
        "warm_runs": len(times_ns),
    }


def _cpu_us() -> int:
    """CPU time of all threads of this process, the driver's too."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return int((usage.ru_utime + usage.ru_stime) * 1e6)


def _verdict_of(report: CheckReport, precision: str) -> Packet:
    # Too few bits are no fault of a driver.
    if report.refused or precision in _ASKED_FOR_ONLY:
        return _refused(report.text)

    return {"ok": False, "verdict": "wrong", **failure(BackendFailed(report.text))}


def _refused(text: str) -> Packet:
    return {"ok": False, "verdict": "refused", **failure(UnsupportedModel(text))}


def _failed(error: Exception) -> Packet:
    if isinstance(error, UnsupportedModel):
        return {"ok": False, "verdict": "unsupported", **failure(error)}

    if isinstance(error, MemoryError):
        error = DriverError("errno", errno.ENOMEM, "ENOMEM", "no memory left")
    elif isinstance(error, OSError):
        number = error.errno or errno.EIO
        name = errno.errorcode.get(number, "EIO")
        error = DriverError("errno", number, name, error.strerror or str(error))
    elif not isinstance(error, DriverError | SwitchgearError):
        traceback.print_exc(file=sys.stderr)
        error = InternalError(f"{type(error).__name__}: {error}")

    verdict = "refused" if isinstance(error, NotPrepared) else "failed"
    return {"ok": False, "verdict": verdict, **failure(error)}
