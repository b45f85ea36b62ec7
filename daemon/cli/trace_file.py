"""Writes a Perfetto trace: https://perfetto.dev/docs/reference/synthetic-track-event

A process track for each app and each worker, the workers' with their queues and runs; slices
that overlap lie on tracks of one name, which the viewer shows as one. An arrow leads from a
request to its wait, its run and its reply.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from switchgear.ipc.record import Reason

if TYPE_CHECKING:
    from switchgear.daemon.cli.trace_rows import Rows, TracedLane, TracedRequest

# protos/perfetto/common/builtin_clock.proto
_REALTIME: Final = 1
_MONOTONIC: Final = 3
_BOOTTIME: Final = 6
_CLOCKS: Final = (
    (_MONOTONIC, time.CLOCK_MONOTONIC),
    (_BOOTTIME, time.CLOCK_BOOTTIME),
    (_REALTIME, time.CLOCK_REALTIME),
)
# One writer: every packet is of one sequence.
_SEQUENCE: Final = 1
# Of what happens at one moment: an instant, then ends, then begins.
_INSTANT: Final = 0
_END: Final = 1
_BEGIN: Final = 2
_PRIORITIES: Final = {1: "high", 2: "normal", 3: "batch"}
# Why the backend was chosen.
_REASONS: Final = {int(reason): reason.name.lower() for reason in Reason}


def write_trace(rows: Rows, schema: Any) -> bytes:
    """The bytes of the trace; `schema` is perfetto's module of trace messages."""
    return _Writer(rows, schema).write()


