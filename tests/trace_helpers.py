"""Reads a Perfetto trace back: tracks, slices and flows, by the schema of the package."""

from __future__ import annotations

import importlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from switchgear.daemon.cli.trace import SCHEMA

schema: Any = importlib.import_module(SCHEMA)
MONOTONIC = 3


@dataclass
class Slice:
    track: int
    name: str
    begin_ns: int
    end_ns: int
    flows: list[int]
    details: dict[str, str | int]


@dataclass
class Instant:
    track: int
    name: str
    time_ns: int
    ends: list[int]
    details: dict[str, str | int]


@dataclass
class Read:
    """`names` and `parents` are by track; processes are named with their pid."""

    names: dict[int, str] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    instants: list[Instant] = field(default_factory=list)
    values: dict[str, list[tuple[int, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    clocks: dict[int, int] = field(default_factory=dict)

    def on(self, name: str) -> list[Slice]:
        """The slices of all tracks of a name, by their beginning."""
        own = [one for one in self.slices if self.names[one.track] == name]
        return sorted(own, key=lambda one: one.begin_ns)


def read_trace(data: bytes) -> Read:
    """Checks on the way what every reader relies on: order, nesting and described tracks."""
    trace = schema.Trace.FromString(data)
    found = Read()
    open_slices: dict[int, list[Slice]] = defaultdict(list)
    last_ns = 0
    for packet in trace.packet:
        assert packet.trusted_packet_sequence_id == 1
        if packet.HasField("clock_snapshot"):
            found.clocks = {c.clock_id: c.timestamp for c in packet.clock_snapshot.clocks}
        elif packet.HasField("track_descriptor"):
            _describe(found, packet.track_descriptor)
        else:
            assert packet.timestamp_clock_id == MONOTONIC
            assert packet.timestamp >= last_ns, "events are in the order of time"
            last_ns = packet.timestamp
            assert packet.track_event.track_uuid in found.names, "a track that nobody described"
            _event(found, packet.timestamp, packet.track_event, open_slices)

    assert not any(open_slices.values()), "a slice without an end"
    assert trace.packet[0].sequence_flags == schema.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    return found


def _describe(found: Read, track: Any) -> None:
    assert track.uuid not in found.names
    found.names[track.uuid] = track.name or track.process.process_name
    if track.parent_uuid:
        assert track.parent_uuid in found.names
        found.parents[track.uuid] = track.parent_uuid

    if track.HasField("process"):
        found.pids[track.uuid] = track.process.pid


def _event(found: Read, time_ns: int, event: Any, open_slices: dict[int, list[Slice]]) -> None:
    track = event.track_uuid
    details = {
        one.name: one.int_value if one.HasField("int_value") else one.string_value
        for one in event.debug_annotations
    }
    if event.type == schema.TrackEvent.TYPE_SLICE_BEGIN:
        assert not open_slices[track], "slices of one track do not overlap"
        one = Slice(track, event.name, time_ns, 0, list(event.flow_ids), details)
        open_slices[track].append(one)
        found.slices.append(one)
    elif event.type == schema.TrackEvent.TYPE_SLICE_END:
        open_slices[track].pop().end_ns = time_ns
    elif event.type == schema.TrackEvent.TYPE_INSTANT:
        ends = list(event.terminating_flow_ids)
        found.instants.append(Instant(track, event.name, time_ns, ends, details))
    else:
        assert event.type == schema.TrackEvent.TYPE_COUNTER
        found.values[found.names[track]].append((time_ns, event.double_counter_value))
