"""Opens sessions and keeps count of what their users hold."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from switchgear.daemon.config import LimitsSection
from switchgear.daemon.failure import Failure
from switchgear.daemon.instances import Instance
from switchgear.daemon.models import Model, Models
from switchgear.daemon.options import Options
from switchgear.daemon.pool import Pool
from switchgear.daemon.router import Router
from switchgear.daemon.session import Session
from switchgear.daemon.validation import Shapes
from switchgear.daemon.varlink_server import Peer
from switchgear.ipc import arena
from switchgear.ipc.errors import (
    ConnectionLost,
    QuotaExceeded,
    SwitchgearError,
    UnknownModel,
)
from switchgear.ipc.slot import TensorSpec

if TYPE_CHECKING:
    from switchgear.daemon.telemetry.requests import Meter

# Output slots up to this size get as many spare ones as the session has slots, larger ones one.
SPARE_LIMIT_BYTES: Final = 1 << 20
# An arena larger than this is made in a thread: clearing its pages takes about 0.3 ms a MiB.
INLINE_ARENA_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Opened:
    """A session and what its client needs to know. The arena's descriptor is the session's."""

    session: Session
    layout: arena.Layout
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class Sessions:
    """All sessions, with bounds per user on their number and memory."""

    def __init__(
        self, limits: LimitsSection, models: Models, pool: Pool, router: Router
    ) -> None:
        self._limits = limits
        self._models = models
        self._pool = pool
        self._router = router
        self._next = 1
        self._sessions: dict[int, Session] = {}
        self._count: Counter[int] = Counter()
        self._arena_bytes: Counter[int] = Counter()
        self.opened = 0
        self.answered = 0
        # Gives each session its meter, where somebody counts.
        self.meter: Callable[[Model], Meter] | None = None

    def all(self) -> list[Session]:
        return list(self._sessions.values())

    @property
    def in_flight(self) -> int:
        return sum(session.in_flight for session in self._sessions.values())

    async def open(
        self,
        peer: Peer,
        model: Model,
        options: Options,
        shapes: Shapes,
        output_capacity_bytes: int | None,
    ) -> Opened:
        """Opens a session without a socket; waits for the arena's memory, and without the CPU
        among its backends until one of them has loaded the model.

        :raises SwitchgearError: a limit, a shape, or no memory.
        """
        if self._count[peer.uid] >= self._limits.sessions_per_user:
            raise QuotaExceeded(f"user {peer.uid} has {self._count[peer.uid]} sessions open")

        self._router.check_ready(model, options.backends, options.precision)
        instance, outputs = self._models.instance_for(model, shapes, output_capacity_bytes)
        self._count[peer.uid] += 1
        model.sessions[peer.uid] += 1
        size = 0
        try:
            output_size = sum(spec.capacity_bytes for spec in outputs)
            spare = options.slots if output_size <= SPARE_LIMIT_BYTES else 1
            if options.hedge and not model.state:
                # A second copy has a slot of its own.
                spare *= 2

            layout = arena.plan(instance.inputs, outputs, options.slots, options.slots + spare)
            self._admit_arena(peer.uid, layout.size_bytes)
            size = layout.size_bytes
            self._arena_bytes[peer.uid] += size
            fd = await self._create_arena(size)
            if model not in self._models.all_for(0):
                # Unloaded by force meanwhile: its descriptor may be another file's by now.
                os.close(fd)
                raise UnknownModel(f"model {model.label} was unloaded")
        except BaseException:
            self._give_back(peer.uid, size, model, instance)
            raise

        session = Session(
            self._next,
            peer,
            instance,
            options,
            fd,
            layout,
            self._router.route,
            self._router.retry_after_ms,
            self._ended,
        )
        self._next += 1
        if self.meter is not None:
            session.meter = self.meter(model)

        self._sessions[session.identity] = session
        self.opened += 1
        loads = self._router.refresh(session)
        if loads and "cpu" not in options.backends:
            # Nothing else can answer meanwhile.
            await self._loaded(session, loads)
            if session.ended:
                raise UnknownModel(f"model {model.label} was unloaded")

        return Opened(session, layout, instance.inputs, outputs)

    def _admit_arena(self, uid: int, size: int) -> None:
        limit = self._limits.arena_mib_per_user << 20
        if self._arena_bytes[uid] + size > limit:
            raise QuotaExceeded(
                f"arenas of user {uid} hold {self._arena_bytes[uid]} bytes, "
                f"this one needs {size} and the limit is {limit}",
                bytes_needed=size,
                bytes_free=limit - self._arena_bytes[uid],
            )

    @staticmethod
    async def _create_arena(size: int) -> int:
        if size <= INLINE_ARENA_BYTES:
            return arena.create("arena", size)

        creation = asyncio.get_running_loop().run_in_executor(None, arena.create, "arena", size)
        try:
            return await asyncio.shield(creation)
        except asyncio.CancelledError:
            creation.add_done_callback(_close_result)
            raise

    async def _loaded(self, session: Session, loads: list[asyncio.Future[Any]]) -> None:
        """Waits for the loads of a session.

        :raises SwitchgearError: all of them failed, with the first one's reason.
        """
        try:
            results = await asyncio.gather(*(asyncio.shield(load) for load in loads))
        except BaseException:
            session.end()
            raise

        failures = [result for result in results if isinstance(result, Failure)]
        if len(failures) == len(results):
            session.end()
            raise failures[0].to_error(f"model {session.model.label}")

    def _ended(self, session: Session) -> None:
        del self._sessions[session.identity]
        self._router.ended(session)
        self.answered += session.answered
        size = session.layout.size_bytes
        self._give_back(session.peer.uid, size, session.model, session.instance)

    def _give_back(self, uid: int, size: int, model: Model, instance: Instance) -> None:
        self._count[uid] -= 1
        self._arena_bytes[uid] -= size
        model.sessions[uid] -= 1
        self._models.release(instance)

    def end_all_of(self, model: Model, uid: int | None, error: type[SwitchgearError]) -> None:
        """Ends a user's sessions with a model; those of all users when `uid` is None."""
        for session in self.all():
            if session.model is model and uid in (None, session.peer.uid):
                session.go_away(error)

    def close(self, error: type[SwitchgearError]) -> None:
        for session in self.all():
            session.go_away(error)


def _close_result(future: asyncio.Future[int]) -> None:
    if not future.cancelled() and future.exception() is None:
        os.close(future.result())


_SO_PEERPIDFD: Final = 77  # include/uapi/asm-generic/socket.h, Linux 6.5


def peer_pidfd(sock: socket.socket, pid: int) -> int:
    """A pidfd of the process at the other end; the caller owns it.

    :raises ConnectionLost: the process is gone.
    :raises OSError: no descriptor is free.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass

    try:
        return os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise ConnectionLost(f"process {pid} is gone: {error.strerror}") from None


def attach_socket(session: Session, control: socket.socket) -> socket.socket:
    """Gives a session its data socket, and the process at the other end of `control` as its
    peer; returns the client's end, which the caller owns.

    :raises OSError: no descriptor is free.
    :raises ConnectionLost: the process is gone.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        pidfd = peer_pidfd(control, session.peer.pid)
    except BaseException:
        ours.close()
        theirs.close()
        raise

    session.attach(ours, pidfd)
    return theirs
