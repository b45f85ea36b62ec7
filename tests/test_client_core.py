"""An opened session without I/O: records, results, replies as exceptions."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_session import collected, tensor

from switchgear.client.core import SessionCore
from switchgear.client.opened import Opened
from switchgear.client.request import PLAIN, Pending, request_options
from switchgear.client.result import ReplyFields
from switchgear.ipc import arena
from switchgear.ipc.errors import (
    BackendFailed,
    BadInput,
    BadRequest,
    Busy,
    ConnectionLost,
    InternalError,
    ProtocolError,
    ShuttingDown,
    StateLost,
    SwitchgearError,
    UnsupportedModel,
)
from switchgear.ipc.record import Flag, Kind, Record
from switchgear.ipc.slot import SlotEntry, TensorSpec, pack_error, pack_header


class Rig:
    """A SessionCore and the daemon's side of its arena."""

    def __init__(
        self,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        slots: int = 2,
        state: bool = False,
    ) -> None:
        self.layout = arena.plan(inputs, outputs, slots, 2 * slots)
        fd = arena.create("test", self.layout.size_bytes)
        try:
            self.memory = arena.map_arena(fd, self.layout.size_bytes)
            mapping = arena.map_arena(fd, self.layout.size_bytes)
        finally:
            os.close(fd)

        self.core = SessionCore(
            Opened(7, 1, slots, self.layout, inputs, outputs, state), mapping
        )

    def send(self, slot: int | None = None, reset: bool = False) -> tuple[Pending, Record]:
        if slot is None:
            slot = self.core.table.take()
            assert slot is not None

        request = Pending()
        options = request_options(reset, None, None, b"", 0, "none")
        return request, Record.unpack(self.core.begin(request, slot, options, holds=True))

    def write_header(self, output: int, request_id: int, *entries: SlotEntry) -> None:
        header = pack_header(request_id, entries)
        at = self.layout.headers[output].offset
        self.memory[at : at + len(header)] = header

    def reply(self, record: Record, output: int | None = None, **fields: Any) -> None:
        values: dict[str, Any] = {"epoch": record.epoch, **fields}
        self.core.receive(
            Record(
                Kind.REPLY,
                record.request_id,
                output_slot=record.output_slot if output is None else output,
                **values,
            ).pack()
        )

    def close(self) -> None:
        self.core.lose()
        self.core.forget()
        self.memory.close()


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(*args: Any, **kwargs: Any) -> Rig:
        rigs.append(Rig(*args, **kwargs))
        return rigs[-1]

    with collected():
        yield make
        for rig in rigs:
            rig.close()

        rigs.clear()


ADD_ONE = ((tensor("x"),), (tensor("y"),))
USUAL = SlotEntry("float32", (4,), 16)


