"""A worker: the process that owns one backend for one isolation group and lane.

Its one thread takes packets in order: control objects (load, bind, ...) and records to run. Any
surprise ends the process; the daemon answers what was in it from elsewhere.
"""

from __future__ import annotations

import argparse
import errno
import json
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final

from switchgear.backends.contract import CONTRACT_VERSION, Backend, Instance, LoadRequest
from switchgear.backends.registry import open_backend
from switchgear.backends.trial import first_run
from switchgear.ipc import arena, worker
from switchgear.ipc.errors import (
    DOMAINS,
    BadSlot,
    DeadlineExceeded,
    DriverError,
    NotPrepared,
    ProtocolError,
    SwitchgearError,
)
from switchgear.ipc.process import WORKER_SCORE, begin_child
from switchgear.ipc.record import (
    RECORD_BYTES,
    RUN_NS,
    RUN_OFFSET,
    RUN_REQUEST,
    STATUS,
    STATUS_OFFSET,
    Flag,
    Kind,
    Precision,
)
from switchgear.ipc.record import Backend as BackendNumber
from switchgear.ipc.slot import (
    HEADER_ID,
    HEADER_ID_OFFSET,
    SlotEntry,
    TensorPlace,
    pack_error,
    pack_header,
)
from switchgear.ipc.worker import Packet

_OURS: Final = DOMAINS["switchgear"]
# Plain numbers: comparing enumerations costs more than the rest of a record's handling.
_INFER: Final = int(Kind.INFER)
_REPLY: Final = int(Kind.REPLY)
_RESET: Final = int(Flag.RESET)


def failure(error: DriverError | SwitchgearError) -> Packet:
    """An error's parts for a control reply."""
    if isinstance(error, DriverError):
        return {
            "domain": error.domain,
            "code": error.code,
            "name": error.name,
            "text": error.text[: worker.MAX_TEXT_CHARACTERS],
        }

    return {
        "domain": "switchgear",
        "code": error.code,
        "name": error.name,
        "text": error.text[: worker.MAX_TEXT_CHARACTERS],
    }


def _system_error(error: OSError) -> DriverError:
    number = error.errno or errno.EIO
    name = errno.errorcode.get(number, "EIO")
    return DriverError("errno", number, name, error.strerror or str(error))


def _descriptor(fds: list[int]) -> int:
    """The one descriptor of a packet.

    :raises DriverError: it did not arrive: this process has as many as it may have.
    """
    if not fds:
        raise DriverError("errno", errno.EMFILE, "EMFILE", "the descriptor did not arrive")

    return fds[0]


class Binding:
    """A session's arena as this worker sees it: its mapping and the handles of each slot."""

    def __init__(self, instance: Instance, layout: arena.Layout, fd: int) -> None:
        self.instance = instance
        self.precision = int(Precision[instance.precision.upper()])
        self.memory: mmap.mmap = arena.map_arena(fd, layout.size_bytes)
        view = memoryview(self.memory)

        def part(place: TensorPlace) -> memoryview:
            return view[place.offset : place.offset + place.length]

        self.inputs = [instance.attach_input([part(p) for p in slot]) for slot in layout.inputs]
        self.outputs = [
            instance.attach_output([part(p) for p in slot]) for slot in layout.outputs
        ]
        self.headers = [part(place) for place in layout.headers]
        self.run = instance.run
        # The header that the last run's outputs have, but for the request id.
        self.described: Sequence[SlotEntry] = ()
        self.header = b""
        self.header_bytes = 0

    def describe(self, entries: Sequence[SlotEntry]) -> None:
        """Prepares the header for outputs like these; most models give the same every time."""
        self.described = entries
        self.header = pack_header(0, entries)
        self.header_bytes = len(self.header)


