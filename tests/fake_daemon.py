"""A daemon for the client's tests: real sockets, descriptors, records and arenas, no engine.

Tests make it misbehave: `on_infer` replaces what happens to a request, `instead`, `stalled` and
`dropped` what happens to a call. As a script it serves on the path in its argument until its
stdin closes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from fake_session import FakeSession, Json

from switchgear.ipc import varlink
from switchgear.ipc.dtypes import DTYPES
from switchgear.ipc.errors import BY_NAME
from switchgear.ipc.record import (
    Record,
)


class VarlinkError(Exception):
    def __init__(self, name: str, text: str, **details: object) -> None:
        super().__init__(text)
        self.name = name
        self.text = text
        self.details = details


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

        # A test may take it out again meanwhile.
        stalled = self.stalled.get(method)
        if stalled is not None:
            stalled.wait()

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


if __name__ == "__main__":
    with FakeDaemon(Path(sys.argv[1])) as served:
        print("ready", flush=True)
        sys.stdin.read()
