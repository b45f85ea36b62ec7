"""A worker process at the end of a socket, spoken to packet by packet as the daemon does."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

from switchgear.ipc import arena, worker
from switchgear.ipc.record import RECORD_BYTES, Kind, Record
from switchgear.ipc.slot import SlotEntry, unpack_error, unpack_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from switchgear.ipc.slot import TensorSpec

ANSWER_LIMIT_S: Final = 15.0


class WorkerUnderTest:
    """Use it in `with`: the process is gone at the end. `exit` waits for its own end."""

    def __init__(
        self, backend: str = "cpu", options: dict[str, Any] | None = None, limit: str = ""
    ) -> None:
        self.sock, theirs = worker.pair()
        self.sock.settimeout(ANSWER_LIMIT_S)
        command = [
            *(sys.executable, "-P", "-m", "switchgear.backends.worker"),
            *("--parent", str(os.getpid()), f"--fd={theirs.fileno()}"),
            *(f"--backend={backend}", f"--options={json.dumps(options or {'threads': 1})}"),
        ]
        with theirs:
            self._process = subprocess.Popen(
                ["sh", "-c", f'{limit} exec "$@"', "sh", *command] if limit else command,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[theirs.fileno()],
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, fds: Sequence[int] = (), /, **packet: object) -> None:
        worker.send(self.sock, packet, fds)

    def receive(self) -> worker.Packet:
        """The next packet, which has to be an object."""
        return worker.decode(self.sock.recv(worker.MAX_PACKET_BYTES))

    def ask(self, fds: Sequence[int] = (), /, **packet: object) -> worker.Packet:
        self.send(fds, **packet)
        return self.receive()

    def load(self, model: bytes, instance: int = 1, **more: object) -> worker.Packet:
        """Loads a model from a memfd; the answer."""
        with memory_file(model) as fd:
            return self.ask([fd], op="load", instance=instance, **more)

    def infer(self, **fields: Any) -> Record:
        """Sends a record and returns the reply."""
        self.sock.send(Record(Kind.INFER, **fields).pack())
        return self.reply()

    def reply(self) -> Record:
        data = self.sock.recv(worker.MAX_PACKET_BYTES)
        assert len(data) == RECORD_BYTES, data
        return Record.unpack(data)

    def exit(self) -> tuple[int, str]:
        """Its exit status and stderr, once it has ended by itself."""
        _, said = self._process.communicate(timeout=ANSWER_LIMIT_S)
        return self._process.returncode, said

    def __enter__(self) -> WorkerUnderTest:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
        if self._process.poll() is None:
            self._process.kill()

        self._process.communicate()


class Arena:
    """An arena of `slots` slots for a model, mapped; close it."""

    def __init__(
        self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], slots: int = 1
    ) -> None:
        self.outputs = outputs
        self.layout = arena.plan(inputs, outputs, slots, slots)
        self.fd = arena.create("arena", self.layout.size_bytes)
        self.memory = mmap.mmap(self.fd, self.layout.size_bytes)

    @property
    def layout_json(self) -> worker.Packet:
        return worker.layout_to_json(self.layout)

    def write(self, data: bytes, slot: int = 0, tensor: int = 0) -> None:
        place = self.layout.inputs[slot][tensor]
        self.memory[place.offset : place.offset + place.length] = data

    def header(self, slot: int = 0) -> tuple[int, list[SlotEntry]]:
        place = self.layout.headers[slot]
        limits = [spec.capacity_bytes for spec in self.outputs]
        data = self.memory[place.offset : place.offset + place.length]
        return unpack_header(memoryview(data), limits)

    def error(self, slot: int = 0) -> str:
        place = self.layout.headers[slot]
        data = self.memory[place.offset : place.offset + place.length]
        return unpack_error(memoryview(data))

    def read(self, slot: int = 0, tensor: int = 0) -> bytes:
        _, entries = self.header(slot)
        place = self.layout.outputs[slot][tensor]
        return self.memory[place.offset : place.offset + entries[tensor].length]

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.close()
        os.close(self.fd)


@contextlib.contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    fd = os.memfd_create("model")
    try:
        os.write(fd, content)
        yield fd
    finally:
        os.close(fd)
