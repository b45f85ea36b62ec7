"""What a lane is made with, and who watches it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from switchgear.daemon.lane import Lane
    from switchgear.daemon.request import Request


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """`options` go to the worker; the limits are seconds and requests, `user_limit` those of
    one user that may wait."""

    options: Mapping[str, Any]
    queue_limit: int
    user_limit: int
    hang_s: float
    start_s: float


class Watcher(Protocol):
    """Who decides where requests go."""

    def changed(self, lane: Lane) -> None:
        """The lane's worker is ready, or has ended."""

    def elsewhere(self, request: Request, lane: Lane) -> Lane | None:
        """Another lane for a request that failed in this one; None where there is none."""

    def answered(self, lane: Lane, request: Request, run_ns: int, now_ns: int) -> None:
        """A run ended well."""

    def failed(self, lane: Lane, request: Request, domain: int, code: int) -> None:
        """A driver gave an error to a run."""

    def died(self, lane: Lane, request: Request, reason: str) -> None:
        """The worker ended with a run in it."""
