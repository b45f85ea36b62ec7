"""Compares a backend's answers with the reference, output by output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from switchgear.backends.known_answer.tolerance import (
    INT4_SNR_DB,
    OutputRule,
    as_numbers,
    rule_for,
)

if TYPE_CHECKING:
    from switchgear.backends.known_answer.reference import Reference

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class OutputReport:
    """One output over all inputs, in its own numbers.

    `max_abs` is the largest error, infinite where a result is not finite or has another shape
    than the reference; `snr_db` infinite where all is equal. `telling` says that no answer
    which ignores the input would pass.
    """

    name: str
    rule: str
    max_abs: float
    peak: float
    tolerance: float | None
    snr_db: float
    telling: bool
    ok: bool

    @property
    def error(self) -> float:
        """The largest error as a share of the peak."""
        return self.max_abs / self.peak if self.peak else self.max_abs

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rule": self.rule,
            "max_abs": _finite(self.max_abs),
            "peak": self.peak,
            "tolerance": self.tolerance,
            "snr_db": _finite(self.snr_db),
            "telling": self.telling,
            "ok": self.ok,
        }


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The whole check. `text` is empty where it holds, else one sentence on what is wrong.

    `refused` says that there is no check to hold: then `ok` is false too.
    """

    ok: bool
    refused: bool
    text: str
    outputs: tuple[OutputReport, ...]

    @property
    def worst(self) -> OutputReport:
        """The output nearest to its limit, or furthest beyond."""
        return max(self.outputs, key=_strain)

    def figures(self) -> dict[str, Any]:
        """What is told of it, as JSON values; `error` and `tolerance` are shares of a peak.

        Both and `rule` are those of the worst output, `snr_db` is the lowest of all. None
        stands for what is not finite, or is not bounded by the rule.
        """
        worst = self.worst
        tolerance = worst.tolerance
        return {
            "error": _finite(worst.error),
            "snr_db": _finite(min(each.snr_db for each in self.outputs)),
            "tolerance": None if tolerance is None else tolerance / (worst.peak or 1.0),
            "rule": worst.rule,
            "outputs": [each.to_json() for each in self.outputs],
        }


def has_spread(reference: Reference) -> bool:
    """Whether any output depends on the input at all, as far as the check's inputs show."""
    first = reference.answers[0]
    return any(
        not np.array_equal(_bits(one), _bits(other))
        for answer in reference.answers[1:]
        for one, other in zip(first, answer, strict=True)
    )


def compare(
    reference: Reference, results: Sequence[Sequence[Array]], precision: str
) -> CheckReport:
    """Holds `results[run][output]` against the reference by the rule of `precision`.

    :raises ValueError: there are not as many results as inputs, or as outputs.
    """
    if len(results) != len(reference.answers):
        raise ValueError(f"{len(results)} results to {len(reference.answers)} inputs")

    outputs = tuple(
        _compare_output(
            reference,
            [answer[number] for answer in reference.answers],
            [result[number] for result in results],
            number,
            rule_for(reference, number, precision),
        )
        for number in range(len(reference.outputs))
    )
    bad = [each for each in outputs if not each.ok]
    if bad:
        return CheckReport(False, False, _what_is_wrong(max(bad, key=_strain)), outputs)

    if not any(each.telling for each in outputs):
        text = (
            "the answers to the check's inputs hardly differ: within the tolerance, an answer "
            "that ignores the input would pass too"
        )
        return CheckReport(False, True, text, outputs)

    return CheckReport(True, False, "", outputs)


def _compare_output(
    reference: Reference,
    wanted: list[Array],
    got: list[Array],
    number: int,
    rule: OutputRule,
) -> OutputReport:
    signal = noise = max_abs = 0.0
    for want, have in zip(wanted, got, strict=True):
        if want.shape != have.shape or want.dtype != have.dtype:
            max_abs = noise = math.inf
            continue

        truth, result = as_numbers(want), as_numbers(have)
        finite = np.isfinite(truth)
        # Where the reference itself is not finite, the same value has to come out.
        if not np.array_equal(truth[~finite], result[~finite], equal_nan=True):
            max_abs = noise = math.inf

        error = result[finite] - truth[finite]
        if not np.isfinite(error).all():
            max_abs = noise = math.inf
            continue

        max_abs = max(max_abs, float(np.abs(error).max(initial=0.0)))
        noise += float(np.square(error).sum())
        signal += float(np.square(truth[finite]).sum())

    snr_db = _decibel(signal, noise)
    within = max_abs <= rule.tolerance if rule.tolerance is not None else True
    loud = snr_db >= rule.snr_db if rule.snr_db is not None else True
    return OutputReport(
        reference.outputs[number].name,
        rule.text,
        max_abs,
        rule.peak,
        rule.tolerance,
        snr_db,
        _is_telling(wanted, rule),
        within and loud,
    )


def _is_telling(wanted: list[Array], rule: OutputRule) -> bool:
    """Whether a constant answer, the best there is, would fail."""
    if any(each.shape != wanted[0].shape for each in wanted):
        return True

    values = np.stack([as_numbers(each) for each in wanted])
    values = values[:, np.isfinite(values).all(axis=0)]
    if not values.size:
        return False

    if rule.tolerance is not None:
        return bool((values.max(axis=0) - values.min(axis=0)).max() > 2 * rule.tolerance)

    noise = float(np.square(values - values.mean(axis=0)).sum())
    return _decibel(float(np.square(values).sum()), noise) < (rule.snr_db or 0.0)


def _decibel(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf

    if signal == 0 or not math.isfinite(noise):
        return -math.inf

    return 10 * math.log10(signal / noise)


def _strain(report: OutputReport) -> float:
    """How near the limit an output is; above 1 is beyond."""
    if report.tolerance is None:
        # As a ratio of amplitudes.
        return float(10 ** min((INT4_SNR_DB - report.snr_db) / 20, 300.0))

    if report.tolerance == 0:
        return math.inf if report.max_abs else 0.0

    return report.max_abs / report.tolerance


def _what_is_wrong(worst: OutputReport) -> str:
    if math.isinf(worst.max_abs):
        return f"output {worst.name!r} is not finite, or has another shape or type"

    if worst.tolerance is None:
        return f"output {worst.name!r} has {worst.snr_db:.1f} dB, not {INT4_SNR_DB:g}"

    return (
        f"output {worst.name!r} is wrong by {worst.max_abs:.4g} of {worst.peak:.4g}, "
        f"the tolerance is {worst.tolerance:.4g} ({worst.rule})"
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _bits(values: Array) -> Array:
    return np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
