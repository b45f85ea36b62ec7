"""The switchboard and sessions with sockets, without sensors and workers: what a test tells the
protocol comes out of the sessions' sockets."""

from __future__ import annotations

import asyncio
import os
import socket
from time import monotonic
from types import SimpleNamespace
from typing import Any, Final

from fake_worker import fake_model, new_lane

from switchgear.daemon.config import Configuration
from switchgear.daemon.options import Options
from switchgear.daemon.protocol.machine import Protocol
from switchgear.daemon.protocol.reading import NO_SENSOR, Reading
from switchgear.daemon.protocol.topology import PairKey, SessionLimits
from switchgear.daemon.router import Target
from switchgear.daemon.session import Session
from switchgear.daemon.session_events import SessionEvents
from switchgear.daemon.switchboard.board import Switchboard
from switchgear.daemon.switchboard.topology import Heat, Part, topology_of
from switchgear.daemon.thermal.watch import DeviceSensors
from switchgear.ipc import arena
from switchgear.ipc.event import EventRecord
from switchgear.ipc.record import Kind, Precision, Priority, Record

TRIP_C: Final = 65.0
PARTS: Final = {
    "cpu": Part("cpu", "cpu"),
    "vulkan": Part("gpu", "gpu"),
    "opencl": Part("gpu", "gpu"),
    "npu": Part("npu", "npu"),
}
SLOW_MS: Final = 500.0


class Client:
    """The other end of a session's socket."""

    def __init__(self, session: Session, sock: socket.socket) -> None:
        self.session = session
        self.sock = sock
        sock.setblocking(False)

    def records(self, limit: int = 1000) -> list[bytes]:
        """What lies in the socket, at most `limit` records."""
        found: list[bytes] = []
        while len(found) < limit:
            try:
                data = self.sock.recv(256)
            except BlockingIOError:
                break

            if not data:
                break

            found.append(data)

        return found

    def events(self) -> list[EventRecord]:
        """The events in the socket; there has to be nothing else."""
        return [EventRecord.unpack(data) for data in self.records()]

    def send(self, request_id: int, slot: int = 0) -> None:
        record = Record(Kind.INFER, request_id, epoch=1, input_slot=slot, output_slot=slot)
        self.session.receive(bytearray(record.pack()))


class World:
    """Make it on a running loop; use it in `with`, which ends the sessions."""

    def __init__(self) -> None:
        self.readings: dict[str, Reading] = {}
        sensors = DeviceSensors((), 58_000)
        heats = {
            part.name: Heat(sensors, round(TRIP_C * 1000), 58_000, 80_000, "operator")
            for part in PARTS.values()
        }
        self.protocol = Protocol(None, topology_of(PARTS, heats), seed=1)
        watch: Any = SimpleNamespace(
            reading=lambda device, _now_s=0.0: self.readings.get(device, NO_SENSOR)
        )
        router: Any = SimpleNamespace(board=None)
        self.router = router
        self.events = SessionEvents(router)
        self.board = Switchboard(
            Configuration(), self.protocol, PARTS, heats, watch, self.events.heard
        )
        self.router.board = self.board
        self.clients: list[Client] = []
        self._lane = new_lane(64)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients:
            client.session.end()
            client.sock.close()

    def open(
        self,
        *backends: str,
        model: str = "m",
        events: bool = True,
        slots: int = 2,
        buffer_bytes: int = 0,
        priority: Priority = Priority.NORMAL,
        refuses: bool = False,
        slow_ms: float = 0.0,
    ) -> Client:
        """A session whose model serves on these backends, in fp16, and on the CPU.

        `buffer_bytes`: of its send buffer, as the kernel is asked for it. `refuses`: each of
        its requests is answered at once, with NoBackend.
        """
        names = ("cpu", *backends)
        self._add(model, names)
        described = fake_model()
        described.digest = model
        session = Session(
            len(self.clients) + 1,
            SimpleNamespace(pid=os.getpid(), uid=0, gid=0),  # type: ignore[arg-type]
            SimpleNamespace(model=described),  # type: ignore[arg-type]
            Options(
                *(slots, "wait", priority, names),
                strict=False,
                slow_ms=slow_ms,
                events=events,
            ),
            -1,
            arena.plan((), (), slots, 2 * slots),
            lambda _session, _request: None if refuses else self._lane,
            lambda _session: 0,
            lambda _session: None,
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if buffer_bytes:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)

        session.attach(ours, os.pidfd_open(os.getpid()))
        session.targets = tuple(self._target(name) for name in names)
        session.seat = self.board.seat(session)
        client = Client(session, theirs)
        self.clients.append(client)
        if events:
            self.events.subscribe(session)

        return client

    def _add(self, model: str, backends: tuple[str, ...]) -> None:
        added: Any = SimpleNamespace(digest=model, run_us=1000, pairs={})
        self.board.add_model(added)
        for backend in backends[1:]:
            pair: Any = SimpleNamespace(
                backend=backend, precision="fp16", figures={"run_us": 1000}, fresh=False
            )
            self.board.add_pair(added, pair)

    def _target(self, backend: str) -> Target:
        if backend == "cpu":
            return Target("cpu", 0, self._lane, None)

        pair: Any = SimpleNamespace(precision="fp16", number=int(Precision.FP16))
        return Target(backend, int(Precision.FP16), self._lane, pair)

    # What happens.

    def heat(self, device: str, celsius: float | None) -> None:
        """A new reading of a device; None: its sensor is lost."""
        reading = Reading(None, "lost")
        if celsius is not None:
            reading = Reading(round(celsius * 1000), age_ms=7.0)

        self.readings[device] = reading
        self.board.heard(device, reading, monotonic())
        self.events.measured(device, reading)
        self.board.tell()

    def trip(self, backend: str, model: str = "m") -> None:
        """Three slow frames on a device that is above its trip."""
        self.heat(PARTS[backend].name, TRIP_C + 3)
        self.frames(backend, SLOW_MS, model)

    def frames(
        self,
        backend: str,
        run_ms: float,
        model: str = "m",
        limits: SessionLimits | None = None,
    ) -> None:
        """Three frames of a model, or of the session that has these limits."""
        for _ in range(3):
            key = PairKey(model, backend, "fp16")
            self.protocol.frame(key, run_ms, monotonic(), session_limits=limits)

        self.board.tell()

    def word(self, backend: str, word: Any) -> None:
        """The operator's word on a backend: a state that a test sets and takes back."""
        from switchgear.daemon.protocol.topology import Target as Place

        self.protocol.operator(Place("backend", backend), word, monotonic())
        self.board.tell()


async def turns(count: int = 3) -> None:
    """Lets what was scheduled run."""
    for _ in range(count):
        await asyncio.sleep(0)
