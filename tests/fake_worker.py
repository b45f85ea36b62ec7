"""A worker without a process, for tests of what stands above it: lanes and sessions."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from switchgear.daemon.lane import Lane
from switchgear.daemon.lane_settings import LaneSettings
from switchgear.daemon.options import Options
from switchgear.daemon.session import Session
from switchgear.ipc import arena
from switchgear.ipc.record import Kind, Priority, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from switchgear.daemon.request import Request
    from switchgear.daemon.worker_process import Events


class FakeWorker:
    """Takes records and answers when told. It may still write to the slots of `writing`."""

    pid = 1
    engine = "fake"
    engine_version = "0"
    absent = None
    loading = None

    def __init__(
        self, backend: str, options: Mapping[str, Any], label: str, events: Events
    ) -> None:
        self.state = "starting"
        self.end_reason = ""
        self.abandoned = False
        self.killed_by_signal_9_from_outside = False
        self._events = events
        self._records: list[tuple[Session, Record]] = []

    @property
    def busy(self) -> bool:
        return bool(self._records)

    @property
    def writing(self) -> set[tuple[int, int]]:
        """Session and output slot of all that it was given and has not answered."""
        return {(session.identity, record.output_slot) for session, record in self._records}

    # What a lane calls.

    def run(self, request: Request) -> None:
        record = Record.unpack(bytes(request.record))
        assert record.output_slot == request.output_slot
        assert record.input_slot == request.input_slot
        self._records.append((request.session, record))

    def bind(self, session: Session) -> None:
        pass

    def unbind(self, identity: int) -> None:
        pass

    def close(self) -> None:
        self.state = "ending"

    def kill(self, reason: str) -> None:
        raise AssertionError(f"the lane kills its worker: {reason}")

    # What a test calls.

    def become_ready(self) -> None:
        self.state = "ready"
        self._events.on_ready(self)  # type: ignore[arg-type]

    def answer(self, *, failed: bool = False) -> None:
        """The reply to the oldest record."""
        _, record = self._records.pop(0)
        record.kind = Kind.REPLY
        record.backend = 1
        record.run_ns = 1000
        record.status_domain = 4 if failed else 0
        record.status_code = 1 if failed else 0
        self._events.on_reply(self, bytearray(record.pack()))  # type: ignore[arg-type]

    def die(self, *, abandoned: bool = False, by_user: bool = False) -> None:
        """Its end. One that is abandoned hangs in the kernel and goes on writing."""
        self.state = "ended"
        self.end_reason = "signal:9 SIGKILL" if by_user else "signal:11 SIGSEGV"
        self.killed_by_signal_9_from_outside = by_user
        self.abandoned = abandoned
        if not abandoned:
            self._records.clear()

        self._events.on_end(self)  # type: ignore[arg-type]


def fake_model(*, state: bool = False) -> Any:
    return SimpleNamespace(
        state=state,
        quarantined=set(),
        deaths=Counter(),
        slowest_run_ns=0,
        label="fake",
        threads=1,
    )


def new_lane(queue_limit: int = 4) -> Lane:
    settings = LaneSettings({}, queue_limit, queue_limit, hang_s=1000.0, start_s=1000.0)
    return Lane("cpu", "interactive", "0", settings)


def new_session(
    identity: int,
    lane: Lane,
    model: Any,
    deliver: Callable[[bytes | bytearray], None],
    *,
    slots: int = 2,
    spare: int = 2,
    on_busy: str = "wait",
    route: Callable[[Session, Request], Lane | None] | None = None,
) -> Session:
    """A session without a socket and an arena; without a `route` all goes to `lane`."""
    session = Session(
        identity,
        SimpleNamespace(pid=1, uid=0, gid=0),  # type: ignore[arg-type]
        SimpleNamespace(model=model),  # type: ignore[arg-type]
        Options(slots, on_busy, Priority.NORMAL, ("cpu",), strict=False),
        -1,
        arena.plan((), (), slots, slots + spare),
        route or (lambda _session, _request: lane),
        lambda _session: 0,
        lambda _session: None,
    )
    session.deliver = deliver
    lane.sessions.add(session)
    session.lanes.add(lane)
    return session
