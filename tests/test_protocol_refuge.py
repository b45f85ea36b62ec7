"""A slow device is not left for a slower one; a lost one is probed soon."""

from __future__ import annotations

import pytest
from protocol_helpers import GPU, Bench, pair

from switchgear.daemon.protocol.constants import Constants

VULKAN = pair("vulkan")
CPU = pair("cpu")


def bench(cpu_ms: float, **changes: object) -> Bench:
    """A GPU and a CPU whose paces are known: 30 ms and `cpu_ms`."""
    constants = Constants(shedding=False, **changes)  # type: ignore[arg-type]
    made = Bench(constants=constants, backends=("vulkan", "cpu"))
    made.heat(gpu=40.0, cpu=40.0)
    made.frames(VULKAN, 30.0, 101)
    made.frames(CPU, cpu_ms, 101)
    made.heat(gpu=66.0)
    return made


@pytest.mark.parametrize(
    ("cpu_ms", "run_ms", "leaves"),
    [
        (50.0, 50.1, True),
        (50.0, 49.9, False),  # slow by its own pace, and still faster than the CPU
        (50.0, 400.0, True),
    ],
)
def test_slow_frames_leave_for_a_faster_place_only(
    cpu_ms: float, run_ms: float, leaves: bool
) -> None:
    it = bench(cpu_ms)
    it.frames(VULKAN, run_ms, 3)

    assert it.allowed(VULKAN) is not leaves


def test_without_the_guard_any_place_is_a_refuge() -> None:
    it = bench(50.0, refuge_faster=False)
    it.frames(VULKAN, 49.9, 3)

    assert not it.allowed(VULKAN)


def test_a_place_whose_pace_nobody_knows_is_a_refuge() -> None:
    it = Bench(constants=Constants(shedding=False), backends=("vulkan", "cpu"))
    it.heat(gpu=40.0, cpu=40.0)
    it.frames(VULKAN, 30.0, 101)
    it.heat(gpu=66.0)
    it.frames(VULKAN, 46.0, 3)

    assert not it.allowed(VULKAN)


def test_a_lost_device_is_probed_after_ten_seconds_and_later_each_time() -> None:
    it = bench(50.0)
    it.heat(gpu=40.0)
    holds = []
    for _ in range(3):
        it.protocol.failure(VULKAN, "device_lost", "vulkan", -4, it.now_s)
        breaker = it.protocol.device_state(str(GPU.name)).breaker
        holds.append(breaker.hold_s)
        assert breaker.phase == "open"
        it.run(breaker.hold_s + 60.0)
        assert it.allowed(VULKAN)

    assert holds == pytest.approx([10.0, 20.0, 40.0], rel=0.11)
