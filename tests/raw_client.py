"""A client that keeps no rules: bytes, descriptors and records as a test wants them."""

from __future__ import annotations

import array
import json
import mmap
import os
import select
import socket
import struct
from typing import TYPE_CHECKING, Any, Final

from switchgear.ipc.errors import BY_CODE
from switchgear.ipc.record import RECORD_BYTES, Kind, Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

# A test that waits longer than this for one answer has failed.
ANSWER_LIMIT_S: Final = 15.0
_READ_BYTES: Final = 1 << 16
_INTERFACE: Final = "io.switchgear."


class CallFailed(Exception):
    """An error reply: `name` without its interface, `code`, `details`."""

    def __init__(self, name: str, parameters: Mapping[str, Any]) -> None:
        super().__init__(f"{name}: {parameters}")
        self.name = name.rpartition(".")[2]
        self.parameters = parameters
        self.code = parameters.get("code")
        self.text = str(parameters.get("message", ""))
        self.details: Mapping[str, Any] = parameters.get("details", {})


def message(
    method: str, parameters: Mapping[str, object] | None = None, **flags: bool
) -> bytes:
    """A call's bytes; a method without a dot is one of `io.switchgear`."""
    name = method if "." in method else _INTERFACE + method
    return (
        json.dumps({"method": name, "parameters": parameters or {}, **flags}).encode() + b"\0"
    )


class Control:
    """One connection to the control socket, blocking with a time limit."""

    def __init__(self, path: Path | str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        try:
            # Blocking: with a time limit, a full line of waiting clients would be an error.
            self.sock.connect(str(path))
        except OSError:
            self.sock.close()
            raise

        self.sock.settimeout(ANSWER_LIMIT_S)
        self._buffer = b""

    def __enter__(self) -> Control:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    def send(self, data: bytes, fds: Iterable[int] = ()) -> None:
        """Sends all of it; the descriptors go with the first byte."""
        numbers = array.array("i", fds)
        if numbers:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)]
            data = data[self.sock.sendmsg([data], ancillary) :]

        if data:
            self.sock.sendall(data)

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """The next reply and its descriptors.

        Raises EOFError when the daemon has closed the connection.
        """
        fds = array.array("i")
        while b"\0" not in self._buffer:
            try:
                data, ancillary, _, _ = self.sock.recvmsg(_READ_BYTES, socket.CMSG_SPACE(64))
            except ConnectionResetError:
                data, ancillary = b"", []

            for _, _, payload in ancillary:
                fds.frombytes(payload)

            if not data:
                raise EOFError("the daemon closed the connection")

            self._buffer += data

        line, _, self._buffer = self._buffer.partition(b"\0")
        reply: dict[str, Any] = json.loads(line)
        return reply, list(fds)

    def at_end(self) -> bool:
        """Waits for what comes next; whether it is the end of the connection."""
        try:
            self.receive()
        except EOFError:
            return True

        return False

    def refused(self) -> str:
        """The one ProtocolError, after which the connection is closed; its text."""
        reply, _ = self.receive()
        assert reply["error"] == "io.switchgear.ProtocolError", reply
        assert reply["parameters"]["code"] == 501
        assert self.at_end()
        return str(reply["parameters"]["message"])

    def call_with_fds(
        self, method: str, fds: Iterable[int] = (), **parameters: Any
    ) -> tuple[dict[str, Any], list[int]]:
        """One call; the reply's parameters and descriptors.

        Raises CallFailed for an error reply.
        """
        self.send(message(method, parameters), fds)
        reply, received = self.receive()
        if "error" in reply:
            raise CallFailed(reply["error"], reply.get("parameters", {}))

        return reply["parameters"], received

    def call(self, method: str, fds: Iterable[int] = (), **parameters: Any) -> dict[str, Any]:
        reply, received = self.call_with_fds(method, fds, **parameters)
        assert not received, f"{method} sent descriptors"
        return reply

    def wait_for(self, job: int) -> dict[str, Any]:
        """Follows a job to its end; its result.

        Raises CallFailed when it failed or was cancelled.
        """
        last = self.watch(job)
        if last["state"] != "done":
            raise CallFailed(last["error"], last["parameters"])

        result: dict[str, Any] = last["result"]
        return result

    def watch(self, job: int) -> dict[str, Any]:
        """Follows a job to its end; the last state."""
        self.send(message("WatchJob", {"job": job}, more=True))
        while True:
            reply, _ = self.receive()
            if "error" in reply:
                raise CallFailed(reply["error"], reply["parameters"])

            if not reply.get("continues"):
                last: dict[str, Any] = reply["parameters"]
                return last

    def load_fd(self, fd: int, **parameters: Any) -> dict[str, Any]:
        """Loads the model behind a descriptor, which stays the caller's."""
        return self.wait_for(self.call("LoadModel", [fd], descriptor=0, **parameters)["job"])

    def load(self, data: bytes, **parameters: Any) -> dict[str, Any]:
        """Loads a model from its bytes."""
        fd = memfd(data)
        try:
            return self.load_fd(fd, **parameters)
        finally:
            os.close(fd)

    def open_session(self, model: str, **options: Any) -> RawSession:
        reply, fds = self.call_with_fds("OpenSession", model=model, **options)
        return RawSession(reply, fds)


