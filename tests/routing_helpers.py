"""Candidates for the tests of routing, with the numbers of the phone scenario."""

from __future__ import annotations

from switchgear.daemon.routing.candidate import Candidate
from switchgear.daemon.routing.estimates import EnergyEstimate, LaneLoad, ServiceEstimate

# Run time in ms and power in W, by backend.
PHONE = {
    "vulkan": ("gpu", 28.0, 7.0),
    "npu": ("npu", 31.0, 2.5),
    "cpu": ("cpu", 55.0, 4.2),
}


def measured(run_ms: float, spread: float = 0.03, now_s: float = 0.0) -> ServiceEstimate:
    """An estimate that has seen enough runs around `run_ms` to be steady."""
    estimate = ServiceEstimate(run_ms)
    for number in range(64):
        estimate.observe(run_ms * (1.0 + spread * (number % 3 - 1)), now_s)

    return estimate


def candidate(key: str, kind: str, run_ms: float, busy_w: float) -> Candidate:
    energy = EnergyEstimate(busy_w, busy_w * run_ms)
    return Candidate(key, kind, kind, measured(run_ms), energy, LaneLoad())


def phone() -> dict[str, Candidate]:
    return {
        name: candidate(name, kind, run_ms, busy_w)
        for name, (kind, run_ms, busy_w) in PHONE.items()
    }
