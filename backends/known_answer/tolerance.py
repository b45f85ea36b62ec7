"""How far a backend's answers may be from the reference: one rule for each precision.

Per output, over all inputs of the check; `peak` is the largest absolute value of the reference.

- fp32: every element within 1e-3 of the peak
- fp16: every element within 1e-2 of the peak
- int8 (any model with 8-bit activations, whatever computes it): every element within one step
  of the output's quantisation; a float output without one has steps of 1/255 of its range
- int4: a signal-to-noise ratio of at least 20 dB
- integers that are no quantised values, and flags: equal

No backend is held closer to the reference than the CPU's two sets of kernels are to each other:
where they differ (rounding of ill-conditioned or quantised models), twice that difference is
allowed, but never more than `WIDEST` times the rule. MobileNet v1 in INT8 differs by two steps
there, one output of pose_landmark_full by 3e-3 of its peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from switchgear.backends.known_answer.reference import OutputFacts, Reference

FP32_SHARE: Final = 1e-3
FP16_SHARE: Final = 1e-2
INT4_SNR_DB: Final = 20.0
STEPS: Final = 255
# How much wider a rule may get where the CPU's own kernels disagree.
WIDEST: Final = {"fp32": 10.0, "fp16": 2.0, "int8": 4.0}
# Under this, a float is a rounded zero.
_NOTHING: Final = 1e-6

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class OutputRule:
    """The rule at hand for one output, in the output's own numbers.

    `tolerance` bounds the absolute error of each element; `snr_db` the ratio over all of them.
    Exactly one of the two is set.
    """

    text: str
    peak: float
    tolerance: float | None = None
    snr_db: float | None = None


def rule_for(reference: Reference, output: int, precision: str) -> OutputRule:
    """The rule for an output of a backend that computes in `precision`."""
    facts = reference.outputs[output]
    values = [np.asarray(answer[output]) for answer in reference.answers]
    peak, low, high = _range(values)
    if facts.dtype not in ("float16", "float32", "float64", "complex64") and not facts.step:
        return OutputRule("equal", peak, 0.0)

    if precision == "int4":
        return OutputRule(f"int4: at least {INT4_SNR_DB:g} dB", peak, snr_db=INT4_SNR_DB)

    kind, base, text = _base(facts, reference.quantised, precision, peak, high - low)
    own = max((_difference(a[output], b[output]) for a, b in _pairs(reference)), default=0.0)
    tolerance = min(max(base, 2 * own), WIDEST[kind] * base)
    if tolerance > base:
        text += ", widened to twice what the CPU's own kernels differ by"

    return OutputRule(text, peak, tolerance)


def _base(
    facts: OutputFacts, quantised: bool, precision: str, peak: float, spread: float
) -> tuple[str, float, str]:
    if quantised or facts.step:
        step = facts.step or spread / STEPS
        # Half a step more: integers compare whole, floats carry rounding.
        return "int8", max(step * (1 if facts.step == 1 else 1.01), _NOTHING), "int8: one step"

    if precision == "fp16":
        return "fp16", max(FP16_SHARE * peak, _NOTHING), f"fp16: {FP16_SHARE:g} of the peak"

    return "fp32", max(FP32_SHARE * peak, _NOTHING), f"fp32: {FP32_SHARE:g} of the peak"


def _pairs(reference: Reference) -> list[tuple[list[Array], list[Array]]]:
    if reference.other_answers is None:
        return []

    return list(zip(reference.answers, reference.other_answers, strict=True))


def _range(values: list[Array]) -> tuple[float, float, float]:
    """Largest absolute value, lowest and highest of the finite elements; zeros for none."""
    peak = low = high = 0.0
    first = True
    for each in values:
        finite = as_numbers(each)
        finite = finite[np.isfinite(finite)]
        if not finite.size:
            continue

        least, most = float(finite.min()), float(finite.max())
        low, high = (least, most) if first else (min(low, least), max(high, most))
        first = False
        peak = max(peak, abs(least), abs(most))

    return peak, low, high


def as_numbers(values: Array) -> Array:
    """The elements as float64, flat; complex ones as their two parts."""
    if values.dtype.kind == "c":
        values = values.view(values.real.dtype)

    return values.astype(np.float64).ravel()


def _difference(first: Array, second: Array) -> float:
    """Largest difference of the elements that are finite in both; 0 for other shapes."""
    if first.shape != second.shape:
        return 0.0

    difference = np.abs(as_numbers(first) - as_numbers(second))
    difference = difference[np.isfinite(difference)]
    return float(difference.max()) if difference.size else 0.0