def memfd(data: bytes) -> int:
    """A new memfd with these bytes; the caller owns it."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
    except BaseException:
        os.close(fd)
        raise

    return fd


def error_name(reply: Record) -> str:
    """The name of a reply's error of the daemon; empty when it succeeded."""
    if reply.status_domain == 0:
        return ""

    assert reply.status_domain == 1, f"error of domain {reply.status_domain}"
    return BY_CODE[reply.status_code].__name__


class RawSession:
    """A session's socket and arena. Nothing here keeps slots or ids from being misused."""

    def __init__(self, reply: Mapping[str, Any], fds: Sequence[int]) -> None:
        self.sock = socket.socket(fileno=fds[reply["socket"]])
        self.sock.settimeout(ANSWER_LIMIT_S)
        self.reply = reply
        self.slots: int = reply["slots"]
        self.epoch: int = reply["epoch"]
        self._layout = reply["layout"]
        arena = fds[reply["arena"]]
        self.memory = mmap.mmap(arena, self._layout["size_bytes"])
        os.close(arena)

    def __enter__(self) -> RawSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()
        self.memory.close()

    def infer(
        self, request_id: int, input_slot: int = 0, output_slot: int = 0, **fields: Any
    ) -> None:
        """Sends an INFER; `fields` are those of `Record`."""
        fields.setdefault("epoch", self.epoch)
        request = Record(
            Kind.INFER, request_id, input_slot=input_slot, output_slot=output_slot, **fields
        )
        self.sock.send(request.pack())

    def cancel(self, request_id: int) -> None:
        self.sock.send(Record(Kind.CANCEL, request_id).pack())

    def receive(self) -> Record:
        """The next record.

        Raises EOFError when the daemon has closed the session.
        """
        try:
            data = self.sock.recv(RECORD_BYTES + 1)
        except ConnectionResetError:
            data = b""

        if not data:
            raise EOFError("the daemon closed the session")

        return Record.unpack(data)

    def replies(self, count: int) -> dict[int, Record]:
        """The next `count` replies by request id; each id once."""
        found: dict[int, Record] = {}
        for _ in range(count):
            reply = self.receive()
            assert reply.kind == Kind.REPLY
            assert reply.request_id not in found, f"request {reply.request_id} answered twice"
            found[reply.request_id] = reply

        return found

    @property
    def has_answer(self) -> bool:
        """Whether a record of the daemon lies in the socket, or its end."""
        return bool(select.select([self.sock], [], [], 0)[0])

    def is_silent(self, wait_s: float = 0.2) -> bool:
        """Whether nothing arrives for a while."""
        self.sock.settimeout(wait_s)
        try:
            return not self.sock.recv(RECORD_BYTES, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self.sock.settimeout(ANSWER_LIMIT_S)

    def write(self, slot: int, values: Sequence[float], tensor: int = 0) -> None:
        """Fills the beginning of an input with float32 numbers."""
        _, offset, _ = self._layout["inputs"][slot][tensor]
        struct.pack_into(f"<{len(values)}f", self.memory, offset, *values)

    def read(self, slot: int, count: int, tensor: int = 0) -> list[float]:
        """The first float32 numbers of an output."""
        _, offset, _ = self._layout["outputs"][slot][tensor]
        return list(struct.unpack_from(f"<{count}f", self.memory, offset))

    def header_id(self, slot: int) -> int:
        """The request id in an output slot's header."""
        _, offset, _ = self._layout["headers"][slot]
        number: int = struct.unpack_from("<Q", self.memory, offset + 8)[0]
        return number

    def error_text(self, slot: int) -> str:
        """The error's text in the place of an output slot's header."""
        _, offset, _ = self._layout["headers"][slot]
        magic, length = struct.unpack_from("<II", self.memory, offset)
        assert magic == 0x54525245
        return self.memory[offset + 8 : offset + 8 + length].decode()
