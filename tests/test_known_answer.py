"""The known-answer check: what each rule lets pass, and what is no check."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from switchgear.backends.contract import ModelInfo
from switchgear.backends.known_answer.check import CheckReport, compare, has_spread
from switchgear.backends.known_answer.inputs import COUNT
from switchgear.backends.known_answer.reference import OutputFacts, Reference

pytestmark = [pytest.mark.engine]

Array = np.ndarray[Any, Any]
NO_INFO = ModelInfo((), (), "tensors", False, {})


# The rules


def made(
    answers: list[Array], *, step: float = 0.0, quantised: bool = False, name: str = "y"
) -> Reference:
    """A reference with one output."""
    facts = OutputFacts(name, str(answers[0].dtype), step)
    return Reference(
        NO_INFO, [[] for _ in answers], [[a] for a in answers], (facts,), quantised
    )


def floats(scale: float = 100.0) -> list[Array]:
    generator = np.random.default_rng(1)
    return [
        (scale * generator.uniform(-1, 1, (4, 25))).astype(np.float32) for _ in range(COUNT)
    ]


def judged(reference: Reference, precision: str, change: Any) -> CheckReport:
    """The report on answers of which run 3 was changed."""
    results = [[values.copy() for values in answer] for answer in reference.answers]
    changed = change(results[3][0])
    results[3][0] = results[3][0] if changed is None else changed
    return compare(reference, results, precision)


@pytest.mark.parametrize(("precision", "share"), [("fp32", 1e-3), ("fp16", 1e-2)])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_share_of_the_peak(precision: str, share: float, sign: int) -> None:
    reference = made(floats())
    peak = max(float(np.abs(answer[0]).max()) for answer in reference.answers)

    def off_by(error: float) -> Any:
        def change(values: Array) -> None:
            values[2, 7] += np.float32(sign * error)

        return change

    inside = judged(reference, precision, off_by(0.99 * share * peak))
    outside = judged(reference, precision, off_by(1.01 * share * peak))
    assert inside.ok
    assert inside.worst.error == pytest.approx(0.99 * share, rel=1e-3)
    assert inside.figures()["tolerance"] == pytest.approx(share)
    assert not outside.ok
    assert not outside.refused
    assert "'y' is wrong by" in outside.text
    assert outside.figures()["error"] == pytest.approx(1.01 * share, rel=1e-3)


def zero(values: Array) -> Array:
    return np.zeros_like(values)


def one_nan(values: Array) -> None:
    values[0, 0] = np.nan


def one_infinite(values: Array) -> None:
    values[3, 24] = -np.inf


def reversed_rows(values: Array) -> Array:
    return values[::-1].copy()


def shorter(values: Array) -> Array:
    return values[:3]


def other_type(values: Array) -> Array:
    return values.astype(np.float64)


@pytest.mark.parametrize(
    "change", [zero, one_nan, one_infinite, reversed_rows, shorter, other_type]
)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int4"])
def test_each_kind_of_wrong_answer_is_found(precision: str, change: Any) -> None:
    report = judged(made(floats()), precision, change)
    if change is zero and precision == "int4":
        # One run of eight at zero costs 9 dB.
        assert report.worst.snr_db < 10

    assert not report.ok
    assert not report.refused
    figures = report.figures()
    assert all(value is None or math.isfinite(value) for value in _numbers(figures))


def _numbers(figures: dict[str, Any]) -> list[Any]:
    return [figures[name] for name in ("error", "snr_db", "tolerance")]


def test_int8_is_one_step() -> None:
    generator = np.random.default_rng(2)
    answers = [generator.integers(-100, 100, (1, 30)).astype(np.int8) for _ in range(COUNT)]
    reference = made(answers, step=1.0, quantised=True)

    def off_by(steps: int) -> Any:
        def change(values: Array) -> None:
            values[0, ::3] += np.int8(steps)

        return change

    for precision in ("int8", "fp16", "fp32"):
        assert judged(reference, precision, off_by(1)).ok
        assert judged(reference, precision, off_by(-1)).ok
        assert not judged(reference, precision, off_by(2)).ok


def test_a_float_output_of_an_int8_model_has_steps_of_its_range() -> None:
    reference = made(floats(), quantised=True)
    low = min(float(answer[0].min()) for answer in reference.answers)
    high = max(float(answer[0].max()) for answer in reference.answers)
    step = (high - low) / 255

    def off_by(error: float) -> Any:
        def change(values: Array) -> None:
            values[1, 1] += np.float32(error)

        return change

    assert judged(reference, "int8", off_by(0.99 * step)).ok
    assert not judged(reference, "int8", off_by(1.05 * step)).ok


def test_int4_is_20_decibel_over_all_inputs() -> None:
    reference = made(floats())
    noise = np.random.default_rng(3)

    def noisy(share: float) -> list[list[Array]]:
        return [
            [
                (answer[0] + share * 57.7 * noise.standard_normal(answer[0].shape)).astype(
                    np.float32
                )
            ]
            for answer in reference.answers
        ]

    # 57.7 is the root mean square of numbers uniform in +-100.
    quiet = compare(reference, noisy(0.08), "int4")
    loud = compare(reference, noisy(0.12), "int4")
    assert quiet.ok
    assert quiet.figures()["snr_db"] == pytest.approx(21.9, abs=0.8)
    assert quiet.figures()["tolerance"] is None
    assert not loud.ok
    assert loud.figures()["snr_db"] == pytest.approx(18.4, abs=0.8)
    assert "dB, not 20" in loud.text


@pytest.mark.parametrize("dtype", ["int32", "int64", "bool", "uint8"])
def test_integers_and_flags_are_equal(dtype: str) -> None:
    generator = np.random.default_rng(4)
    answers = [generator.integers(0, 2, (6,)).astype(dtype) for _ in range(COUNT)]
    reference = made(answers)
    assert judged(reference, "fp16", lambda values: None).ok

    def flip(values: Array) -> None:
        values[2] = 1 - values[2]

    assert not judged(reference, "fp16", flip).ok


def test_complex_numbers_are_two() -> None:
    answers = [(values + 1j * values[::-1]).astype(np.complex64) for values in floats()]
    reference = made(answers)

    def turn(values: Array) -> Array:
        return values.conj()

    assert judged(reference, "fp32", lambda values: None).ok
    assert not judged(reference, "fp32", turn).ok


# What is no check


def test_answers_that_never_differ_are_no_check() -> None:
    reference = made([np.full((3,), 7, np.float32)] * COUNT)
    assert not has_spread(reference)
    report = compare(reference, reference.answers, "fp32")
    assert report.refused
    assert not report.ok


def test_answers_that_hardly_differ_are_none_at_this_precision() -> None:
    """A constant 50.25 would pass at fp16."""
    answers = [np.full((3,), 50 + run / 14, np.float32) for run in range(COUNT)]
    reference = made(answers)
    assert has_spread(reference)
    assert compare(reference, reference.answers, "fp32").ok
    assert compare(reference, reference.answers, "fp16").refused
    assert compare(reference, reference.answers, "int4").refused


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(
        st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3),
        min_size=COUNT,
        max_size=COUNT,
    ),
    constant=st.floats(-1e4, 1e4, width=32),
    precision=st.sampled_from(["fp32", "fp16", "int4"]),
)
def test_no_constant_answer_ever_passes(
    values: list[list[float]], constant: float, precision: str
) -> None:
    reference = made([np.array(row, np.float32) for row in values])
    middle = np.mean(np.array(values, np.float32), axis=0)
    for answer in (np.full(3, constant, np.float32), middle.astype(np.float32)):
        assert not compare(reference, [[answer]] * COUNT, precision).ok


def test_one_output_that_tells_is_enough() -> None:
    changing, still = made(floats()), made([np.ones((2,), np.float32)] * COUNT)
    both = replace(
        changing,
        answers=[[*a, *b] for a, b in zip(changing.answers, still.answers, strict=True)],
        outputs=(*changing.outputs, replace(still.outputs[0], name="anchors")),
    )
    report = compare(both, both.answers, "fp32")
    assert report.ok
    assert [each.telling for each in report.outputs] == [True, False]
    # It is held to its rule all the same.
    results = [[a, 1.01 * b] for a, b in both.answers]
    assert "anchors" in compare(both, results, "fp32").text


def test_where_the_reference_is_not_finite_neither_may_be_the_result() -> None:
    answers = floats()
    answers[3][0, 0] = -np.inf
    reference = made(answers)
    assert judged(reference, "fp32", lambda values: None).ok

    def finite(values: Array) -> None:
        values[0, 0] = -65504

    assert not judged(reference, "fp32", finite).ok


def test_the_kernels_own_difference_widens_a_rule_within_bounds() -> None:
    reference = made(floats())
    peak = max(float(np.abs(answer[0]).max()) for answer in reference.answers)

    def moved(share: float) -> list[list[Array]]:
        return [[answer[0] + np.float32(share * peak)] for answer in reference.answers]

    wobbly = replace(reference, other_answers=moved(3e-3))
    assert compare(wobbly, moved(-5.9e-3), "fp32").ok
    assert "widened" in compare(wobbly, moved(-5.9e-3), "fp32").worst.rule
    assert not compare(wobbly, moved(-6.1e-3), "fp32").ok
    # Not even kernels that are plain wrong make it wider than 10 times.
    broken = replace(reference, other_answers=moved(0.5))
    assert not compare(broken, moved(1.1e-2), "fp32").ok


def test_the_number_of_results_is_the_callers_mistake() -> None:
    reference = made(floats())
    with pytest.raises(ValueError, match="7 results to 8 inputs"):
        compare(reference, reference.answers[1:], "fp32")
