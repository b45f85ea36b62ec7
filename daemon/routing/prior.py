"""What a pair is expected to take before it was ever measured, and why.

From the fingerprint where that has the numbers, else from the CPU's measured time and the field
report's rule of thumb; the words go with the estimate until a run is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Kind: TypeAlias = Literal["cpu", "gpu", "npu"]

# The field report's rule of thumb.
SMALL_MODEL_BYTES: Final = 50_000_000
PATIENT_MS: Final = 10.0
URGENT_MS: Final = 5.0
# Where nothing but the rule is known: what it names is taken for twice as fast as the CPU, any
# other device for as fast. The first measured run replaces it.
FAVOURED_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Work:
    """One inference of a model: its file's size, its multiply-adds (0: not known), the bytes
    that go in and out.

    `wanted_ms` is the answer time that the session asks for, 0 for none; `video` says that the
    frames are a stream.
    """

    model_bytes: int
    multiply_adds: int = 0
    moved_bytes: int = 0
    wanted_ms: float = 0.0
    video: bool = False


@dataclass(frozen=True, slots=True)
class Speed:
    """What the fingerprint knows of a device; 0 where it knows nothing.

    `gigaflops` from the 1024x1024x1024 matmul (two operations per multiply-add),
    `bandwidth_mb_s` of moving data there, `submit_ms` the overhead of a run.
    """

    kind: Kind
    gigaflops: float = 0.0
    bandwidth_mb_s: float = 0.0
    submit_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Prior:
    """The expected time of a run and where it comes from, in words."""

    expected_ms: float
    why: str


def rule_of_thumb(work: Work) -> tuple[Kind, str]:
    """The kind of device that the field report's rule names, and the clause of it."""
    if work.video:
        return "npu", "video: NPU"

    if 0.0 < work.wanted_ms < URGENT_MS:
        return "npu", f"an answer within {work.wanted_ms:g} ms: NPU"

    if work.model_bytes >= SMALL_MODEL_BYTES:
        return "npu", f"a large model ({work.model_bytes / 1e6:.0f} MB): NPU"

    if work.wanted_ms == 0.0 or work.wanted_ms > PATIENT_MS:
        return "gpu", "a model under 50 MB with more than 10 ms to answer: GPU"

    return "cpu", "a small model between 5 and 10 ms: the CPU answers"


def prior(work: Work, speed: Speed, cpu_ms: float) -> Prior:
    """The prior of a pair on a device; `cpu_ms` is the CPU's time for the same model, above 0.

    :raises ValueError: `cpu_ms` is not above 0.
    """
    if not cpu_ms > 0.0:
        raise ValueError(f"the CPU's time is above 0, not {cpu_ms}")

    if work.multiply_adds and speed.gigaflops > 0.0:
        compute_ms = 2.0 * work.multiply_adds / (speed.gigaflops * 1e6)
        move_ms = 0.0
        if speed.bandwidth_mb_s > 0.0:
            move_ms = work.moved_bytes / (speed.bandwidth_mb_s * 1e3)

        return Prior(
            compute_ms + move_ms + speed.submit_ms,
            f"fingerprint: {compute_ms:.1f} ms of arithmetic, {move_ms:.1f} ms of moving data, "
            f"{speed.submit_ms:.1f} ms to submit",
        )

    if speed.kind == "cpu":
        return Prior(cpu_ms, "measured on the CPU")

    favoured, clause = rule_of_thumb(work)
    if speed.kind == favoured:
        expected_ms = max(cpu_ms * FAVOURED_SHARE, speed.submit_ms)
        return Prior(expected_ms, f"rule of thumb: {clause}; the CPU answers meanwhile")

    return Prior(cpu_ms + speed.submit_ms, f"rule of thumb: not here ({clause})")
