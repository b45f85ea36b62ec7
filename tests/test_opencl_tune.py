"""The search for faster kernels: within its budget, never other numbers, never slower."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from opencl_helpers import opened, spec

from switchgear.backends.contract import LoadRequest, ModelInfo
from switchgear.backends.generate.dense import dense

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from switchgear.backends.opencl.tinygrad_jit import Captured

SHAPE = (24, 32)
WEIGHTS = np.random.default_rng(3).standard_normal((32, 32)).astype(np.float32)


@pytest.fixture(scope="module")
def captured() -> Captured:
    """Two launches by tinygrad: a product and what follows it."""
    device = opened()
    from switchgear.backends.opencl import tinygrad_jit

    tinygrad_jit.open_device(
        str(device.device.name).strip(),
        str(device.device.driver_version).strip(),
        group_memory=not device.host_memory,
    )

    def function(x: Any) -> Sequence[Any]:
        product = x.dot(tinygrad_jit.constant(WEIGHTS)).contiguous()
        return [product.maximum(0) * 2]

    return tinygrad_jit.capture(function, [(SHAPE, "float32")])


def answers(captured: Captured, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    from switchgear.backends.opencl.compiler import assemble
    from switchgear.backends.opencl.replay import Replay
    from switchgear.backends.opencl.runner import Runner

    tensors = (spec("x", shape=SHAPE),), (spec("y", shape=SHAPE),)
    artefact = assemble(
        captured, ModelInfo(*tensors, "signature", False, {"ADD": 1}), "fp32", {}
    )
    replay = Replay(opened(), artefact)
    (result,) = Runner(replay, artefact).run([x])
    replay.close()
    return result


def test_all_that_is_tried_says_the_same(captured: Captured) -> None:
    from switchgear.backends.opencl import tinygrad_jit

    x = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    want = np.maximum(x @ WEIGHTS, 0) * 2
    assert np.abs(answers(captured, x) - want).max() < 1e-4
    launch = captured.launches[0]
    ways = [
        tinygrad_jit.with_steps(launch, steps)
        for steps in tinygrad_jit.next_steps(launch, ())[::15]
    ]
    others = [way for way in ways if way is not None and way.source != launch.source]
    assert others
    for other in others:
        launches = (other, *captured.launches[1:])
        result = answers(dataclasses.replace(captured, launches=launches), x)
        assert np.abs(result - want).max() < 1e-4


def test_no_time_changes_nothing(captured: Captured) -> None:
    from switchgear.backends.opencl.tune import KernelSearch

    tuned = KernelSearch(opened(), captured, deadline=0, clock=lambda: 1.0).run()
    assert (tuned.captured, tuned.tried, tuned.changed) == (captured, 0, 0)


def test_the_budget_ends_the_search(captured: Captured) -> None:
    """The clock moves by one at each look: the budget is a number of candidates."""
    from switchgear.backends.opencl.tune import KernelSearch

    ticks = itertools.count()
    search = KernelSearch(opened(), captured, deadline=3, clock=lambda: float(next(ticks)))
    tuned = search.run()
    assert 0 < tuned.tried <= 3
    assert next(ticks) <= 5
    x = np.random.default_rng(2).standard_normal(SHAPE).astype(np.float32)
    assert np.abs(answers(tuned.captured, x) - np.maximum(x @ WEIGHTS, 0) * 2).max() < 1e-4


class Clock:
    """Kernels take what the test says: the second step of the product's search is a gain."""

    def __init__(self, device: object) -> None:
        del device
        self.asked = 0

    def time_ns(self, run: object, sizes: object, best_ns: float = 0) -> int:
        del run, sizes, best_ns
        self.asked += 1
        # The two kernels as they are, then ever faster ones.
        return 1000 - 100 * max(0, self.asked - 2) if self.asked < 10 else 5000


