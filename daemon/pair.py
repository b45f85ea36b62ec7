"""A pair: one model on one backend, in the precision that was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from switchgear.ipc.record import Precision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from switchgear.daemon.verdicts import Verdict

# What is prepared of each backend for a new model, in this order: INT4 right after the GPU, so
# that a degrade never waits for a compiler. "auto" is the fastest precision whose known answer
# holds. A backend that is not here is asked for "auto".
ASKED: Final = (
    ("npu", "auto"),
    ("vulkan", "auto"),
    ("opencl", "auto"),
    ("opencl", "int4"),
)
# The lowest arithmetic first.
ORDER_OF_PRECISIONS: Final = ("int4", "int8", "fp16", "fp32")
# A warm load longer than this would hold up what a shared worker serves.
OWN_WORKER_US: Final = 200_000
# Verdicts that are no use asking for again with the same driver.
_LASTING: Final = ("unsupported", "wrong", "refused")
_FIGURES: Final = (
    "error",
    "snr_db",
    "tolerance",
    "rule",
    "inputs",
    *("load_us", "first_run_us", "run_us", "cpu_us", "cache_bytes"),
    "warm_load_us",
    "warm_first_run_us",
    "coverage",
    "artefact",
    "tried",
)


@dataclass(eq=False, slots=True)
class Pair:
    """`state` is waiting, preparing, ready, absent, unsupported, wrong, refused or failed;
    `reason` says why it is not ready, `step` what its preparer does. `number` is the record's
    for `precision`. `figures` are the known-answer check's and the timings of the preparer."""

    backend: str
    asked: str
    state: str = "waiting"
    reason: str = ""
    step: str = ""
    precision: str = ""
    number: int = 0
    own_worker: bool = False
    # Since the start or the last driver, because a worker could not load it.
    prepared_again: bool = False
    # Of the device and driver with which it came out; None before it did.
    identity: Mapping[str, str] | None = None
    # Counts what was prepared anew after it had been ready; which of them workers were told of.
    generation: int = 0
    taken_over: int = 0
    # What its workers have, as the backend names it; None before it was ready.
    artefact: str | None = None
    # Its last verdict was found by this daemon, not taken from the kept ones.
    fresh: bool = False
    figures: dict[str, Any] = field(default_factory=dict)
    # Name, start and duration in microseconds, as in a model's own timeline.
    timeline: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def label(self) -> str:
        name = self.precision or ("" if self.asked == "auto" else self.asked)
        return f"{self.backend} {name}".strip()

    def apply(
        self, verdict: Verdict, identity: Mapping[str, str], *, fresh: bool = False
    ) -> None:
        """Takes over how a preparer ended, just now (`fresh`) or earlier, with this driver."""
        if identity != self.identity:
            self.prepared_again = False

        self.identity = identity
        self.fresh = fresh
        self.step = ""
        self.figures = {name: verdict[name] for name in _FIGURES if name in verdict}
        if verdict["ok"]:
            self.state, self.reason = "ready", ""
            self.precision = str(verdict["precision"])
            self.number = int(Precision[self.precision.upper()])
            load_us = int(verdict["warm_load_us"]) + int(verdict["warm_first_run_us"])
            self.own_worker = load_us > OWN_WORKER_US
            artefact = str(verdict.get("artefact", ""))
            is_other = not artefact or artefact != self.artefact
            if fresh and self.artefact is not None and is_other:
                self.generation += 1

            self.artefact = artefact
        else:
            self.state = str(verdict.get("verdict", "failed"))
            self.reason = reason_of(verdict)

    def follow(self, other: Pair) -> None:
        """Takes over what was prepared anew for another pair that came out the same: they have
        one place in the workers."""
        self.figures, self.own_worker = dict(other.figures), other.own_worker
        self.artefact, self.identity = other.artefact, other.identity
        self.generation += 1

    def to_json(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "asked": self.asked,
            "state": self.state,
            "reason": self.reason,
            "step": self.step,
            "precision": self.precision,
            "figures": self.figures,
            "timeline": [
                {"name": name, "start_us": start, "duration_us": duration}
                for name, start, duration in self.timeline
            ],
        }


def reason_of(verdict: Verdict) -> str:
    """Why a preparer refused, in one line with the error's domain and code."""
    domain, code = str(verdict.get("domain", "")), verdict.get("code", 0)
    text = str(verdict.get("text", ""))
    if domain in ("", "switchgear"):
        return text or str(verdict.get("name", ""))

    return f"{domain}:{code} {verdict.get('name', '')}: {text}"


def is_lasting(verdict: Verdict) -> bool:
    """Whether another try with the same driver would end the same."""
    return bool(verdict["ok"]) or verdict.get("verdict") in _LASTING


def check_pair_verdict(verdict: Verdict) -> None:
    """Holds what was read against what is taken out of a pair's verdict.

    :raises ValueError, KeyError, TypeError, AttributeError: it is none.
    """
    if not isinstance(verdict["ok"], bool):
        raise TypeError(f"ok is {verdict['ok']!r}")

    if not verdict["ok"]:
        int(verdict.get("code", 0))
        if verdict.get("verdict") not in _LASTING:
            raise ValueError(f"the verdict is {verdict.get('verdict')!r}")

        return

    int(Precision[str(verdict["precision"]).upper()])
    if any(int(verdict[name]) < 0 for name in ("warm_load_us", "warm_first_run_us")):
        raise ValueError("a negative number")


def lowest_allows(lowest: str, pair: Pair) -> bool:
    """Whether a session that wants at least `lowest` may use a ready pair."""
    if not lowest:
        return True

    order = ORDER_OF_PRECISIONS
    return pair.precision not in order or order.index(pair.precision) >= order.index(lowest)
