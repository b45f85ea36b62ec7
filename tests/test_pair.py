"""Pairs: verdicts taken over, and which sessions may use them."""

from __future__ import annotations

from typing import Any

import pytest

from switchgear.daemon.pair import (
    OWN_WORKER_US,
    Pair,
    check_pair_verdict,
    is_lasting,
    lowest_allows,
)

GOOD: dict[str, Any] = {
    "ok": True,
    "precision": "fp16",
    "load_us": 5,
    "first_run_us": 6,
    "warm_load_us": 1000,
    "warm_first_run_us": 2000,
    "run_us": 7,
    "error": 1e-5,
}
BAD: dict[str, Any] = {
    "ok": False,
    "verdict": "wrong",
    "domain": "switchgear",
    "code": 404,
    "name": "BackendFailed",
    "text": "output 'a' is wrong by 3 of 4",
    "error": 0.75,
}
DRIVER = {"driver": "one"}


def test_a_good_verdict_makes_it_ready() -> None:
    pair = Pair("vulkan", "auto", state="preparing", step="check")
    pair.apply(GOOD, DRIVER)
    assert (pair.state, pair.precision, pair.number, pair.step) == ("ready", "fp16", 2, "")
    assert pair.figures["error"] == 1e-5
    assert not pair.own_worker
    assert pair.label == "vulkan fp16"


def test_a_long_warm_load_gets_a_worker_of_its_own() -> None:
    pair = Pair("vulkan", "auto")
    pair.apply({**GOOD, "warm_load_us": OWN_WORKER_US}, DRIVER)
    assert pair.own_worker


@pytest.mark.parametrize(
    ("domain", "reason"),
    [
        ("switchgear", "output 'a' is wrong by 3 of 4"),
        ("vulkan", "vulkan:404 BackendFailed: output 'a' is wrong by 3 of 4"),
    ],
)
def test_a_bad_verdict_keeps_its_reason_and_figures(domain: str, reason: str) -> None:
    pair = Pair("vulkan", "auto")
    pair.apply({**BAD, "domain": domain}, DRIVER)
    assert (pair.state, pair.reason, pair.ready) == ("wrong", reason, False)
    assert pair.to_json()["figures"] == {"error": 0.75}


@pytest.mark.parametrize(
    ("verdict", "lasting"),
    [(GOOD, True), (BAD, True), ({**BAD, "verdict": "failed"}, False)],
)
def test_what_another_try_could_change_is_not_kept(
    verdict: dict[str, Any], lasting: bool
) -> None:
    assert is_lasting(verdict) is lasting


@pytest.mark.parametrize(
    "verdict",
    [
        {},
        {**GOOD, "ok": "yes"},
        {**GOOD, "precision": "fp8"},
        {**GOOD, "warm_load_us": -1},
        {name: value for name, value in GOOD.items() if name != "warm_first_run_us"},
        {**BAD, "code": "x"},
    ],
)
def test_what_is_no_verdict_is_refused(verdict: dict[str, Any]) -> None:
    with pytest.raises((KeyError, ValueError, TypeError, AttributeError)):
        check_pair_verdict(verdict)


def test_good_and_bad_ones_are_taken() -> None:
    check_pair_verdict(GOOD)
    check_pair_verdict(BAD)


@pytest.mark.parametrize(
    ("lowest", "precision", "allowed"),
    [
        ("", "int4", True),
        ("int4", "int4", True),
        ("int8", "int4", False),
        ("fp16", "int8", False),
        ("fp16", "fp16", True),
        ("fp32", "fp16", False),
        ("fp32", "fp32", True),
    ],
)
def test_the_lowest_precision(lowest: str, precision: str, allowed: bool) -> None:
    assert lowest_allows(lowest, Pair("x", "auto", precision=precision)) is allowed


def test_what_is_prepared_anew_and_is_another_is_counted() -> None:
    pair = Pair("opencl", "auto")
    pair.apply({**GOOD, "artefact": "a"}, DRIVER, fresh=True)
    assert pair.generation == 0
    # From the kept verdicts, or the same again: workers have it.
    pair.apply({**GOOD, "artefact": "b"}, DRIVER)
    pair.apply({**GOOD, "artefact": "b"}, DRIVER, fresh=True)
    assert pair.generation == 0
    pair.apply({**GOOD, "artefact": "c"}, DRIVER, fresh=True)
    assert pair.generation == 1
    # A driver that names nothing may have made another.
    pair.apply(GOOD, DRIVER, fresh=True)
    pair.apply(GOOD, DRIVER, fresh=True)
    assert pair.generation == 3
    # Not ready in between: workers may still have what they had.
    pair.apply(BAD, DRIVER, fresh=True)
    pair.apply({**GOOD, "artefact": "c"}, DRIVER, fresh=True)
    assert pair.generation == 4


def test_a_pair_that_came_out_the_same_follows() -> None:
    tuned, other = Pair("opencl", "fp32"), Pair("opencl", "auto")
    for pair in (tuned, other):
        pair.apply({**GOOD, "artefact": "a"}, DRIVER, fresh=True)

    tuned.apply({**GOOD, "artefact": "b", "warm_load_us": OWN_WORKER_US}, DRIVER, fresh=True)
    other.follow(tuned)
    assert (other.generation, other.artefact, other.own_worker) == (1, "b", True)
    assert other.figures == tuned.figures


def test_with_another_driver_it_may_be_made_anew_once_more() -> None:
    pair = Pair("npu", "auto")
    pair.apply(GOOD, DRIVER)
    pair.prepared_again = True
    pair.apply(GOOD, DRIVER, fresh=True)
    assert pair.prepared_again
    pair.apply(GOOD, {"driver": "two"}, fresh=True)
    assert (pair.prepared_again, pair.identity) == (False, {"driver": "two"})
