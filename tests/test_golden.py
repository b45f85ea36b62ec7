"""A pair's golden input: kept with its answer, and what a wrong answer gives."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_network import small_network

from switchgear.backends.contract import LoadRequest
from switchgear.backends.cpu import CpuBackend
from switchgear.backends.known_answer.check import compare
from switchgear.backends.known_answer.golden import check_golden, path_of, write_golden
from switchgear.backends.known_answer.reference import compute_reference, run_once
from switchgear.ipc.errors import NotPrepared

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """The engine's interpreters hold the model's descriptor as long as they live."""
    yield
    gc.collect()


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Any]:
    path = tmp_path / "net.tflite"
    path.write_bytes(small_network())
    loaded = CpuBackend({"threads": 1}).load(LoadRequest(str(path)))
    reference = compute_reference(str(path), {})
    results = [run_once(loaded, each) for each in reference.inputs]
    report = compare(reference, results, loaded.precision)
    assert report.ok
    write_golden(tmp_path, "cpu", loaded.precision, reference, report)
    yield loaded
    loaded.close()


def test_the_right_answer_holds(instance: Any, tmp_path: Path) -> None:
    answer = check_golden(instance, tmp_path, "cpu")
    assert answer["ok"] is True
    assert answer["run_us"] >= 0


class Liar:
    """An instance whose outputs are `wrong`."""

    def __init__(self, instance: Any, factor: float) -> None:
        self.info = instance.info
        self.precision = instance.precision
        self.attach_input = instance.attach_input
        self._instance = instance
        self._factor = np.float32(factor)

    def attach_output(self, tensors: Any) -> Any:
        self._memory = tensors
        return self._instance.attach_output(tensors)

    def run(self, source: Any, target: Any) -> Any:
        entries = self._instance.run(source, target)
        for memory in self._memory:
            values = np.frombuffer(memory, np.float32)
            values *= self._factor

        return entries


@pytest.mark.parametrize(
    ("factor", "text"), [(1.1, "wrong by"), (float("nan"), "not finite"), (0.0, "wrong by")]
)
def test_a_wrong_answer_is_told(
    instance: Any, tmp_path: Path, factor: float, text: str
) -> None:
    liar: Any = Liar(instance, factor)
    answer = check_golden(liar, tmp_path, "cpu")
    assert answer["ok"] is False
    assert text in answer["text"]


def test_what_is_not_kept_or_damaged_is_no_check(instance: Any, tmp_path: Path) -> None:
    with pytest.raises(NotPrepared):
        check_golden(instance, tmp_path, "other")

    path = path_of(tmp_path, "cpu", instance.precision)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(NotPrepared):
        check_golden(instance, tmp_path, "cpu")
