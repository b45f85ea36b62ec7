"""Counting what a device takes of a model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from npu_helpers import written
from small_network import small_network

from switchgear.backends import generate
from switchgear.backends.contract import Coverage
from switchgear.backends.npu.coverage import (
    arithmetic_of,
    check_coverage,
    coverage_of,
    nodes_in_partitions,
    wanted_share,
)
from switchgear.ipc.errors import BadConfiguration, DriverError, UnsupportedModel

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine


def node(inputs: list[int], outputs: list[int]) -> dict[str, Any]:
    return {"inputs": inputs, "outputs": outputs}


# 0 -> a -> 1 -> b -> 2 -> d -> 4, and 1 -> c -> 3 -> d.
DIAMOND = [node([0], [1]), node([1], [2]), node([1], [3]), node([2, 3], [4])]


@pytest.mark.parametrize(
    ("partitions", "taken"),
    [
        ([], set()),
        ([node([0], [4])], {0, 1, 2, 3}),
        ([node([1], [4])], {1, 2, 3}),
        ([node([0], [1]), node([2, 3], [4])], {0, 3}),
        ([node([1, 3], [4])], {1, 3}),
        ([node([0], [1, 2])], {0, 1}),
    ],
)
def test_nodes_of_partitions(partitions: list[dict[str, Any]], taken: set[int]) -> None:
    assert nodes_in_partitions(DIAMOND, partitions) == taken


@given(st.integers(1, 40), st.data())
def test_a_chain_cut_anywhere_counts_what_lies_between(
    length: int, data: st.DataObject
) -> None:
    chain = [node([i], [i + 1]) for i in range(length)]
    begin = data.draw(st.integers(0, length - 1))
    end = data.draw(st.integers(begin + 1, length))
    assert nodes_in_partitions(chain, [node([begin], [end])]) == set(range(begin, end))


def test_the_arithmetic_of_each_operator(tmp_path: Path) -> None:
    costs = arithmetic_of(written(tmp_path, small_network()))

    conv, deep, point = 64 * 8 * 27, 64 * 8 * 9, 64 * 8 * 8
    assert costs == (conv, deep, point, 0, 0, 0, 0, 80)
    assert sum(costs) == generate.multiply_adds(small_network())


def test_shares() -> None:
    assert coverage_of({0, 2}, (30, 60, 10)) == Coverage(2, 3, 0.4)
    assert coverage_of(set(), (30, 60, 10)) == Coverage(0, 3, 0.0)
    # Without any multiplication the operators themselves count.
    assert coverage_of({0}, (0, 0, 0, 0)) == Coverage(1, 4, 0.25)
    assert coverage_of(set(), ()) == Coverage(0, 0, 0.0)


def test_the_threshold_is_met_exactly() -> None:
    check_coverage(Coverage(4, 5, 0.8), 0.8, Counter())
    with pytest.raises(UnsupportedModel, match=r"4 of 5 nodes, 0\.79 .*; 0\.8 is wanted"):
        check_coverage(Coverage(4, 5, 0.79), 0.8, Counter(SOFTMAX=1))

    with pytest.raises(UnsupportedModel, match=r"on the CPU: ADD \(3\), MUL \(1\)"):
        check_coverage(Coverage(0, 4, 0.0), 0.0, Counter(MUL=1, ADD=3))


@pytest.mark.parametrize("value", [-0.1, 1.1, "0.8", True, None, float("nan")])
def test_a_share_that_is_none(value: object) -> None:
    with pytest.raises(BadConfiguration, match="from 0 to 1"):
        wanted_share({"min_arithmetic": value})


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match=r"not a \.tflite file"):
        arithmetic_of(written(tmp_path, b"no model at all"))