def test_faster_kernels_are_taken(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    from switchgear.backends.opencl import tune

    monkeypatch.setattr(tune, "KernelClock", Clock)
    ticks = itertools.count()
    tuned = tune.KernelSearch(
        opened(), captured, deadline=3, clock=lambda: float(next(ticks))
    ).run()
    assert tuned.changed == 1
    changed = [
        new.source != old.source
        for new, old in zip(tuned.captured.launches, captured.launches, strict=True)
    ]
    assert sum(changed) == 1
    same = [
        (new.arguments, new.writes) == (old.arguments, old.writes)
        for new, old in zip(tuned.captured.launches, captured.launches, strict=True)
    ]
    assert all(same)


def tuned_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mark: str, tune_s: float = 1.0
) -> LoadRequest:
    """A search that finds kernels with a mark in their source, and the request for it."""
    from switchgear.backends.opencl.tune import KernelSearch, Tuned

    model = folder / "model.tflite"
    model.write_bytes(dense((32, 32)))

    def found(search: KernelSearch) -> Tuned:
        traced: Captured = search._captured
        marked = [
            dataclasses.replace(each, source=f"{each.source}\n// {mark}\n")
            for each in traced.launches
        ]
        return Tuned(dataclasses.replace(traced, launches=tuple(marked)), 5, 1)

    monkeypatch.setattr(KernelSearch, "run", found)
    return LoadRequest(str(model), "fp32", {}, str(folder), True, tune_s)


@pytest.mark.parametrize(("times_ms", "kept"), [((2.0, 1.0, 1.5), 1), ((2.0, 1.5, 1.0), 2)])
def test_what_an_earlier_search_found_has_to_be_beaten(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    times_ms: tuple[float, float, float],
    kept: int,
) -> None:
    opened()
    from switchgear.backends.opencl import prepare
    from switchgear.backends.opencl.backend import OpenClBackend

    monkeypatch.setattr(prepare, "same_answers", lambda *_: True)
    names = []
    for number, times in ((1, (2.0, 2.0, 1.0)), (2, times_ms)):
        monkeypatch.setattr(prepare, "compared_ms", lambda *_, times=times: list(times))
        request = tuned_request(tmp_path, monkeypatch, f"search {number}", float(number))
        instance: Any = OpenClBackend({}).load(request)
        names.append(instance.artefact_id)
        source, notes = instance._artefact.source, instance.notes
        instance.close()

    assert f"// search {kept}\n" in source
    assert (names[0] == names[1]) == (kept == 1)
    # It is known how long it was searched for, so that it is not done again.
    assert (notes["tune_s"], notes["before_ms"]) == ("2", f"{times_ms[1]:.3f}")


@pytest.mark.parametrize(("better", "alike"), [(True, True), (True, False), (False, True)])
def test_the_faster_of_both_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, better: bool, alike: bool
) -> None:
    """Tuned only where the whole model is faster with it and says the same."""
    opened()
    from switchgear.backends.opencl import prepare
    from switchgear.backends.opencl.backend import OpenClBackend
    from switchgear.backends.opencl.tune import KernelSearch

    request = tuned_request(tmp_path, monkeypatch, "tuned")
    # Without a search, what was stored (nothing), and what was found.
    times_ms = [2.0, 2.0, 1.0 if better else 3.0]
    monkeypatch.setattr(prepare, "compared_ms", lambda *_: times_ms)
    monkeypatch.setattr(prepare, "same_answers", lambda *_: alike)
    instance: Any = OpenClBackend({}).load(request)
    kept = better and alike
    assert ("// tuned" in instance._artefact.source) == kept
    assert instance.notes["tune_changed"] == str(int(kept))
    assert instance.notes["untuned_ms"] == "2.000"
    instance.close()

    # It is not searched again for the same time, nor for less.
    monkeypatch.setattr(KernelSearch, "run", None)
    OpenClBackend({}).load(dataclasses.replace(request, tune_s=0.5)).close()