class Worker:
    """Serves one socket until its other end closes."""

    def __init__(self, sock: socket.socket, backend: Backend) -> None:
        self._sock = sock
        self._backend = backend
        self._number = int(getattr(BackendNumber, backend.name.upper(), BackendNumber.OTHER))
        self._instances: dict[int, _Owned] = {}
        # Replaced ones that bindings still use.
        self._retired: list[_Owned] = []
        self._bindings: dict[int, Binding] = {}
        self._said = ""
        self._operations = {
            "load": self._load,
            "unload": self._unload,
            "bind": self._bind,
            "unbind": self._unbind,
            "probe": self._probe,
            "check": self._check,
        }

    def serve(self) -> None:
        """Blocks until the daemon closes the socket."""
        buffer = bytearray(worker.MAX_PACKET_BYTES)
        view = memoryview(buffer)
        room = socket.CMSG_SPACE(4 * worker.MAX_PACKET_DESCRIPTORS)
        receive = self._sock.recvmsg_into
        infer = self._infer
        buffers = [buffer]
        record = view[:RECORD_BYTES]
        while True:
            size, ancillary, _, _ = receive(buffers, room, socket.MSG_CMSG_CLOEXEC)
            if size == RECORD_BYTES and buffer[0] == _INFER:
                infer(record)
                continue

            if size == 0:
                return

            fds = worker.descriptors(ancillary)
            try:
                packet = worker.decode(view[:size])
                operation = self._operations.get(str(packet.get("op")))
                if operation is None:
                    raise ProtocolError(f"no operation {packet.get('op')!r}")

                reply = operation(packet, fds)
            finally:
                worker.close_all(fds)

            if reply is not None:
                worker.send(self._sock, reply)

    def _infer(self, record: memoryview) -> None:
        """Runs one record and sends it back as the reply."""
        flags, request_id, source, target, binding_id, deadline_ns = RUN_REQUEST.unpack_from(
            record
        )
        start_ns = end_ns = monotonic_ns()
        domain = code = precision = 0
        try:
            binding = self._bindings.get(binding_id)
            if binding is None:
                raise BadSlot(f"no binding {binding_id}")

            precision = binding.precision
            if deadline_ns and start_ns > deadline_ns:
                raise DeadlineExceeded

            if flags & _RESET:
                binding.instance.reset()
                start_ns = monotonic_ns()

            entries = binding.run(binding.inputs[source], binding.outputs[target])
            end_ns = monotonic_ns()
            if entries is not binding.described:
                binding.describe(entries)

            header = binding.headers[target]
            header[: binding.header_bytes] = binding.header
            HEADER_ID.pack_into(header, HEADER_ID_OFFSET, request_id)
        except (DriverError, SwitchgearError) as error:
            end_ns = monotonic_ns()
            domain = DOMAINS[error.domain] if isinstance(error, DriverError) else _OURS
            code = error.code
            self._write_error(binding_id, target, error)

        record[0] = _REPLY
        STATUS.pack_into(record, STATUS_OFFSET, domain, self._number, precision, code)
        RUN_NS.pack_into(record, RUN_OFFSET, end_ns - start_ns)
        self._sock.send(record)

    def _write_error(self, binding_id: int, slot: int, error: Exception) -> None:
        text = str(error)
        if text != self._said:
            # Once: a client may send frames that fail as fast as it can.
            self._said = text
            print(text, file=sys.stderr, flush=True)  # noqa: T201

        binding = self._bindings.get(binding_id)
        if binding is not None:
            header = binding.headers[slot]
            data = pack_error(text, len(header))
            header[: len(data)] = data

    def _load(self, packet: Packet, fds: list[int]) -> Packet:
        identity = int(packet["instance"])
        shapes = {str(n): tuple(s) for n, s in packet.get("shapes", {}).items()}
        begin_ns = monotonic_ns()
        try:
            request = LoadRequest(
                f"/proc/self/fd/{_descriptor(fds)}",
                str(packet.get("precision", "auto")),
                shapes,
                cache=str(packet.get("cache", "")),
            )
            self._check_identity(packet.get("identity"))
            # The interpreter maps the file; a reset opens it again: keep the descriptor.
            instance = self._backend.load(request)
            loaded_ns = monotonic_ns()
            if packet.get("warm"):
                # So that the first frame does not pay for what the engine puts off until then.
                first_run(instance)
        except (DriverError, SwitchgearError) as error:
            return {"op": "failed", "instance": identity, **failure(error)}
        except OSError as error:
            return {"op": "failed", "instance": identity, **failure(_system_error(error))}

        if (before := self._instances.get(identity)) is not None:
            self._retired.append(before)
            self._close_retired()

        # From here on the instance owns the descriptor.
        self._instances[identity] = _Owned(instance, fds.pop(0), request.cache)
        return {
            "op": "loaded",
            "instance": identity,
            "precision": instance.precision,
            "artefact": str(getattr(instance, "artefact_id", "")),
            "load_us": (loaded_ns - begin_ns) // 1000,
            "first_run_us": (monotonic_ns() - loaded_ns) // 1000,
        }

    def _check_identity(self, expected: Mapping[str, str] | None) -> None:
        """What was prepared and checked with another driver is not loaded with this one.

        :raises NotPrepared: it is another.
        """
        if expected is None:
            return

        here = self._backend.identity()
        for name in ("driver", *sorted({*expected, *here})):
            if (before := expected.get(name)) != (now := here.get(name)):
                raise NotPrepared(f"prepared with {name} {before!r}; this worker has {now!r}")

    def _unload(self, packet: Packet, _fds: list[int]) -> None:
        instance = self._instances.pop(int(packet["instance"]), None)
        if instance is not None:
            instance.close()

    def _close_retired(self) -> None:
        """Frees replaced instances that no arena is bound to any more."""
        bound = {id(binding.instance) for binding in self._bindings.values()}
        for instance in [each for each in self._retired if id(each) not in bound]:
            self._retired.remove(instance)
            instance.close()

    def _bind(self, packet: Packet, fds: list[int]) -> Packet | None:
        identity = int(packet["binding"])
        instance = self._instances.get(int(packet["instance"]))
        try:
            if instance is None:
                raise BadSlot(f"no instance {packet['instance']}")

            layout = worker.layout_from_json(packet["layout"])
            self._bindings[identity] = Binding(instance, layout, _descriptor(fds))
        except (DriverError, SwitchgearError) as error:
            return {"op": "unbound", "binding": identity, **failure(error)}
        except OSError as error:
            return {"op": "unbound", "binding": identity, **failure(_system_error(error))}
        except ValueError as error:
            cause = BadSlot(f"the layout does not fit the model: {error}")
            return {"op": "unbound", "binding": identity, **failure(cause)}

        if self._retired:
            self._close_retired()

        return None

    def _unbind(self, packet: Packet, _fds: list[int]) -> None:
        # The mapping goes with its last view, here.
        self._bindings.pop(int(packet["binding"]), None)
        if self._retired:
            self._close_retired()

    def _probe(self, _packet: Packet, _fds: list[int]) -> Packet:
        begin_ns = monotonic_ns()
        try:
            text = self._backend.probe()
            identity = self._backend.identity()
        except DriverError as error:
            return {"op": "probed", "ok": False, **failure(error)}

        return {
            "op": "probed",
            "ok": True,
            "text": text,
            "took_us": (monotonic_ns() - begin_ns) // 1000,
            "identity": dict(identity),
        }

    def _check(self, packet: Packet, _fds: list[int]) -> Packet:
        """Runs an instance's golden input."""
        identity = int(packet["instance"])
        answer: Packet = {"op": "checked", "instance": identity, "ok": False}
        instance = self._instances.get(identity)
        try:
            if instance is None:
                raise BadSlot(f"no instance {identity}")

            if not instance.cache:
                # The engine of the reference itself: that it runs is all there is to know.
                first_run(instance)
                return {**answer, "ok": True, "text": "it runs"}

            # numpy and the check are of no use to a worker before.
            from switchgear.backends.known_answer.golden import check_golden

            return {
                **answer,
                **check_golden(instance, Path(instance.cache), self._backend.name),
            }
        except (DriverError, SwitchgearError) as error:
            return {**answer, **failure(error)}


