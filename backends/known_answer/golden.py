"""A pair's golden input: one input of its check with the answer, for probes in a worker.

Written by the preparer beside the pair's other files once its check held, read by workers: they
need no reference and no second engine to say whether a device still computes the same.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from switchgear.backends.atomic_file import read_bounded, write_atomically
from switchgear.backends.known_answer.reference import run_once
from switchgear.backends.known_answer.tolerance import as_numbers
from switchgear.ipc.errors import NotPrepared

if TYPE_CHECKING:
    from switchgear.backends.contract import Instance
    from switchgear.backends.known_answer.check import CheckReport
    from switchgear.backends.known_answer.reference import Reference
    from switchgear.ipc.worker import Packet

# Inputs and outputs of one run of a model of phone size.
MAX_BYTES: Final = 64 << 20
# One input tells less than all of them together: INT4 may be this much below its limit.
SNR_SLACK_DB: Final = 6.0


def path_of(cache: Path, backend: str, precision: str) -> Path:
    return cache / f"golden-{backend}-{precision}.npz"


def write_golden(
    cache: Path, backend: str, precision: str, reference: Reference, report: CheckReport
) -> None:
    """Keeps the first input and its answer with the limits of the check; blocks.

    :raises OSError: it cannot be written.
    """
    arrays: dict[str, Any] = {
        f"input{number}": values for number, values in enumerate(reference.inputs[0])
    }
    for number, values in enumerate(reference.answers[0]):
        arrays[f"answer{number}"] = values

    limits = [
        (-1.0, _snr_limit(report, number)) if each.tolerance is None else (each.tolerance, 0.0)
        for number, each in enumerate(report.outputs)
    ]
    arrays["limits"] = np.array(limits, np.float64)
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    write_atomically(path_of(cache, backend, precision), stream.getvalue())


def _snr_limit(report: CheckReport, number: int) -> float:
    return report.outputs[number].snr_db - SNR_SLACK_DB


def check_golden(instance: Instance, cache: Path, backend: str) -> Packet:
    """Runs the golden input; blocks. `ok`, and `text` on what is wrong; `run_us`.

    :raises NotPrepared: no golden input is kept for the pair.
    :raises DriverError: the engine or the driver failed.
    """
    path = path_of(cache, backend, instance.precision)
    try:
        with np.load(io.BytesIO(read_bounded(path, MAX_BYTES)), allow_pickle=False) as kept:
            inputs = [kept[f"input{n}"] for n in range(len(instance.info.inputs))]
            answers = [kept[f"answer{n}"] for n in range(len(instance.info.outputs))]
            limits = kept["limits"]
            if limits.shape != (len(answers), 2):
                raise ValueError("another number of limits than of outputs")
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise NotPrepared(f"no golden input of this pair: {error}") from None

    begin_ns = monotonic_ns()
    results = run_once(instance, inputs)
    run_us = (monotonic_ns() - begin_ns) // 1000
    for number, (want, have) in enumerate(zip(answers, results, strict=True)):
        wrong = _difference(want, have, *limits[number])
        if wrong:
            name = instance.info.outputs[number].name
            return {"ok": False, "text": f"output {name!r}: {wrong}", "run_us": run_us}

    return {"ok": True, "text": "the golden input gave its answer", "run_us": run_us}


def _difference(want: Any, have: Any, tolerance: float, snr_db: float) -> str:
    """What is wrong with a result; empty where nothing is."""
    if want.shape != have.shape or want.dtype != have.dtype:
        return "another shape or type"

    truth, result = as_numbers(want), as_numbers(have)
    finite = np.isfinite(truth)
    if not np.isfinite(result[finite]).all():
        return "it is not finite"

    error = np.abs(result[finite] - truth[finite])
    if tolerance >= 0:
        worst = float(error.max(initial=0.0))
        return f"wrong by {worst:.4g}, allowed {tolerance:.4g}" if worst > tolerance else ""

    noise = float(np.square(error).sum())
    signal = float(np.square(truth[finite]).sum())
    if noise > signal * 10 ** (-snr_db / 10):
        return f"below {snr_db:.1f} dB"

    return ""
