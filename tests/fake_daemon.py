"""A daemon for the client's tests: real sockets, descriptors, records and arenas, no engine.

A "model" is a JSON text that names its tensors (`model_bytes`). It adds one to each element of
each input; a stateful one adds up its frames. Tests make it misbehave: `on_infer` replaces what
happens to a request, and a `FakeSession` answers late, out of order or with other slots.
As a script it serves on the path in its argument until its stdin closes.
"""

from __future__ import annotations

import base64
import gc
import hashlib
import json
import math
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from switchgear.ipc import arena, varlink
from switchgear.ipc.dtypes import DTYPES
from switchgear.ipc.errors import BY_NAME, DOMAINS
from switchgear.ipc.record import (
    NO_READING,
    NO_SLOT,
    Backend,
    Flag,
    Kind,
    Precision,
    Reason,
    Record,
)
from switchgear.ipc.slot import SlotEntry, TensorSpec, pack_error, pack_header
from switchgear.ipc.worker import layout_to_json, spec_from_json, spec_to_json

Json = dict[str, Any]


def tensor(
    name: str,
    dtype: str = "float32",
    shape: tuple[int, ...] = (4,),
    signature: tuple[int, ...] | None = None,
    dynamic: bool = False,
) -> TensorSpec:
    size = DTYPES[dtype].size_bytes * math.prod(shape)
    return TensorSpec(name, dtype, shape, signature or shape, size, dynamic)


def model_bytes(
    *names_or_specs: TensorSpec, state: bool = False, dynamic: bool = False, salt: str = ""
) -> bytes:
    """A model with these inputs (default: "input", float32 [4]) and an output for each."""
    inputs = names_or_specs or (tensor("input"),)
    outputs = [
        tensor(
            "output" if len(inputs) == 1 else f"{spec.name}_plus_one",
            spec.dtype,
            spec.shape,
            spec.signature,
            dynamic,
        )
        for spec in inputs
    ]
    return json.dumps(
        {
            "inputs": [spec_to_json(spec) for spec in inputs],
            "outputs": [spec_to_json(spec) for spec in outputs],
            "state": state,
            "salt": salt,
        }
    ).encode()


class VarlinkError(Exception):
    def __init__(self, name: str, text: str, **details: object) -> None:
        super().__init__(text)
        self.name = name
        self.text = text
        self.details = details


