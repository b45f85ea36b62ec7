"""An inference for a caller inside of the daemon: a session without a socket.

For the control plane's convenience call. The daemon maps the arena, which it made and sealed
itself, for small tensors only.
"""

from __future__ import annotations

import asyncio
import base64
import mmap
from typing import Any, Final

from switchgear.daemon.sessions import Opened
from switchgear.ipc import record
from switchgear.ipc.errors import (
    DOMAIN_NAMES,
    BackendFailed,
    BadInput,
    OutputTooLarge,
    error_from_code,
)
from switchgear.ipc.slot import TensorSpec, unpack_error, unpack_header

# All outputs of one call together: base64 of them is below the bound of unsent replies.
MAX_OUTPUT_BYTES: Final = 704 << 10

Values = dict[str, tuple[str, tuple[int, ...], bytes]]


def check_inputs(specs: tuple[TensorSpec, ...], values: Values) -> None:
    """:raises BadInput: an input is missing, unknown, or of a wrong dtype, shape or length."""
    unknown = set(values) - {spec.name for spec in specs}
    if unknown:
        raise BadInput(f"the model has no input {sorted(unknown)[0][:140]!r}")

    for spec in specs:
        if spec.name not in values:
            raise BadInput(f"input {spec.name!r} is missing")

        dtype, shape, data = values[spec.name]
        if dtype != spec.dtype or shape != spec.shape:
            raise BadInput(
                f"input {spec.name!r} is {spec.dtype} {list(spec.shape)}, "
                f"not {dtype[:32]} {list(shape)}"
            )

        if len(data) != spec.capacity_bytes:
            raise BadInput(f"input {spec.name!r} has {len(data)} bytes")


async def infer(opened: Opened, values: Values, timeout_us: int) -> dict[str, Any]:
    """Runs one inference in a session of one slot; returns the reply of `Infer`.

    :raises SwitchgearError: as in the reply's status.
    """
    check_inputs(opened.inputs, values)
    session, layout = opened.session, opened.layout
    arrived: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def deliver(data: bytes | bytearray) -> None:
        if not arrived.done():
            arrived.set_result(bytes(data))

    session.deliver = deliver
    with mmap.mmap(session.arena_fd, layout.size_bytes) as memory:
        for spec, place in zip(opened.inputs, layout.inputs[0], strict=True):
            memory[place.offset : place.offset + place.length] = values[spec.name][2]

        request = record.Record(
            record.Kind.INFER,
            request_id=1,
            epoch=session.epoch,
            input_slot=0,
            output_slot=0,
            timeout_us=timeout_us,
        )
        session.receive(bytearray(request.pack()))
        reply = record.Record.unpack(await arrived)
        with memoryview(memory) as view:
            return _result(opened, reply, view)


def _result(opened: Opened, reply: record.Record, view: memoryview) -> dict[str, Any]:
    header = opened.layout.headers[min(reply.output_slot, len(opened.layout.headers) - 1)]
    with view[header.offset : header.offset + header.length] as room:
        if reply.kind != record.Kind.REPLY or reply.status_domain != 0:
            domain = DOMAIN_NAMES.get(reply.status_domain, "switchgear")
            text = unpack_error(room) if reply.backend else ""
            if domain == "switchgear":
                raise error_from_code(reply.status_code, text)

            raise BackendFailed(text, domain=domain, driver_code=reply.status_code)

        limits = [spec.capacity_bytes for spec in opened.outputs]
        _, entries = unpack_header(room, limits)

    total = sum(entry.length for entry in entries)
    if total > MAX_OUTPUT_BYTES:
        raise OutputTooLarge(
            f"the outputs have {total} bytes; over {MAX_OUTPUT_BYTES} take a session",
            bytes_needed=total,
        )

    outputs = {}
    places = opened.layout.outputs[reply.output_slot]
    for spec, place, entry in zip(opened.outputs, places, entries, strict=True):
        data = bytes(view[place.offset : place.offset + entry.length])
        outputs[spec.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data": base64.b64encode(data).decode(),
        }

    return {
        "outputs": outputs,
        "backend": record.Backend(reply.backend).name.lower(),
        "precision": record.Precision(reply.precision).name.lower(),
        "reason": record.Reason(reply.reason).name.lower(),
        "queue_us": reply.queue_ns // 1000,
        "run_us": reply.run_ns // 1000,
        "total_us": reply.total_ns // 1000,
    }
