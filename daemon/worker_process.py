"""A worker process as the daemon sees it: its socket, what it has loaded, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from switchgear.daemon.child import REAP_LIMIT_S, Child, describe_end
from switchgear.daemon.failure import Failure
from switchgear.daemon.resident_memory import ResidentMemory
from switchgear.daemon.serving_loop import unwatch, watch
from switchgear.daemon.worker_loads import Load, Loads
from switchgear.ipc import worker
from switchgear.ipc.errors import ProtocolError
from switchgear.ipc.record import RECORD_BYTES, ROUTE, ROUTE_OFFSET, Kind, Precision

if TYPE_CHECKING:
    from switchgear.daemon.instances import Instance
    from switchgear.daemon.model import Model
    from switchgear.daemon.request import Request
    from switchgear.daemon.session import Session

_REPLY: Final = int(Kind.REPLY)
# A worker knows an instance, and a session's arena, by number and precision.
PRECISION_BITS: Final = 3
PRECISIONS: Final = tuple(int(precision) for precision in Precision)

log = logging.getLogger(__name__)


def in_precision(identity: int, precision: int) -> int:
    """The number by which a worker knows an instance or a session in one precision."""
    return identity << PRECISION_BITS | precision


@dataclass(slots=True)
class Events:
    """What the owner of a worker wants to hear. `on_end` comes once, after it is reaped."""

    on_ready: Callable[[WorkerProcess], None]
    on_reply: Callable[[WorkerProcess, bytearray], None]
    on_end: Callable[[WorkerProcess], None]


class WorkerProcess:
    """Spawned at construction, which may raise OSError. `state` is starting, ready, ending or
    ended."""

    def __init__(
        self, backend: str, options: Mapping[str, Any], label: str, events: Events
    ) -> None:
        self.backend = backend
        self.label = label
        self.state = "starting"
        self.engine = ""
        self.engine_version = ""
        self.absent: Failure | None = None
        self.end_reason = ""
        self.killed_by_us = False
        self.abandoned = False
        self._events = events
        self._on_reply = events.on_reply
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(worker.MAX_PACKET_BYTES)
        self._loads = Loads()
        # Instance by binding.
        self._bound: dict[int, int] = {}
        self._probe: asyncio.Future[worker.Packet] | None = None
        self._checks: dict[int, asyncio.Future[worker.Packet]] = {}
        # Set once it has said hello, or will not.
        self.spoken = asyncio.Event()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._sock, theirs = worker.pair()
        with theirs:
            self._sock.setblocking(False)
            try:
                self._child = Child(
                    "switchgear.backends.worker",
                    [
                        f"--fd={theirs.fileno()}",
                        f"--backend={backend}",
                        f"--options={json.dumps(dict(options))}",
                    ],
                    [theirs.fileno()],
                    self._exited,
                    on_stderr_line=self._stderr_line,
                )
            except OSError:
                self._sock.close()
                raise

        self.pid = self._child.pid
        self._memory = ResidentMemory(self.pid)
        self._fd = self._sock.fileno()
        watch(self._loop, self._fd, self._readable)

    def _stderr_line(self, line: str) -> None:
        if line.strip():
            source = {"source": self.label}
            log.info("worker %s (%d): %s", self.label, self.pid, line, extra=source)

    # Packets to the worker.

    def load(self, instance: Instance, precision: int = 0) -> Load:
        """Asks for an instance in one precision once (0: the model's own); the future tells how
        it went. Does not block."""
        identity = in_precision(instance.identity, precision)
        load = self._loads.get(identity)
        if load is None:
            load = self._loads.begin(identity, instance.model)
            self._send_load(instance, precision)

        return load

    def _send_load(self, instance: Instance, precision: int) -> None:
        packet: worker.Packet = {
            "op": "load",
            "instance": in_precision(instance.identity, precision),
            "shapes": {name: list(shape) for name, shape in instance.shapes.items()},
            "warm": not instance.stateful,
        }
        if precision:
            packet["precision"] = Precision(precision).name.lower()
            packet["cache"] = instance.model.cache
            identity = instance.model.identity_of(self.backend, precision)
            if identity is not None:
                packet["identity"] = dict(identity)

        self._send(packet, [instance.model.fd])

    def renew(
        self, instance: Instance, precision: int, sessions: Iterable[Session]
    ) -> Load | None:
        """Loads once more what was prepared anew, and gives it the arenas of these sessions;
        what it has loaded serves until then, and goes on where that fails. None where it has
        not been asked for the instance before. Does not block.
        """
        identity = in_precision(instance.identity, precision)
        if self.state in ("ending", "ended"):
            return None

        load = self._loads.begin_renewal(identity, instance.model)
        if load is None:
            return None

        self._send_load(instance, precision)
        for session in sessions:
            if in_precision(session.identity, precision) in self._bound:
                self._send_bind(session, precision)

        return load

    def has_loaded(self, instance: Instance, precision: int = 0) -> bool:
        """Whether a frame of this instance would run at once."""
        identity = in_precision(instance.identity, precision)
        return self.state == "ready" and self._loads.is_loaded(identity)

    def load_failure(self, instance: Instance, precision: int = 0) -> Failure | None:
        return self._loads.failure(in_precision(instance.identity, precision))

    @property
    def loading(self) -> tuple[Model, int] | None:
        """The model that it loads, or was loading when it ended, and the monotonic ns at which
        it was asked to or was done with the one before."""
        return self._loads.present

    def forget_failure(self, instance: Instance, precision: int) -> None:
        """An instance that it could not load is asked for again at the next need."""
        if self.load_failure(instance, precision) is not None:
            identity = in_precision(instance.identity, precision)
            self._loads.forget(identity)
            self._forget_bindings(identity)

    def _forget_bindings(self, instance: int) -> None:
        for binding in [b for b, of in self._bound.items() if of == instance]:
            del self._bound[binding]

    def unload(self, identity: int, precisions: Iterable[int] = PRECISIONS) -> None:
        """Frees an instance in whatever of these precisions it is loaded."""
        for number in precisions:
            instance = in_precision(identity, number)
            if self._loads.forget(instance) is not None:
                self._send({"op": "unload", "instance": instance})

    def bind(self, session: Session, precision: int = 0) -> Load:
        """Loads what a session needs and maps its arena there, unless that is done; the future
        is that of the load."""
        identity = in_precision(session.identity, precision)
        load = self.load(session.instance, precision)
        if identity not in self._bound:
            self._bound[identity] = in_precision(session.instance.identity, precision)
            self._send_bind(session, precision)

        return load

    def _send_bind(self, session: Session, precision: int) -> None:
        packet = {
            "op": "bind",
            "binding": in_precision(session.identity, precision),
            "instance": in_precision(session.instance.identity, precision),
            "layout": session.layout_json,
        }
        self._send(packet, [session.arena_fd])

    def unbind(self, identity: int, precisions: Iterable[int] = PRECISIONS) -> None:
        """Forgets a session's arena, in whatever of these precisions it is bound."""
        for number in precisions:
            binding = in_precision(identity, number)
            if binding in self._bound:
                del self._bound[binding]
                self._send({"op": "unbind", "binding": binding})

    def run(self, request: Request) -> None:
        """Sends a request's record. Does not block."""
        session = request.session
        binding = session.identity << PRECISION_BITS | request.precision
        if binding not in self._bound:
            self.bind(session, request.precision)

        record = request.record
        ROUTE.pack_into(record, ROUTE_OFFSET, binding, request.deadline_ns)
        try:
            self._sock.send(record)
        except (BrokenPipeError, ConnectionResetError):
            # It has ended, of whatever: the pidfd will say so, and the lane finds a way on.
            return
        except OSError as error:
            self.kill(f"it takes no records: {error}")

    async def probe(self) -> worker.Packet:
        """The backend's known-answer run; none of the packet's fields is trusted."""
        if self._probe is None or self._probe.done():
            self._probe = self._loop.create_future()
            self._send({"op": "probe"})

        return await asyncio.shield(self._probe)

    async def check(self, instance: Instance, precision: int) -> worker.Packet:
        """The run of a loaded instance's golden input, like `probe`."""
        identity = in_precision(instance.identity, precision)
        future = self._checks.get(identity)
        if future is None:
            future = self._checks[identity] = self._loop.create_future()
            self._send({"op": "check", "instance": identity})

        return await asyncio.shield(future)

    def _send(self, packet: worker.Packet, fds: list[int] | None = None) -> None:
        if self.state in ("ending", "ended"):
            return

        try:
            worker.send(self._sock, packet, fds or [])
        except (BrokenPipeError, ConnectionResetError):
            return
        except OSError as error:
            # A full socket: it has not read for a long time.
            self.kill(f"it takes no packets: {error}")

    # Packets from the worker.

    def _readable(self) -> None:
        buffer = self._buffer
        try:
            size = self._sock.recv_into(buffer)
        except BlockingIOError:
            return
        except OSError:
            size = 0

        # First what every reply is, without a call: see `_take`.
        if size == RECORD_BYTES and buffer[0] == _REPLY:
            self._on_reply(self, buffer[:RECORD_BYTES])
        elif not self._take(size):
            unwatch(self._loop, self._fd)

    def _receive(self) -> bool:
        """Handles one packet; False at the end of the socket.

        :raises BlockingIOError: there is none now.
        """
        try:
            size = self._sock.recv_into(self._buffer)
        except BlockingIOError:
            raise
        except OSError:
            return False

        return self._take(size)

    def _take(self, size: int) -> bool:
        """Handles the packet in the buffer; False when there is none: the end of the socket."""
        if size == 0:
            return False

        buffer = self._buffer
        if size == RECORD_BYTES and buffer[0] == _REPLY:
            self._on_reply(self, buffer[:RECORD_BYTES])
            return True

        try:
            self._handle(worker.decode(memoryview(buffer)[:size]))
        except (ProtocolError, KeyError, ValueError, TypeError) as error:
            self.kill(f"it broke the worker protocol: {error!r}")

        return True

    def _handle(self, packet: worker.Packet) -> None:
        operation = packet["op"]
        if operation == "hello":
            if packet["protocol"] != worker.WORKER_PROTOCOL:
                raise ProtocolError(f"protocol {packet['protocol']}")

            self.engine = str(packet["engine"])
            self.engine_version = str(packet["engine_version"])
            self.state = "ready"
            self.spoken.set()
            self._events.on_ready(self)
        elif operation == "absent":
            self.absent = Failure.from_packet(packet)
        elif operation in ("loaded", "failed"):
            self._took(int(packet["instance"]), packet, failed=operation == "failed")
        elif operation == "unbound":
            log.warning("worker %s: %s", self.label, Failure.from_packet(packet))
        elif operation == "probed" and self._probe is not None and not self._probe.done():
            self._probe.set_result(packet)
        elif operation == "checked":
            check = self._checks.pop(int(packet["instance"]), None)
            if check is not None and not check.done():
                check.set_result(packet)
        else:
            raise ProtocolError(f"operation {operation!r}")

    def _took(self, identity: int, packet: worker.Packet, *, failed: bool) -> None:
        """It has loaded an instance, or could not."""
        result = Failure.from_packet(packet) if failed else packet
        if not self._loads.took(identity, result):
            # It has refused the arenas too.
            self._forget_bindings(identity)

    # Its end.

    def kill(self, reason: str) -> None:
        """Ends it now; `on_end` follows once it is reaped."""
        if self.state in ("ending", "ended"):
            return

        self.end_reason = reason
        self.killed_by_us = True
        self.state = "ending"
        self._child.kill()
        self._loop.call_later(REAP_LIMIT_S, self._abandon)

    def _abandon(self) -> None:
        if self.state == "ending":
            log.error("worker %s (%d) does not end: left behind", self.label, self.pid)
            self.abandoned = True
            self._child.abandon()
            self._finish()

    def close(self) -> None:
        """Asks it to end: it exits when its socket closes."""
        if self.state in ("starting", "ready"):
            self.end_reason = "asked to"
            self.killed_by_us = True
            self.state = "ending"
            unwatch(self._loop, self._fd)
            with contextlib.suppress(OSError):
                self._sock.close()

    def force(self) -> None:
        """SIGKILL for one that was asked to end and did not."""
        self._child.kill()

    def _exited(self, returncode: int) -> None:
        if self.state == "ended":
            return

        if not self.end_reason:
            self.end_reason = describe_end(returncode)
            last = self._child.stderr.rpartition("\n")[2]
            if self.absent is None and returncode > 0 and last:
                self.end_reason += f": {last[:300]}"

        # What it answered before it ended counts.
        if self._sock.fileno() >= 0:
            # Not its end: a process that it started may still hold the other side.
            with contextlib.suppress(BlockingIOError):
                while self._receive():
                    pass

        self._finish()

    def _finish(self) -> None:
        self.state = "ended"
        self._memory.close()
        if self._sock.fileno() >= 0:
            unwatch(self._loop, self._fd)
            self._sock.close()

        gone = Failure("switchgear", 401, "WorkerDied", self.end_reason)
        self._loads.end(gone)
        if self._probe is not None and not self._probe.done():
            self._probe.set_result({"ok": False, "text": self.end_reason})

        for check in self._checks.values():
            if not check.done():
                check.set_result({"ok": False, "text": self.end_reason})

        self.spoken.set()
        self.ended.set_result(None)
        self._events.on_end(self)

    @property
    def rss_mb(self) -> float:
        """Its resident memory in MiB; 0 when it is gone."""
        return self._memory.mib()

    @property
    def killed_by_signal_9_from_outside(self) -> bool:
        return not self.killed_by_us and self.end_reason.startswith("signal:9 ")