class _Writer:
    """Builds one trace."""

    def __init__(self, rows: Rows, schema: Any) -> None:
        self._rows = rows
        self._schema = schema
        self._trace = schema.Trace()
        self._events: list[tuple[int, int, int, Any]] = []
        self._uuid = 0
        self._kind = schema.TrackEvent

    def write(self) -> bytes:
        self._clocks()
        self._apps()
        self._workers()
        self._others()
        self._events.sort(key=lambda event: event[:3])
        for _, _, _, packet in self._events:
            self._trace.packet.append(packet)

        data: bytes = self._trace.SerializeToString()
        return data

    def _clocks(self) -> None:
        """How the clocks stand to each other, so that other traces of the device fit."""
        packet = self._packet(self._trace.packet.add())
        packet.sequence_flags = self._schema.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        snapshot = packet.clock_snapshot
        snapshot.primary_trace_clock = _BOOTTIME
        for number, clock in _CLOCKS:
            entry = snapshot.clocks.add()
            entry.clock_id = number
            entry.timestamp = time.clock_gettime_ns(clock)

    # Tracks.

    def _packet(self, packet: Any) -> Any:
        packet.trusted_packet_sequence_id = _SEQUENCE
        return packet

    def track(self, name: str, parent: int = 0, unit: str | None = None) -> int:
        """Describes a track; one with a `unit` takes values."""
        self._uuid += 1
        descriptor = self._packet(self._trace.packet.add()).track_descriptor
        descriptor.uuid = self._uuid
        descriptor.name = name
        if parent:
            descriptor.parent_uuid = parent

        if unit is not None:
            descriptor.counter.unit_name = unit

        return self._uuid

    def _process(self, pid: int, name: str) -> int:
        # Process 0 is the kernel's: a worker that was gone has a plain track.
        if not pid:
            return self.track(name)

        self._uuid += 1
        descriptor = self._packet(self._trace.packet.add()).track_descriptor
        descriptor.uuid = self._uuid
        descriptor.process.pid = pid
        descriptor.process.process_name = name
        return self._uuid

    # Events.

    def _at(self, time_ns: int, order: int, kind: int, track: int) -> Any:
        packet = self._packet(self._schema.TracePacket())
        packet.timestamp = time_ns
        packet.timestamp_clock_id = _MONOTONIC
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        self._events.append((time_ns, order, len(self._events), packet))
        return packet.track_event

    def _slice(
        self,
        track: int,
        span_ns: tuple[int, int],
        name: str,
        flow: int,
        details: Mapping[str, str | int] | None = None,
    ) -> None:
        begin_ns, end_ns = span_ns
        event = self._at(begin_ns, _BEGIN, self._kind.TYPE_SLICE_BEGIN, track)
        event.name = name
        event.flow_ids.append(flow)
        _annotate(event, details or {})
        self._at(max(end_ns, begin_ns + 1), _END, self._kind.TYPE_SLICE_END, track)

    # What was recorded.

    def _apps(self) -> None:
        """Apps with a track for each session, where its requests and their replies lie."""
        apps: dict[int, int] = {}
        for number, session in sorted(self._rows.sessions.items()):
            if session.pid not in apps:
                name = f"app {_command_of(session.pid)}".strip()
                apps[session.pid] = self._process(session.pid, name)

            rows = _Stack(self, f"session {number}: {session.model}", apps[session.pid])
            own = [
                (flow, request)
                for flow, request in enumerate(self._rows.requests, 1)
                if request.session == number
            ]
            for flow, request in sorted(own, key=lambda row: row[1].arrival_ns):
                self._request(rows, flow, request)

    def _request(self, rows: _Stack, flow: int, request: TracedRequest) -> None:
        end_ns = max(request.reply_ns, request.arrival_ns + 1)
        track = rows.take(request.arrival_ns, end_ns)
        lane = self._rows.lanes.get(request.lane)
        details: dict[str, str | int] = {
            "outcome": request.outcome,
            "backend": lane.backend if lane is not None else "none",
            "priority": _PRIORITIES.get(request.priority, str(request.priority)),
            "retries": request.attempts,
            "reason": _REASONS.get(request.reason, str(request.reason)),
        }
        span_ns = (request.arrival_ns, end_ns)
        self._slice(track, span_ns, f"request {request.request}", flow, details)
        reply = self._at(end_ns, _INSTANT, self._kind.TYPE_INSTANT, track)
        reply.name = "reply" if request.outcome == "ok" else f"reply: {request.outcome}"
        reply.terminating_flow_ids.append(flow)

    def _workers(self) -> None:
        """Workers with their queue (what waited for them) and their runs."""
        for number, lane in sorted(self._rows.lanes.items()):
            own = [
                (flow, request)
                for flow, request in enumerate(self._rows.requests, 1)
                if request.lane == number
            ]
            process = self._process(lane.pid, f"worker {lane.label}")
            queue = _Stack(self, f"queue of {lane.label}", process)
            for flow, request in sorted(own, key=lambda row: row[1].arrival_ns):
                end_ns = max(request.dispatch_ns, request.arrival_ns + 1)
                track = queue.take(request.arrival_ns, end_ns)
                name = f"wait {request.request}"
                self._slice(track, (request.arrival_ns, end_ns), name, flow)

            self._runs(process, lane, own)

    def _runs(
        self, process: int, lane: TracedLane, own: list[tuple[int, TracedRequest]]
    ) -> None:
        """One after the other. The length is the worker's own; the end is when its reply came,
        so that a run is drawn up to one hop late."""
        track = self.track(f"runs of {lane.label}", process)
        before_ns = 0
        for flow, request in sorted(own, key=lambda row: row[1].reply_ns):
            if not request.run_ns:
                continue

            begin_ns = max(request.reply_ns - request.run_ns, request.dispatch_ns, before_ns)
            before_ns = max(request.reply_ns, begin_ns + 1)
            details: dict[str, str | int] = {"run_ns": request.run_ns}
            span_ns = (begin_ns, before_ns)
            self._slice(track, span_ns, f"run {request.request}", flow, details)

    def _others(self) -> None:
        """Counters (queues, temperatures) and events (breakers, workers' ends)."""
        tracks: dict[str, int] = {}
        for counter in self._rows.counters:
            if counter.track not in tracks:
                tracks[counter.track] = self.track(counter.track, unit=counter.unit)

            track = tracks[counter.track]
            event = self._at(counter.time_ns, _INSTANT, self._kind.TYPE_COUNTER, track)
            event.double_counter_value = counter.value

        tracks.clear()
        for happened in self._rows.events:
            if happened.track not in tracks:
                tracks[happened.track] = self.track(happened.track)

            track = tracks[happened.track]
            event = self._at(happened.time_ns, _INSTANT, self._kind.TYPE_INSTANT, track)
            event.name = happened.name
            _annotate(event, happened.details)


class _Stack:
    """Tracks of one name for slices that overlap: each slice gets one that is free."""

    def __init__(self, writer: _Writer, name: str, parent: int) -> None:
        self._writer = writer
        self._name = name
        self._parent = parent
        self._free_at_ns: list[int] = []
        self._tracks: list[int] = []

    def take(self, begin_ns: int, end_ns: int) -> int:
        """The track for a slice; call it in the order of the beginnings."""
        for index, free_ns in enumerate(self._free_at_ns):
            if free_ns <= begin_ns:
                self._free_at_ns[index] = end_ns
                return self._tracks[index]

        self._free_at_ns.append(end_ns)
        self._tracks.append(self._writer.track(self._name, self._parent))
        return self._tracks[-1]


def _annotate(event: Any, details: Mapping[str, str | int]) -> None:
    for name, value in details.items():
        annotation = event.debug_annotations.add()
        annotation.name = name
        if isinstance(value, int):
            annotation.int_value = value
        else:
            annotation.string_value = value


def _command_of(pid: int) -> str:
    """The process's name, while it is there; empty afterwards."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""