class FakeSession:
    """One session: its thread reads records and hands INFER to the daemon's `on_infer`."""

    def __init__(self, daemon: FakeDaemon, number: int, model: Json, options: Json) -> None:
        self.daemon = daemon
        self.number = number
        self.model = model
        self.options = options
        self.epoch = 1
        self.slots = options.get("slots") or 2
        self.inputs = tuple(spec_from_json(spec) for spec in model["inputs"])
        self.outputs = tuple(spec_from_json(spec) for spec in model["outputs"])
        shapes = options.get("input_shapes") or {}
        self.inputs = tuple(_with_shape(s, shapes.get(s.name)) for s in self.inputs)
        self.outputs = tuple(
            _with_shape(out, shapes.get(given.name))
            for out, given in zip(self.outputs, self.inputs, strict=True)
        )
        output_slots = 2 * self.slots
        self.layout = arena.plan(self.inputs, self.outputs, self.slots, output_slots)
        self.arena_fd = arena.create("test-arena", self.layout.size_bytes)
        self.memory = arena.map_arena(self.arena_fd, self.layout.size_bytes)
        self.sock, self.client_sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The daemon's output slots, in the order in which a swap hands them out.
        self.spare = list(range(self.slots, output_slots))
        self.held: dict[int, Record] = {}
        self.total = [0.0] * 64
        self.cancelled: list[int] = []
        self.cancel_answered = threading.Event()
        self.records: list[Record] = []
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def opening(self) -> tuple[Json, list[int]]:
        parameters = {
            "session": self.number,
            "epoch": self.epoch,
            "slots": self.slots,
            "output_slots": len(self.layout.outputs),
            "socket": 0,
            "arena": 1,
            "layout": layout_to_json(self.layout),
            "inputs": [spec_to_json(spec) for spec in self.inputs],
            "outputs": [spec_to_json(spec) for spec in self.outputs],
            "state": self.model["state"],
        }
        return parameters, [self.client_sock.fileno(), self.arena_fd]

    def opened(self) -> None:
        """The client has its descriptors."""
        self.client_sock.close()
        os.close(self.arena_fd)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            try:
                data = self.sock.recv(256)
            except OSError:
                return

            if not data:
                return

            self._handle(Record.unpack(data))

    def _handle(self, record: Record) -> None:
        self.records.append(record)
        if record.kind == Kind.CANCEL:
            self.cancelled.append(record.request_id)
            held = self.held.get(record.request_id)
            if held is not None and self.daemon.cancels:
                self.fail(held, "switchgear", 200, swap=True)
                self.cancel_answered.set()

            return

        if record.output_slot in self.spare or record.input_slot >= self.slots:
            self.daemon.violations.append(f"slots of {record}")
            return

        self.held[record.request_id] = record
        if self.model["state"] and record.epoch != self.epoch:
            self.fail(record, "switchgear", 402)
            return

        self.daemon.on_infer(self, record)

    def answer(self, record: Record, swap: bool = False) -> None:
        """Runs the model and sends the result; `swap`: in another output slot."""
        output = self._output(record, swap)
        entries = []
        for index, spec in enumerate(self.inputs):
            place = self.layout.inputs[record.input_slot][index]
            letter = DTYPES[spec.dtype].format
            count = math.prod(spec.shape)
            values = struct.unpack_from(f"<{count}{letter}", self.memory, place.offset)
            values = self._computed(values, bool(record.flags & Flag.RESET))
            shape = spec.shape
            if self.outputs[index].dynamic:
                # As many elements as the first one says.
                shape = (int(values[0]) - 1,)
                values = values[: shape[0]]

            out = self.layout.outputs[output][index]
            struct.pack_into(f"<{len(values)}{letter}", self.memory, out.offset, *values)
            size = len(values) * DTYPES[spec.dtype].size_bytes
            entries.append(SlotEntry(spec.dtype, shape, size))

        header = pack_header(record.request_id, entries)
        at = self.layout.headers[output].offset
        self.memory[at : at + len(header)] = header
        self._reply(record, output, backend=Backend.CPU)

    def _computed(self, values: tuple[Any, ...], reset: bool) -> tuple[Any, ...]:
        if not self.model["state"]:
            return tuple(value + 1 for value in values)

        if reset:
            self.total = [0.0] * 64

        self.total[: len(values)] = [
            before + value for before, value in zip(self.total, values, strict=False)
        ]
        return tuple(self.total[: len(values)])

    def fail(
        self,
        record: Record,
        domain: str,
        code: int,
        *,
        backend: int = 0,
        text: str = "",
        swap: bool = False,
        retry_after_ms: int = 0,
    ) -> None:
        output = self._output(record, swap)
        if text:
            place = self.layout.headers[output]
            data = pack_error(text, place.length)
            self.memory[place.offset : place.offset + len(data)] = data

        self._reply(
            record,
            output,
            backend=backend,
            status_domain=DOMAINS[domain],
            status_code=code,
            retry_after_ms=retry_after_ms,
        )

    def lose_state(self) -> None:
        """As after the death of the session's worker."""
        self.epoch += 1
        self.total = [0.0] * 64

    def _output(self, record: Record, swap: bool) -> int:
        if not swap:
            return record.output_slot

        output = self.spare.pop(0)
        self.spare.append(record.output_slot)
        return output

    def _reply(self, record: Record, output: int, **fields: int) -> None:
        self.held.pop(record.request_id, None)
        values: dict[str, Any] = {
            "kind": Kind.REPLY,
            "request_id": record.request_id,
            "epoch": self.epoch,
            "input_slot": record.input_slot,
            "output_slot": output,
            "capture_clock": record.capture_clock,
            "capture_ns": record.capture_ns,
            "trace_id": record.trace_id,
            "precision": Precision.FP32,
            "reason": Reason.ONLY_READY,
            "temperature_age_ms": NO_READING,
            "queue_ns": 1_000_000,
            "run_ns": 2_000_000,
            "total_ns": 4_000_000,
            **fields,
        }
        self.send(Record(**values))

    def send(self, record: Record) -> None:
        try:
            self.sock.send(record.pack(), socket.MSG_NOSIGNAL)
        except OSError:
            pass

    def go_away(self, code: int) -> None:
        self.send(Record(Kind.GOAWAY, input_slot=NO_SLOT, status_domain=1, status_code=code))

    def close(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

        if self.thread.ident is not None and self.thread is not threading.current_thread():
            self.thread.join()

        self.sock.close()
        self.memory.close()


def _with_shape(spec: TensorSpec, shape: list[int] | None) -> TensorSpec:
    if shape is None:
        return spec

    size = DTYPES[spec.dtype].size_bytes * math.prod(shape)
    return TensorSpec(spec.name, spec.dtype, tuple(shape), spec.signature, size, spec.dynamic)


class FakeDaemon:
    """Serves the control socket; a thread for each connection and session."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.models: dict[str, Json] = {}
        self.names: dict[str, str] = {}
        self.prepared: set[str] = set()
        self.sessions: list[FakeSession] = []
        self.calls: list[tuple[str, Json]] = []
        self.violations: list[str] = []
        self.on_infer: Callable[[FakeSession, Record], None] = FakeSession.answer
        # What a method answers instead; called with the parameters.
        self.instead: dict[str, Callable[[Json], Json]] = {}
        # Methods that are answered when the event is set.
        self.stalled: dict[str, threading.Event] = {}
        # Methods on whose call the connection is closed.
        self.dropped: set[str] = set()
        self.cancels = True
        self._jobs: dict[int, Callable[[], Json]] = {}
        self._connections: list[tuple[socket.socket, threading.Thread]] = []
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> FakeDaemon:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(16)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Everything ends at once, as when the process dies; models are forgotten."""
        if self._listener is None:
            return

        self._listener.shutdown(socket.SHUT_RDWR)
        assert self._thread is not None
        self._thread.join()
        self._listener.close()
        self._listener = None
        for event in self.stalled.values():
            event.set()

        for sock, thread in self._connections:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

            thread.join()

        for session in self.sessions:
            session.close()

        self._connections.clear()
        self.models.clear()
        self.names.clear()
        self.prepared.clear()

    def restart(self) -> None:
        self.stop()
        self.start()

    def called(self, method: str) -> list[Json]:
        """The parameters of the calls of a method."""
        return [parameters for name, parameters in self.calls if name == method]

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return

            thread = threading.Thread(target=self._talk, args=(sock,), daemon=True)
            self._connections.append((sock, thread))
            thread.start()

    def _talk(self, sock: socket.socket) -> None:
        reader = varlink.MessageReader()
        with sock:
            while True:
                try:
                    data, fds = varlink.receive(sock)
                except OSError:
                    return

                if not data:
                    return

                reader.feed(data, fds)
                while (message := reader.next()) is not None:
                    if not self._answer(sock, message):
                        return

    def _answer(self, sock: socket.socket, message: varlink.Message) -> bool:
        method = str(message.fields["method"]).removeprefix("io.switchgear.")
        parameters = message.fields.get("parameters") or {}
        assert isinstance(parameters, dict)
        self.calls.append((method, parameters))
        if method in self.dropped:
            return False

        if method in self.stalled:
            self.stalled[method].wait()

        fds: list[int] = []
        session: FakeSession | None = None
        try:
            if method in self.instead:
                replies = [self.instead[method](parameters)]
            elif method == "OpenSession":
                session = self._open(parameters)
                opening, fds = session.opening()
                replies = [opening]
            elif method == "WatchJob":
                replies = self._watch(parameters["job"])
            else:
                replies = [getattr(self, f"_{method}")(parameters, message.descriptors)]

            data = [{"parameters": reply} for reply in replies]
            for reply in data[:-1]:
                reply["continues"] = True  # type: ignore[assignment]
        except VarlinkError as error:
            name = error.name if "." in error.name else f"io.switchgear.{error.name}"
            data = [{"error": name, "parameters": _error(error)}]  # type: ignore[dict-item]

        message.descriptors.close()
        try:
            for fields in data:
                encoded = varlink.encode(dict(fields))
                socket.send_fds(sock, [encoded], fds, socket.MSG_NOSIGNAL)
        except OSError:
            pass

        if session is not None:
            session.opened()

        return True

    def _GetInfo(self, parameters: Json, descriptors: varlink.Descriptors) -> Json:
        return {
            "version": "0",
            "pid": os.getpid(),
            "ready": True,
            "state": "serving",
            "record_version": 1,
            "uptime_s": 1.5,
        }

    def _GetStatus(self, parameters: Json, descriptors: varlink.Descriptors) -> Json:
        return {"ready": True, "models": [self._model(digest) for digest in self.models]}

    def _LoadModel(self, parameters: Json, descriptors: varlink.Descriptors) -> Json:
        fd = descriptors.take(parameters["descriptor"])
        data = os.pread(fd, 1 << 20, 0)
        os.close(fd)
        name = parameters.get("name")

        def load() -> Json:
            try:
                model = json.loads(data)
            except ValueError:
                raise VarlinkError("BadModel", "no model", domain="tflite") from None

            digest = hashlib.sha256(data).hexdigest()
            self.models[digest] = model
            if name:
                self.names[name] = digest

            return self._model(digest)

        return self._job(load)

    def _CheckModel(self, parameters: Json, descriptors: varlink.Descriptors) -> Json:
        digest = self._digest(parameters["model"])
        return self._job(lambda: self._model(digest))

    def _PrepareShapes(self, parameters: Json, descriptors: varlink.Descriptors) -> Json:
        shapes = json.dumps(parameters["input_shapes"])

        def prepare() -> Json:
            self.prepared.add(shapes)
            return {}

        return self._job(prepare)

    def _ListModels(self, parameters: Json, descriptors: varlink.Descriptors) -> Json:
        return {"models": [self._model(digest) for digest in self.models]}

    def _DescribeModel(self, parameters: Json, descriptors: varlink.Descriptors) -> Json:
        return {"model": self._model(self._digest(parameters["model"]))}

    def _UnloadModel(self, parameters: Json, descriptors: varlink.Descriptors) -> Json:
        del self.models[self._digest(parameters["model"])]
        return {}

    def _Infer(self, parameters: Json, descriptors: varlink.Descriptors) -> Json:
        model = self.models[self._digest(parameters["model"])]
        outputs = {}
        for given, out in zip(model["inputs"], model["outputs"], strict=True):
            value = parameters["inputs"][given["name"]]
            letter = DTYPES[value["dtype"]].format
            data = base64.b64decode(value["data"])
            numbers = struct.unpack(f"<{math.prod(value['shape'])}{letter}", data)
            data = struct.pack(f"<{len(numbers)}{letter}", *(n + 1 for n in numbers))
            outputs[out["name"]] = {**value, "data": base64.b64encode(data).decode()}

        return {
            "outputs": outputs,
            "backend": "cpu",
            "precision": "fp32",
            "reason": "only_ready",
            "queue_us": 1,
            "run_us": 2500,
            "total_us": 3,
        }

    def _job(self, work: Callable[[], Json]) -> Json:
        job = len(self._jobs) + 1
        self._jobs[job] = work
        return {"job": job}

    def _watch(self, job: int) -> list[Json]:
        begin = {"state": "running", "phase": "copy", "done": 1, "total": 2}
        try:
            end = {"state": "done", "result": self._jobs[job]()}
        except VarlinkError as error:
            name = f"io.switchgear.{error.name}"
            end = {"state": "failed", "error": name, "parameters": _error(error)}

        return [begin, {"phase": "end", "done": 2, "total": 2, **end}]

    def _digest(self, model: str) -> str:
        digest = self.names.get(model, model)
        if digest not in self.models:
            raise VarlinkError("UnknownModel", f"no model {model}")

        return digest

    def _model(self, digest: str) -> Json:
        model = self.models[digest]
        return {
            "model": digest,
            "name": next((n for n, d in self.names.items() if d == digest), ""),
            "size_bytes": 1,
            "storage": "memory",
            "owner_uid": os.getuid(),
            "resident": False,
            "status": "ready",
            "inputs": model["inputs"],
            "outputs": model["outputs"],
            "names": "signature",
            "state": model["state"],
            "operators": {"ADD": 1},
            "backends": {"cpu": "ready"},
            "run_us": 1500,
            "sessions": 0,
            "timeline": [{"name": "copy", "start_us": 0, "duration_us": 500}],
        }

    def _open(self, parameters: Json) -> FakeSession:
        digest = self._digest(parameters["model"])
        shapes = parameters.get("input_shapes")
        if shapes and json.dumps(shapes) not in self.prepared:
            raise VarlinkError("NotPrepared", "call PrepareShapes first")

        session = FakeSession(self, len(self.sessions) + 1, self.models[digest], parameters)
        self.sessions.append(session)
        return session


def _error(error: VarlinkError) -> Json:
    code = BY_NAME[error.name].code if error.name in BY_NAME else 0
    return {"code": code, "message": error.text, "details": error.details}


@contextmanager
def collected() -> Iterator[None]:
    """Collects the cycles made within: what pytest.raises caught keeps frames in them, and with
    those sessions and descriptors. What was there before is set aside, to make it quick."""
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


def hold(session: FakeSession, record: Record) -> None:
    """For `on_infer`: the request stays in `session.held`."""


if __name__ == "__main__":
    with FakeDaemon(Path(sys.argv[1])) as served:
        print("ready", flush=True)
        sys.stdin.read()
