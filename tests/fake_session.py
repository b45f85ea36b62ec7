"""A session of `fake_daemon`: its arena, its records, and its models.

A "model" is a JSON text that names its tensors (`model_bytes`). It adds one to each element of
each input; a stateful one adds up its frames. A test has a `FakeSession` answer late, out of
order or with other output slots.
"""

from __future__ import annotations

import gc
import json
import math
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from switchgear.ipc import arena
from switchgear.ipc.dtypes import DTYPES
from switchgear.ipc.errors import DOMAINS
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


class Host(Protocol):
    """What a session needs of its daemon."""

    violations: list[str]
    on_infer: Callable[[FakeSession, Record], None]
    cancels: bool


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


class FakeSession:
    """One session: its thread reads records and hands INFER to the daemon's `on_infer`."""

    def __init__(self, daemon: Host, number: int, model: Json, options: Json) -> None:
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


def wait_until(event: threading.Event) -> None:
    assert event.wait(10)


class Holding:
    """An `on_infer` that keeps requests and tells when `count` are there."""

    def __init__(self, daemon: Host, count: int) -> None:
        self._left = count
        self.all_there = threading.Event()
        daemon.on_infer = self

    def __call__(self, session: FakeSession, record: Record) -> None:
        self._left -= 1
        if self._left == 0:
            self.all_there.set()
