"""`protocol = "report"`: the field report's rules to the letter, and each number's bounds."""

from __future__ import annotations

import pytest
from protocol_helpers import GPU, Bench, int4, pair

from switchgear.daemon.protocol.topology import SessionLimits

VULKAN = pair("vulkan")
OPENCL = pair("opencl")
NPU = pair("npu")
CPU = pair("cpu")


def bench() -> Bench:
    made = Bench(mode="report")
    made.protocol.add_pair(int4())
    made.heat(gpu=40.0, npu=40.0, cpu=40.0)
    return made


def test_the_whole_sequence() -> None:
    """Trip, degrade, recover, as the report tells it."""
    it = bench()
    it.heat(gpu=66.0)
    it.frames(VULKAN, 201, 2)
    assert it.allowed(VULKAN), "two frames do not switch"
    it.frames(VULKAN, 201)
    assert not it.allowed(VULKAN), "the fourth frame runs elsewhere"
    assert not it.allowed(OPENCL), "the other API heats the same chip"
    assert it.allowed(NPU)

    it.protocol.failure(NPU, "error", "nnapi", 4, it.now_s)
    assert not it.allowed(NPU)
    assert it.allowed(int4()), "INT4 runs although the GPU is hot"
    degrade = [event for event in it.events() if event.kind == "degrade"]
    assert [(event.before, event.after) for event in degrade] == [(str(NPU), str(int4()))]

    it.heat(gpu=57.9)
    it.frames(CPU, 119, 9)
    assert it.protocol.tick(it.now_s) == []
    it.frames(CPU, 119)
    (probe,) = it.protocol.tick(it.now_s)
    assert (probe.target, probe.backend, probe.pair) == (GPU, "vulkan", VULKAN)
    it.protocol.probe_result(probe.target, probe.lease, True, it.now_s + 0.1)
    answer = it.protocol.admit(VULKAN, it.now_s)
    assert (answer.allowed, answer.share) == (True, 1.0)


def test_nothing_is_in_reserve() -> None:
    it = bench()
    it.heat(gpu=66.0)
    it.frames(VULKAN, 201, 3)
    answer = it.protocol.admit(VULKAN, it.now_s)
    assert (answer.allowed, answer.reserve) == (False, False)


@pytest.mark.parametrize(
    ("celsius", "run_ms", "leaves"),
    [(66, 201, True), (65.001, 200.1, True), (65, 201, False), (66, 200, False)],
)
def test_trip(celsius: float, run_ms: float, leaves: bool) -> None:
    it = bench()
    it.heat(gpu=celsius)
    it.frames(VULKAN, run_ms, 3)
    assert it.allowed(VULKAN) is not leaves


@pytest.mark.parametrize(
    ("celsius", "run_ms", "frames", "probed"),
    [
        (57.9, 119, 10, True),
        (57.999, 119.9, 10, True),
        (58, 119, 10, False),
        (57.9, 120, 10, False),
        (57.9, 119, 9, False),
    ],
)
def test_recover(celsius: float, run_ms: float, frames: int, probed: bool) -> None:
    it = bench()
    it.trip(VULKAN, 66, 201)
    it.heat(gpu=celsius)
    it.frames(NPU, run_ms, frames)
    assert bool(it.protocol.tick(it.now_s)) is probed


def test_ten_frames_are_consecutive() -> None:
    it = bench()
    it.trip(VULKAN, 66, 201)
    it.heat(gpu=50.0)
    it.frames(NPU, 119, 9)
    it.frames(NPU, 120)
    it.frames(NPU, 119, 9)
    assert it.phase("gpu") == "open"
    it.frames(NPU, 119)
    assert it.phase("gpu") == "half_open"


def test_without_traffic_it_waits() -> None:
    """The report waives nothing."""
    it = bench()
    it.trip(VULKAN, 66, 201)
    it.heat(gpu=40.0)
    it.run(3600, step_s=10)
    assert it.phase("gpu") == "open"


def test_it_learns_no_limits_and_takes_none() -> None:
    """A pair of 20 ms still has 200 ms, whatever the model or a client says."""
    it = bench()
    it.learn(VULKAN, 20)
    fast = pair("vulkan", "fast")
    it.protocol.add_pair(fast, slow_ms=30, recover_ms=25)
    it.protocol.add_pair(pair("cpu", "fast"))
    it.heat(gpu=80.0)
    it.frames(VULKAN, 199, 5, limits=SessionLimits(1, slow_ms=30))
    it.frames(fast, 199, 5)
    assert it.phase("gpu") == "closed"
    assert it.allowed(VULKAN, session=1)


def test_a_bad_probe_waits_for_the_conditions_again() -> None:
    it = bench()
    it.trip(VULKAN, 66, 201)
    it.heat(gpu=50.0)
    it.frames(NPU, 119, 10)
    it.good_probes = False
    it.run(1)
    assert it.phase("gpu") == "open"
    it.good_probes = True
    it.frames(NPU, 119, 9)
    it.run(2)
    assert it.phase("gpu") == "open"
    it.frames(NPU, 119)
    it.run(2)
    assert it.phase("gpu") == "closed"
