"""The record: what is packed comes out again, and nothing else is taken for one."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from switchgear.ipc.errors import BadRecord
from switchgear.ipc.record import (
    RECORD_BYTES,
    RECORD_VERSION,
    RESERVED,
    STATUS_OFFSET,
    Kind,
    Record,
    check,
    check_request,
)

BITS = {
    "flags": 16, "epoch": 32, "request_id": 64, "input_slot": 16, "output_slot": 16,
    "priority": 8, "capture_clock": 8, "timeout_us": 64, "capture_ns": 64, "status_domain": 16,
    "backend": 8, "precision": 8, "reason": 16, "retries": 16, "tried": 32,
    "temperature_age_ms": 32, "retry_after_ms": 32, "queue_ns": 64, "run_ns": 64,
    "total_ns": 64, "binding": 32, "deadline_ns": 64,
}  # fmt: skip
REQUEST_FIELDS = (
    "flags", "epoch", "request_id", "input_slot", "output_slot", "priority", "capture_clock",
    "timeout_us", "capture_ns",
)  # fmt: skip

records = st.builds(
    Record,
    kind=st.sampled_from(list(Kind)).map(int),
    trace_id=st.binary(min_size=16, max_size=16),
    status_code=st.integers(-(2**31), 2**31 - 1),
    **{name: st.integers(0, 2**bits - 1) for name, bits in BITS.items()},
)
requests = st.builds(
    Record,
    kind=st.sampled_from([Kind.INFER, Kind.CANCEL, Kind.ARENA_ADD]).map(int),
    trace_id=st.binary(min_size=16, max_size=16),
    **{name: st.integers(0, 2 ** BITS[name] - 1) for name in REQUEST_FIELDS},
)


def test_every_field_is_drawn() -> None:
    assert {f.name for f in fields(Record)} == {*BITS, "kind", "trace_id", "status_code"}


@given(records)
def test_a_record_comes_back(record: Record) -> None:
    data = record.pack()
    assert len(data) == RECORD_BYTES
    assert Record.unpack(data) == record


@given(st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES))
def test_any_bytes_are_refused_or_mean_themselves(data: bytes) -> None:
    try:
        record = Record.unpack(data)
    except BadRecord:
        assert (
            data[1] != RECORD_VERSION
            or not Kind.INFER <= data[0] <= Kind.GOAWAY
            or any(any(data[part]) for part in RESERVED)
        )
    else:
        assert record.pack() == data


@given(st.binary(max_size=300).filter(lambda data: len(data) != RECORD_BYTES))
def test_a_wrong_length_is_refused(data: bytes) -> None:
    with pytest.raises(BadRecord, match="128 bytes"):
        check(data)

    with pytest.raises(BadRecord):
        check_request(bytearray(data))


@given(requests)
def test_a_request_is_taken(record: Record) -> None:
    check_request(bytearray(record.pack()))


@given(requests, st.integers(STATUS_OFFSET, RECORD_BYTES - 1), st.integers(1, 255))
def test_a_request_sets_nothing_of_a_reply(record: Record, offset: int, value: int) -> None:
    data = bytearray(record.pack())
    data[offset] = value
    with pytest.raises(BadRecord):
        check_request(data)


@given(requests, st.integers(0, 255), st.integers(0, 255))
def test_other_types_and_versions_are_refused(record: Record, kind: int, version: int) -> None:
    data = bytearray(record.pack())
    data[0], data[1] = kind, version
    taken = kind in (Kind.INFER, Kind.CANCEL, Kind.ARENA_ADD) and version == RECORD_VERSION
    if taken:
        check_request(data)
    else:
        with pytest.raises(BadRecord):
            check_request(data)
