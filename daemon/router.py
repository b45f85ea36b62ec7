"""Chooses where a request runs.

Today among the backends that are ready for the session, in a fixed order; scores, policies and
the protocol's state come in here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from switchgear.ipc.errors import NoBackend, UnknownBackend
from switchgear.ipc.record import Reason

if TYPE_CHECKING:
    from collections.abc import Collection

    from switchgear.daemon.lane import Lane
    from switchgear.daemon.pool import Pool
    from switchgear.daemon.request import Request
    from switchgear.daemon.session import Session

_PINNED: Final = int(Reason.PINNED)
_REQUESTED: Final = int(Reason.REQUESTED)
_ONLY_READY: Final = int(Reason.ONLY_READY)
# The order of preference among what is ready.
ORDER: Final = ("npu", "vulkan", "opencl", "cpu")


class Router:
    """`installed` are the backends whose workers can be started here."""

    def __init__(self, pool: Pool, installed: Collection[str]) -> None:
        self._pool = pool
        self.installed = frozenset(installed)

    def check(self, wanted: tuple[str, ...], *, strict: bool) -> tuple[str, ...]:
        """The backends that a session may use, in order of preference.

        :raises UnknownBackend: one of `wanted` is not installed and the session is strict.
        :raises NoBackend: none of `wanted` is there.
        """
        unknown = [name for name in wanted if name not in self.installed]
        if unknown and (strict or len(unknown) == len(wanted)):
            known = ", ".join(sorted(self.installed))
            raise UnknownBackend(f"no backend {unknown[0][:64]!r} here; there is {known}")

        allowed = wanted or ORDER
        usable = tuple(name for name in allowed if name in self.installed)
        if not usable:
            raise NoBackend("no backend is installed")

        return usable[:1] if strict and wanted else usable

    def route(self, session: Session, request: Request) -> Lane:
        """The lane for a request; sets its reason. Does not block."""
        known = session.routes.get(request.priority)
        if known is None:
            known = session.routes[request.priority] = self._choose(session, request.priority)

        lane, request.reason = known
        return lane

    def _choose(self, session: Session, priority: int) -> tuple[Lane, int]:
        """The lane and the reason; they hold for the session's whole life."""
        backends = session.options.backends
        if session.model.state:
            # Its state lives in one lane, whatever the priority of a single frame.
            pinned = session.options.priority
            return self._pool.lane(session.peer.uid, backends[0], pinned), _PINNED

        one = len(backends) == 1 and len(self.installed) > 1
        reason = _REQUESTED if one else _ONLY_READY
        return self._pool.lane(session.peer.uid, backends[0], priority), reason