def test_a_reply_reads_from_the_output_slot_that_it_names(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(*ADD_ONE)
    request, record = rig.send()
    assert (record.input_slot, record.output_slot, record.epoch) == (0, 0, 1)
    rig.write_header(3, record.request_id, USUAL)
    place = rig.layout.outputs[3][0]
    struct.pack_into("<4f", rig.memory, place.offset, 1, 2, 3, 4)

    rig.reply(
        record,
        3,
        backend=1,
        precision=2,
        reason=1,
        tried=0b100,
        flags=Flag.LATE,
        temperature_age_ms=70,
    )
    result = rig.core.take(request, False)

    assert result["y"].tolist() == [1, 2, 3, 4]
    assert list(result) == ["y"]
    assert (result.backend, result.precision, result.reason) == ("cpu", "fp16", "only_ready")
    assert result.tried == ("vulkan",)
    assert result.late
    assert result.temperature_age_ms == 70
    # Zero copy: what the worker writes is seen.
    struct.pack_into("<f", rig.memory, place.offset, 9)
    assert result["y"][0] == 9


def test_a_slot_gives_its_present_output_slot_away(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(*ADD_ONE)
    request, record = rig.send(rig.core.table.take())
    rig.write_header(2, record.request_id, USUAL)
    rig.reply(record, 2)
    rig.core.take(request, False)
    rig.core.table.take_slot(0)

    _, again = rig.send(0)

    assert again.output_slot == 2


def test_a_copy_stays_when_the_slot_is_used_again(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(*ADD_ONE)
    request, record = rig.send()
    rig.write_header(0, record.request_id, USUAL)
    rig.reply(record)
    result = rig.core.take(request, True)

    struct.pack_into("<f", rig.memory, rig.layout.outputs[0][0].offset, 5)

    assert result["y"][0] == 0


@pytest.mark.parametrize(
    "header",
    [
        bytes(96),
        pack_header(99, [USUAL]),
        pack_header(1, [SlotEntry("float32", (5,), 20)]),
        pack_header(1, []),
        pack_error("no header but a text", 96),
    ],
)
def test_a_header_that_does_not_fit_is_not_believed(
    make_rig: Callable[..., Rig], header: bytes
) -> None:
    rig = make_rig(*ADD_ONE)
    request, record = rig.send()
    at = rig.layout.headers[0].offset
    rig.memory[at : at + len(header)] = header
    rig.reply(record)

    with pytest.raises(ProtocolError):
        rig.core.take(request, False)

    assert rig.core.table.free == 2


def test_an_output_of_unknown_size_has_the_shape_of_the_header(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig((tensor("x"),), (tensor("y", shape=(8,), dynamic=True),))
    request, record = rig.send()
    rig.write_header(0, record.request_id, SlotEntry("float32", (1, 3), 12))
    rig.reply(record)

    assert rig.core.take(request, False)["y"].shape == (1, 3)


def test_the_slot_of_a_result_is_free_once_it_was_taken(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(*ADD_ONE)
    first, record = rig.send()
    rig.write_header(0, record.request_id, USUAL)
    rig.reply(record)
    assert rig.core.table.free == 1

    result = rig.core.take(first, False)
    assert rig.core.take(first, False) is result
    assert rig.core.table.free == 2


def test_the_slot_of_a_forgotten_request_is_free_after_its_reply(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(*ADD_ONE)
    request, record = rig.send()
    del request
    assert rig.core.table.free == 1

    rig.reply(record)

    assert rig.core.table.free == 2


@pytest.mark.parametrize(
    ("fields", "expected", "said"),
    [
        ({"status_domain": 1, "status_code": 300, "retry_after_ms": 40}, Busy, "queue is full"),
        ({"status_domain": 1, "status_code": 77}, InternalError, "unknown code 77"),
        ({"status_domain": 6, "status_code": -12, "backend": 3}, BackendFailed, "opencl:-12"),
        ({"status_domain": 2, "status_code": 12, "backend": 1}, BackendFailed, "ENOMEM"),
        ({"status_domain": 3, "status_code": 11, "backend": 1}, BackendFailed, "SIGSEGV"),
        ({"status_domain": 77, "status_code": 1, "backend": 9}, BackendFailed, "77:1"),
    ],
)
def test_a_status_becomes_its_exception(
    make_rig: Callable[..., Rig],
    fields: dict[str, int],
    expected: type[SwitchgearError],
    said: str,
) -> None:
    rig = make_rig(*ADD_ONE)
    request, record = rig.send()
    rig.reply(record, **fields)

    with pytest.raises(expected, match=said) as caught:
        rig.core.take(request, False)

    assert type(caught.value) is expected
    assert caught.value.details.get("retry_after_ms", 0) == fields.get("retry_after_ms", 0)
    assert rig.core.table.free == 2


def test_the_workers_text_comes_with_its_domain_and_code(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(*ADD_ONE)
    request, record = rig.send()
    place = rig.layout.headers[2]
    text = pack_error("CL_MAP_FAILURE: no memory", place.length)
    rig.memory[place.offset : place.offset + len(text)] = text
    rig.reply(record, 2, status_domain=6, status_code=-12, backend=3)

    with pytest.raises(BackendFailed, match="opencl failed with opencl:-12: CL_MAP") as caught:
        rig.core.take(request, False)

    assert caught.value.details["domain"] == "opencl"
    assert caught.value.details["driver_code"] == -12
    assert caught.value.details["driver_text"] == "CL_MAP_FAILURE: no memory"


def test_a_lost_state_brings_the_new_epoch(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(*ADD_ONE, state=True)
    request, record = rig.send()
    rig.reply(record, status_domain=1, status_code=402, epoch=5)

    with pytest.raises(StateLost):
        rig.core.take(request, False)

    assert rig.send()[1].epoch == 5


@pytest.mark.parametrize(("backend", "still_due"), [(0, True), (1, False)])
def test_a_reset_that_no_worker_saw_is_still_due(
    make_rig: Callable[..., Rig], backend: int, still_due: bool
) -> None:
    rig = make_rig(*ADD_ONE, state=True)
    request, record = rig.send(reset=True)
    assert record.flags == Flag.RESET
    rig.reply(record, status_domain=1, status_code=300, backend=backend)
    assert request.error is not None

    assert bool(rig.send()[1].flags & Flag.RESET) is still_due


def test_the_end_reaches_each_request_once(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(*ADD_ONE)
    (first, record), (second, _) = rig.send(), rig.send()
    rig.write_header(0, record.request_id, USUAL)
    rig.reply(record)
    rig.core.lose("gone")
    rig.core.lose("again")

    # What was answered before can still be read.
    assert rig.core.take(first, False)["y"].shape == (4,)
    with pytest.raises(ConnectionLost, match=r"^gone$"):
        rig.core.take(second, False)

    with pytest.raises(ConnectionLost):
        rig.send(0)


def _is_lost(rig: Rig) -> bool:
    return rig.core.lost is not None


def test_goaway_lets_what_is_in_flight_end(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(*ADD_ONE)
    request, record = rig.send()
    rig.core.receive(Record(Kind.GOAWAY, status_domain=1, status_code=405).pack())
    with pytest.raises(ConnectionLost, match="about to end"):
        rig.send()

    assert not _is_lost(rig)
    rig.write_header(0, record.request_id, USUAL)
    rig.reply(record)

    assert rig.core.take(request, False)["y"].shape == (4,)
    assert isinstance(rig.core.lost, ConnectionLost)
    assert isinstance(rig.core.lost.__cause__, ShuttingDown)
    assert rig.core.may_reopen


def test_a_session_that_was_ended_for_a_reason_is_not_opened_again(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(*ADD_ONE)
    rig.core.receive(Record(Kind.GOAWAY, status_domain=1, status_code=106).pack())

    assert isinstance(rig.core.lost, ConnectionLost)
    assert rig.core.lost.details["cause"] == "UnknownModel"
    assert not rig.core.may_reopen


@pytest.mark.parametrize(
    "data",
    [
        b"short",
        bytes(128),
        Record(Kind.REPLY, 44, output_slot=0).pack(),
        Record(Kind.REPLY, 1, output_slot=1).pack(),
        Record(Kind.REPLY, 1, output_slot=9).pack(),
        Record(Kind.REPLY, 1).pack() + b"x",
    ],
)
def test_what_breaks_the_protocol_ends_the_session(
    make_rig: Callable[..., Rig], data: bytes
) -> None:
    rig = make_rig(*ADD_ONE)
    rig.send()

    with pytest.raises(ProtocolError):
        rig.core.receive(data)

    assert not rig.core.may_reopen


def test_record_types_of_later_versions_are_ignored(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(*ADD_ONE)
    rig.core.receive(Record(Kind.EVENT).pack())

    assert rig.core.lost is None


def test_a_request_carries_what_the_caller_said(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(*ADD_ONE)
    slot = rig.core.table.take()
    assert slot is not None
    options = request_options(True, 1.5, "batch", b"trace", 123, "boottime")

    record = Record.unpack(rig.core.begin(Pending(), slot, options, holds=True))

    assert record.kind == Kind.INFER
    assert (record.timeout_us, record.priority, record.capture_ns) == (1500, 3, 123)
    assert (record.capture_clock, record.trace_id) == (2, b"trace".ljust(16, b"\0"))
    assert record.flags == Flag.RESET


@pytest.mark.parametrize(
    "wrong",
    [
        {"deadline_ms": 0},
        {"deadline_ms": -1},
        {"deadline_ms": math.nan},
        {"priority": "urgent"},
        {"trace_id": bytes(17)},
        {"capture_ns": -1},
        {"capture_clock": "wall"},
    ],
)
def test_options_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "reset": False,
        "deadline_ms": None,
        "priority": None,
        "trace_id": b"",
        "capture_ns": 0,
        "capture_clock": "none",
    }
    assert request_options(**good) == PLAIN

    with pytest.raises(BadRequest):
        request_options(**{**good, **wrong})


def test_the_reply_has_the_fields_that_the_result_reads() -> None:
    # The plain tuple of the receive path is read by the positions of ReplyFields.
    from switchgear.client.core import _REPLY

    record = Record(
        Kind.REPLY, 9, 2, 3, 4, 5, status_domain=6, backend=7, precision=8, status_code=-9,
        reason=10, retries=11, tried=12, temperature_age_ms=13, retry_after_ms=14,
        queue_ns=15, run_ns=16, total_ns=17,
    )  # fmt: skip

    assert ReplyFields._make(_REPLY.unpack(record.pack())) == (
        2, 1, 2, 3, 9, 5, 6, 7, 8, -9, 10, 11, 12, 13, 14, 15, 16, 17,
    )  # fmt: skip


def test_a_layout_that_does_not_fit_the_tensors_is_refused(
    make_rig: Callable[..., Rig],
) -> None:
    layout = arena.plan((tensor("x"),), (tensor("y"),), 2, 4)
    large = (tensor("x", shape=(400,)),)
    unknown = (TensorSpec("x", "string", (1,), (1,), 8),)
    memory: Any = bytearray(layout.size_bytes)
    outputs = (tensor("y"),)
    with pytest.raises(ProtocolError, match="does not fit"):
        SessionCore(Opened(1, 1, 2, layout, large, outputs, False), memory)

    with pytest.raises(ProtocolError, match="fewer slots"):
        SessionCore(Opened(1, 1, 5, layout, (tensor("x"),), outputs, False), memory)

    with pytest.raises(UnsupportedModel, match="string"):
        SessionCore(Opened(1, 1, 2, layout, unknown, outputs, False), memory)


def test_missing_and_unknown_inputs_are_named(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig((tensor("image"), tensor("scale", shape=())), (tensor("y"),))
    image = bytes(16)
    with pytest.raises(BadInput, match="input 'scale' is missing"):
        rig.core.fill(0, {"image": image})

    with pytest.raises(BadInput, match="no input 'imgae'; its inputs: 'image', 'scale'"):
        rig.core.fill(0, {"imgae": image, "scale": 1})

    with pytest.raises(BadInput, match="no input 'more'"):
        rig.core.fill(0, {"image": image, "scale": 1, "more": 2})

    rig.core.fill(0, {"image": image, "scale": 1})


def test_memory_goes_with_the_last_view(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(*ADD_ONE)
    request, record = rig.send()
    rig.write_header(0, record.request_id, USUAL)
    rig.reply(record)
    view: Any = rig.core.take(request, False)["y"]
    with open("/proc/self/maps", encoding="ascii") as maps:
        before = sum("memfd:test" in line for line in maps)

    rig.core.lose()
    rig.core.forget()
    assert view.tolist() == [0, 0, 0, 0]
    del view, request

    with open("/proc/self/maps", encoding="ascii") as maps:
        assert sum("memfd:test" in line for line in maps) == before - 1
