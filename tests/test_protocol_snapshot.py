"""What outlives the daemon: hold levels, quarantines and crash marks; openness does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from protocol_helpers import Bench, pair

from switchgear.daemon.protocol.constants import Constants
from switchgear.daemon.protocol.topology import PairKey

ON_GPU = pair("vulkan")
ON_NPU = pair("npu")
STILL = Constants(shedding=False)


def kept(it: Bench) -> Any:
    """A snapshot as it comes back from a file."""
    return json.loads(json.dumps(it.protocol.snapshot(it.now_s)))


def reborn(saved: Any, **changes: Any) -> Bench:
    it = Bench(constants=STILL, **changes)
    it.now_s = 5.0
    it.protocol.restore(saved, it.now_s)
    return it


def tripped_twice() -> Bench:
    it = Bench(constants=STILL)
    it.heat(gpu=40.0)
    for _ in range(2):
        it.trip(ON_GPU)
        it.heat(gpu=40.0)
        it.run_until("closed")

    return it


def test_hold_levels_persist() -> None:
    first = tripped_twice()
    assert first.protocol.device_state("gpu").breaker.hold_level == 1
    second = reborn(kept(first))
    assert second.protocol.device_state("gpu").breaker.hold_level == 1
    second.heat(gpu=40.0)
    second.trip(ON_GPU)
    assert second.protocol.device_state("gpu").breaker.hold_s > 2 * 120 * 0.9


def test_openness_does_not() -> None:
    first = Bench(constants=STILL)
    first.heat(gpu=40.0)
    first.trip(ON_GPU)
    assert not first.allowed(ON_GPU)
    assert reborn(kept(first)).allowed(ON_GPU)


@pytest.mark.parametrize(("celsius", "opens"), [(58.001, True), (58.0, False), (40.0, False)])
def test_a_device_that_is_warm_at_the_start_starts_open(celsius: float, opens: bool) -> None:
    it = Bench(constants=STILL)
    it.heat(gpu=celsius, cpu=90.0)
    assert it.allowed(ON_GPU) is not opens
    assert it.allowed(pair("cpu"))
    it.heat(gpu=40.0)
    it.run(200)
    assert it.allowed(ON_GPU)


def test_only_its_first_reading_is_the_start() -> None:
    it = Bench(constants=STILL)
    it.heat(gpu=40.0)
    it.heat(gpu=64.0)
    assert it.allowed(ON_GPU)


@pytest.mark.parametrize("kind", ["crash", "wrong", "unsupported"])
def test_quarantines_persist_with_their_time(kind: str) -> None:
    first = Bench(constants=STILL)
    first.protocol.failure(ON_NPU, kind, "signal", 6, first.now_s)  # type: ignore[arg-type]
    first.now_s += 1000
    second = reborn(kept(first))
    state = second.protocol.pair_state(ON_NPU).breaker
    assert (state.phase, state.cause) == ("quarantined", kind)
    assert state.until_s == pytest.approx(5.0 + 86_400 - 1000)


def test_a_pair_that_is_not_there_now_is_remembered() -> None:
    first = Bench(constants=STILL)
    first.protocol.failure(ON_NPU, "wrong", "", 0, first.now_s)
    second = reborn(kept(first), models=())
    third = reborn(kept(second))
    assert not third.allowed(ON_NPU)


def test_a_mark_that_was_left_is_a_crash() -> None:
    """The process died in the first use: the driver may have taken it along."""
    first = Bench(constants=STILL)
    first.protocol.attempt(ON_NPU, begins=True)
    first.protocol.attempt(ON_GPU, begins=True)
    first.protocol.attempt(ON_GPU, begins=False)
    second = reborn(kept(first))
    assert not second.allowed(ON_NPU)
    assert second.protocol.pair_state(ON_NPU).breaker.cause == "restart"
    assert second.allowed(ON_GPU)


def test_kept_pairs_are_bounded() -> None:
    it = Bench(constants=STILL, models=())
    for number in range(1100):
        key = PairKey(f"model{number}", "npu", "int8")
        it.protocol.add_pair(key)
        it.protocol.failure(key, "wrong", "", 0, it.now_s)
        it.protocol.remove_pair(key)

    pairs = kept(it)["pairs"]
    assert len(pairs) == 1024
    assert pairs[-1]["pair"][0] == "model1099"


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"schema": 2},
        {"schema": 1, "devices": {}, "backends": {}, "pairs": [{}], "attempts": []},
        {"schema": 1, "devices": {"gpu": -1}, "backends": {}, "pairs": [], "attempts": []},
        {"schema": 1, "devices": {"gpu": "x"}, "backends": {}, "pairs": [], "attempts": []},
        {"schema": 1, "devices": {}, "backends": {}, "pairs": [], "attempts": [["m"]]},
        {"schema": 1, "devices": [], "backends": {}, "pairs": [], "attempts": []},
        {"schema": 1, "devices": {}, "backends": {}, "pairs": [], "attempts": [[1, 2, 3, 4]]},
    ],
)
def test_what_is_no_snapshot_changes_nothing(broken: Any) -> None:
    it = Bench(constants=STILL)
    before = kept(it)
    with pytest.raises(ValueError):
        it.protocol.restore(broken, it.now_s)

    assert kept(it) == before


def test_unknown_devices_are_left_out() -> None:
    saved = {
        "schema": 1,
        "devices": {"old": 3, "gpu": 60},
        "backends": {"gone": 1},
        "pairs": [],
        "attempts": [],
    }
    it = reborn(saved)
    assert it.protocol.device_state("gpu").breaker.hold_level == 4, "30 minutes are the most"
