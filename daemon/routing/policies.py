"""The policies by name, as weights of the score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from switchgear.ipc.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Policy:
    """What a policy counts, in equivalent milliseconds; the least score wins.

    `time` per ms of expected completion, `energy` per mJ of an inference, `power` per W while
    it runs, `heat` per mJ where no headroom is left: speed that lasts is bought with energy,
    for what heats less is throttled later. `prefer` is the
    kind of device whose score is multiplied by `prefer_factor`. A candidate is late past the
    session's limit, or without one past `tolerance` times the earliest completion; each ms of
    that costs `LATE_WEIGHT`.
    """

    name: str
    number: int
    time: float = 0.0
    energy: float = 0.0
    power: float = 0.0
    heat: float = 0.0
    tolerance: float = 1.5
    prefer: str = ""
    prefer_factor: float = 1.0


# A late answer is worth less than any saving: a frame that is one period late costs more than
# the energy of the hungriest backend.
LATE_WEIGHT: Final = 1000.0
# Preferred up to twice the time of the others.
PREFERRED: Final = 0.5

POLICIES: Final = {
    policy.name: policy
    for policy in (
        Policy("max_performance", 0, time=1.0, heat=1.0),
        Policy(
            "prefer_gpu", 1, time=1.0, heat=0.5, tolerance=3.0,
            prefer="gpu", prefer_factor=PREFERRED,
        ),
        Policy(
            "prefer_npu", 2, time=1.0, heat=0.5, tolerance=3.0,
            prefer="npu", prefer_factor=PREFERRED,
        ),
        Policy(
            "prefer_cpu", 3, time=1.0, heat=0.5, tolerance=3.0,
            prefer="cpu", prefer_factor=PREFERRED,
        ),
        # Energy first, among those that answer in time; time only to tell equals apart.
        Policy("max_efficiency", 4, time=0.01, energy=1.0),
        Policy("min_power", 5, time=0.001, power=1.0, tolerance=8.0),
    )
}  # fmt: skip
BY_NUMBER: Final = {policy.number: policy for policy in POLICIES.values()}
DEFAULT_POLICY: Final = "max_efficiency"


def policy_of(name: str) -> Policy:
    """:raises BadRequest: no policy has this name."""
    policy = POLICIES.get(name)
    if policy is None:
        raise BadRequest(f"no policy {name[:64]!r}; there is {', '.join(POLICIES)}")

    return policy