class _Owned:
    """An instance with the descriptor of its model and its folder of prepared files."""

    def __init__(self, instance: Instance, fd: int, cache: str) -> None:
        self._instance = instance
        self._fd = fd
        self.cache = cache
        self.info = instance.info
        self.precision = instance.precision
        self.coverage = instance.coverage
        self.attach_input = instance.attach_input
        self.attach_output = instance.attach_output
        self.run = instance.run
        self.reset = instance.reset

    def close(self) -> None:
        self._instance.close()
        os.close(self._fd)


def apply_priority(options: Mapping[str, Any]) -> None:
    """Niceness and processors as configured; a refusal is said and serving goes on."""
    steps: dict[str, Callable[[Any], None]] = {
        "affinity": lambda value: os.sched_setaffinity(0, value),
        "niceness": lambda value: os.setpriority(os.PRIO_PROCESS, 0, value),
    }
    for name, apply in steps.items():
        value = options.get(name)
        try:
            if value:
                apply(value)
        except OSError as error:
            text = f"{name} {value} not applied: {error.strerror}"
            print(text, file=sys.stderr, flush=True)  # noqa: T201


def main() -> int:
    parser = argparse.ArgumentParser(prog="switchgear-worker")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--options", type=json.loads, default={})
    arguments = parser.parse_args()
    begin_child(arguments.parent, WORKER_SCORE)
    # The daemon decides when a worker ends; a terminal's Ctrl-C goes to the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    apply_priority(arguments.options)
    sock = socket.socket(fileno=arguments.fd)
    try:
        return run(sock, arguments.backend, arguments.options)
    except (BrokenPipeError, ConnectionResetError):
        # The daemon has closed its end: it wants no answer any more.
        return 0


def run(sock: socket.socket, name: str, options: Mapping[str, Any]) -> int:
    """Opens the backend, says so and serves; the exit status.

    :raises BrokenPipeError: the daemon closed the socket meanwhile.
    """
    try:
        backend = open_backend(name, options)
    except (DriverError, SwitchgearError) as error:
        worker.send(sock, {"op": "absent", **failure(error)})
        return 1

    worker.send(
        sock,
        {
            "op": "hello",
            "protocol": worker.WORKER_PROTOCOL,
            "contract": CONTRACT_VERSION,
            "backend": backend.name,
            "engine": backend.engine,
            "engine_version": backend.engine_version,
            "pid": os.getpid(),
        },
    )
    Worker(sock, backend).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
