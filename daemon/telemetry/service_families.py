"""Metrics of the daemon itself, read from its objects when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from switchgear.daemon import status
from switchgear.daemon.telemetry.device_families import CacheRow, cache_families
from switchgear.daemon.telemetry.families import Family
from switchgear.ipc.process import rss_mb

if TYPE_CHECKING:
    from switchgear.daemon.lane import Lane
    from switchgear.daemon.service import Service

_LANE: tuple[str, ...] = ("backend", "lane", "group")
_MIB = 1 << 20


def collect(service: Service, viewer: int | None) -> Iterator[Family]:
    """Reads `/proc` once a process; nothing else here waits. Workers of other isolation groups
    are the operators' only, as in the status."""
    yield _single("switchgear_ready", "1 while requests are served.", int(service.ready))
    info = Family("switchgear_build_info", "gauge", "Always 1.", ("version",))
    info.set(1, service.version)
    yield info
    yield _single(
        "switchgear_uptime_seconds", "Since the daemon's start.", service.info()["uptime_s"]
    )
    yield _single(
        "switchgear_problems",
        "What the configuration asks for and is not there.",
        len(service.problems),
    )
    backends = Family(
        "switchgear_backend_ready",
        "gauge",
        "1 where the backend has given its known answer.",
        ("backend",),
    )
    for row in status.backend_states(service):
        backends.set(int(row["state"] == "ready"), row["name"])

    yield backends
    yield _counter(
        "switchgear_sessions_opened_total", "Sessions opened.", service.sessions.opened
    )
    sessions = service.sessions.all()
    yield _single("switchgear_sessions", "Sessions open now.", len(sessions))
    yield _single(
        "switchgear_requests_in_flight",
        "Requests that are not answered yet.",
        service.sessions.in_flight,
    )
    arena_bytes = sum(session.layout.size_bytes for session in sessions)
    yield _single(
        "switchgear_arena_bytes", "Shared memory that sessions hold for tensors.", arena_bytes
    )
    filled_bytes = sum(session.layout.filled_bytes for session in sessions)
    yield _single(
        "switchgear_arena_fragmentation_ratio",
        "The share of it between tensors, which are aligned, and slots, which are whole pages.",
        1 - filled_bytes / arena_bytes if arena_bytes else 0.0,
    )
    yield _single(
        "switchgear_connections",
        "Clients connected to the control socket.",
        len(service.server.connections),
    )
    yield _single("switchgear_models", "Models loaded.", len(service.models.all_for(0)))
    yield from _lanes(service, viewer)
    yield from cache_families(_caches(service))


def _caches(service: Service) -> Iterator[CacheRow]:
    """Verdicts on models and on pairs, and the folders of what is prepared for each model."""
    for name, verdicts in (
        ("models", service.models.verdicts),
        ("pairs", service.preparing.verdicts),
    ):
        yield CacheRow(name, verdicts.hits, verdicts.misses, verdicts.size_bytes)

    sizes = [
        max(
            (int(pair.figures.get("cache_bytes", 0)) for pair in model.pairs.values()),
            default=0,
        )
        for model in service.models.all_for(0)
    ]
    yield CacheRow("prepared", size_bytes=sum(sizes))


def _lanes(service: Service, viewer: int | None) -> Iterator[Family]:
    memory = Family(
        "switchgear_memory_rss_bytes",
        "gauge",
        "Resident memory of a process; files that several map count for each.",
        ("process", *_LANE),
    )
    memory.set(rss_mb() * _MIB, "daemon", "", "", "")
    up = Family("switchgear_worker_up", "gauge", "1 while the worker takes requests.", _LANE)
    restarts = Family(
        "switchgear_worker_restarts_total", "counter", "Ends that a restart followed.", _LANE
    )
    queued = Family("switchgear_queue_length", "gauge", "Requests that wait.", _LANE)
    running = Family("switchgear_running", "gauge", "Requests that a worker has.", _LANE)
    for lane in _visible(service, viewer):
        labels = (lane.backend, lane.name, lane.group)
        worker = lane.worker
        up.set(int(worker is not None and worker.state == "ready"), *labels)
        restarts.set(lane.restarts, *labels)
        queued.set(lane.queued, *labels)
        running.set(lane.running, *labels)
        if worker is not None:
            memory.set(worker.rss_mb * _MIB, "worker", *labels)

    yield from (memory, up, restarts, queued, running)


def _visible(service: Service, viewer: int | None) -> list[Lane]:
    lanes = service.pool.lanes()
    if viewer is None or service.is_operator(viewer):
        return lanes

    group = service.pool.group_of(viewer)
    return [lane for lane in lanes if lane.group == group]


def _single(name: str, text: str, value: float) -> Family:
    family = Family(name, "gauge", text)
    family.set(value)
    return family


def _counter(name: str, text: str, value: float) -> Family:
    family = Family(name, "counter", text)
    family.set(value)
    return family
