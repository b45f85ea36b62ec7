"""The EVENT record: what is packed comes out again, at the places that the document names."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from switchgear.daemon.protocol.answers import PEOPLE
from switchgear.daemon.session_events import AHEAD_RECORDS, HEADROOM_STEPS_C
from switchgear.ipc.errors import BadRecord
from switchgear.ipc.event import NO_HEADROOM, WHOLE_SHARE, EventKind, EventRecord, State
from switchgear.ipc.record import (
    NO_READING,
    NO_SLOT,
    RECORD_BYTES,
    RECORD_VERSION,
    Clock,
    Kind,
    Record,
    check,
    check_request,
)

PROTOCOL: Final = (Path(__file__).parents[1] / "docs/protocol.md").read_text(encoding="utf-8")
# Fields by their bits, and by the document's names for them.
BITS: Final = {
    "kind": 16, "backend": 8, "precision": 8, "state": 8, "device_state": 8, "share": 16,
    "temperature_age_ms": 32, "retry_after_ms": 32, "number": 64, "epoch": 32, "at_ns": 64,
}  # fmt: skip
NAMES: Final = {
    "epoch": "epoch", "number": "number", "time": "at_ns", "backend": "backend",
    "precision": "precision", "event": "kind", "state": "state",
    "device's state": "device_state", "share": "share", "temperature age": "temperature_age_ms",
    "retry after": "retry_after_ms", "headroom": "headroom_mc",
}  # fmt: skip

headrooms = st.none() | st.integers(NO_HEADROOM + 1, 2**31 - 1)
events = st.builds(
    EventRecord,
    headroom_mc=headrooms,
    **{name: st.integers(0, 2**bits - 1) for name, bits in BITS.items()},
)


def test_every_field_is_drawn() -> None:
    assert {field.name for field in fields(EventRecord)} == {*BITS, "headroom_mc"}


@given(events)
def test_an_event_comes_back(event: EventRecord) -> None:
    data = event.pack()
    assert len(data) == RECORD_BYTES
    check(data)
    assert EventRecord.unpack(data) == event


@given(events)
def test_it_is_a_record_of_its_type_and_of_no_request(event: EventRecord) -> None:
    record = Record.unpack(event.pack())
    assert record.kind == Kind.EVENT
    assert (record.input_slot, record.output_slot) == (NO_SLOT, NO_SLOT)
    assert (record.epoch, record.backend, record.precision) == (
        *(event.epoch, event.backend, event.precision),
    )
    assert (record.capture_clock, record.capture_ns) == (Clock.MONOTONIC, event.at_ns)
    assert record.temperature_age_ms == event.temperature_age_ms
    assert record.retry_after_ms == event.retry_after_ms
    with pytest.raises(BadRecord):
        check_request(bytearray(event.pack()))


@given(st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES) | events.map(EventRecord.pack))
def test_any_bytes_are_refused_or_mean_themselves(data: bytes) -> None:
    try:
        event = EventRecord.unpack(data)
    except BadRecord:
        assert data[0] != Kind.EVENT or data[1] != RECORD_VERSION
    else:
        assert EventRecord.unpack(event.pack()) == event


@given(st.binary(max_size=300).filter(lambda data: len(data) != RECORD_BYTES))
def test_a_wrong_length_is_refused(data: bytes) -> None:
    with pytest.raises(BadRecord):
        EventRecord.unpack(data)


@given(events, st.integers(0, 2**70), st.integers(-(2**40), 2**40))
def test_what_is_beyond_its_field_becomes_the_largest(
    event: EventRecord, time_ms: int, headroom_mc: int
) -> None:
    large = replace(
        event, temperature_age_ms=time_ms, retry_after_ms=time_ms, headroom_mc=headroom_mc
    )
    told = EventRecord.unpack(large.pack())
    assert told.retry_after_ms == told.temperature_age_ms == min(time_ms, 2**32 - 1)
    assert told.headroom_mc == max(1 - 2**31, min(headroom_mc, 2**31 - 1))


# The document.


def table() -> list[list[str]]:
    """Offset, bytes, field and meaning of each row of the event's table."""
    lines = PROTOCOL.partition("### EVENT")[2].partition("## ")[0].splitlines()
    cells = [
        [c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    return cells[2:]


@given(events)
def test_the_document_names_every_byte(event: EventRecord) -> None:
    data = bytearray(event.pack())
    read = {}
    for offset, size, name, meaning in table():
        place = slice(int(offset), int(offset) + int(size))
        signed = meaning.startswith("signed")
        read[name] = int.from_bytes(data[place], "little", signed=signed)
        data[place] = bytes(int(size))

    assert not any(data), "a byte that the document says is zero"
    headroom_mc = event.headroom_mc
    assert read == {
        "type": Kind.EVENT,
        "version": RECORD_VERSION,
        "input slot": NO_SLOT,
        "output slot": NO_SLOT,
        "clock": Clock.MONOTONIC,
        **{told: getattr(event, name) for told, name in NAMES.items()},
        "headroom": NO_HEADROOM if headroom_mc is None else headroom_mc,
    }


def test_the_numbers_in_the_document() -> None:
    meanings = {name: meaning for _, _, name, meaning in table()}
    told = dict(re.findall(r"(\d) (\w+)", meanings["event"]))
    assert told == {str(int(kind)): kind.name.lower() for kind in EventKind if kind}
    assert str(NO_READING) in meanings["temperature age"]
    assert str(NO_HEADROOM) in meanings["headroom"]
    assert WHOLE_SHARE == 1000
    assert "thousandths" in meanings["share"]
    steps = ", ".join(f"{step_c:g}" for step_c in HEADROOM_STEPS_C[:-1])
    text = " ".join(PROTOCOL.split())
    assert f"falls to {steps} or {HEADROOM_STEPS_C[-1]:g} °C below the trip" in text
    assert f"`slots` + {AHEAD_RECORDS} records lie unread" in text


def test_states_are_the_protocols_and_kinds_have_the_same_numbers() -> None:
    assert {state.name.lower() for state in State if state} == set(PEOPLE.values())
    for state in State:
        assert EventKind[state.name] == int(state)
