"""Metrics of what lies beyond the daemon's process: breakers, temperatures, pools, caches.

Each function takes plain rows from whoever has them. Without rows its families have no samples
and are left out: a value that nobody measured is not made up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from switchgear.daemon.telemetry.families import Family

BREAKER_STATES: Final = (
    "closed",
    "shedding",
    "open",
    "half_open",
    "ramping",
    "quarantined",
)


@dataclass(frozen=True, slots=True)
class BreakerRow:
    """One breaker since the daemon's start. `level` is device, backend or pair; `subject`
    names it within that level. `trips` counts openings by cause, `probes` series of probes by
    how they ended (`good`, `bad`)."""

    level: str
    subject: str
    state: str
    trips: dict[str, int] = field(default_factory=dict)
    probes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ZoneRow:
    """One sensor's last reading, in millidegrees; `headroom_mc` is how far its device is below
    the threshold it trips at, None where it has none."""

    zone: str
    device: str
    temperature_mc: int
    age_s: float
    headroom_mc: int | None = None


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One memory pool. `largest_free_bytes` is its largest free block."""

    pool: str
    used_bytes: int
    free_bytes: int
    largest_free_bytes: int
    system_allocations: int

    @property
    def fragmentation(self) -> float | None:
        """1 - largest free / total free; None where nothing is free."""
        if not self.free_bytes:
            return None

        return 1 - self.largest_free_bytes / self.free_bytes


@dataclass(frozen=True, slots=True)
class CacheRow:
    """One cache since the daemon's start; what is None is not known of it."""

    cache: str
    hits: int | None = None
    misses: int | None = None
    size_bytes: int | None = None


def breaker_families(rows: Iterable[BreakerRow]) -> Iterator[Family]:
    """The state as one series a state (1 for the present one), trips and probes."""
    labels = ("level", "subject")
    state = Family(
        "switchgear_breaker_state", "gauge", "1 for the present state.", (*labels, "state")
    )
    trips = Family(
        "switchgear_breaker_trips_total", "counter", "Openings, by cause.", (*labels, "reason")
    )
    probes = Family(
        "switchgear_breaker_probes_total",
        "counter",
        "Series of probes, by end.",
        (*labels, "result"),
    )
    for row in rows:
        for name in BREAKER_STATES:
            state.set(int(row.state == name), row.level, row.subject, name)

        for reason, count in row.trips.items():
            trips.set(count, row.level, row.subject, reason)

        for result, count in row.probes.items():
            probes.set(count, row.level, row.subject, result)

    yield from (state, trips, probes)


def zone_families(rows: Iterable[ZoneRow]) -> Iterator[Family]:
    temperature = Family(
        "switchgear_temperature_celsius", "gauge", "The last reading.", ("zone", "device")
    )
    age = Family(
        "switchgear_temperature_age_seconds",
        "gauge",
        "How old the last reading is.",
        ("zone", "device"),
    )
    headroom = Family(
        "switchgear_headroom_celsius",
        "gauge",
        "How far the device is below the threshold that it trips at.",
        ("zone", "device"),
    )
    for row in rows:
        temperature.set(row.temperature_mc / 1000, row.zone, row.device)
        age.set(row.age_s, row.zone, row.device)
        if row.headroom_mc is not None:
            headroom.set(row.headroom_mc / 1000, row.zone, row.device)

    yield from (temperature, age, headroom)


def pool_families(rows: Iterable[PoolRow]) -> Iterator[Family]:
    size = Family(
        "switchgear_pool_bytes", "gauge", "Bytes of a memory pool.", ("pool", "state")
    )
    fragmentation = Family(
        "switchgear_pool_fragmentation_ratio",
        "gauge",
        "1 - largest free block / all that is free.",
        ("pool",),
    )
    allocations = Family(
        "switchgear_pool_system_allocations_total",
        "counter",
        "Times that a pool asked the system for memory.",
        ("pool",),
    )
    for row in rows:
        size.set(row.used_bytes, row.pool, "used")
        size.set(row.free_bytes, row.pool, "free")
        allocations.set(row.system_allocations, row.pool)
        if row.fragmentation is not None:
            fragmentation.set(row.fragmentation, row.pool)

    yield from (size, fragmentation, allocations)


def cache_families(rows: Iterable[CacheRow]) -> Iterator[Family]:
    requests = Family(
        "switchgear_cache_requests_total",
        "counter",
        "Questions to a cache, by result.",
        ("cache", "result"),
    )
    size = Family("switchgear_cache_bytes", "gauge", "Bytes that a cache holds.", ("cache",))
    for row in rows:
        if row.hits is not None:
            requests.set(row.hits, row.cache, "hit")

        if row.misses is not None:
            requests.set(row.misses, row.cache, "miss")

        if row.size_bytes is not None:
            size.set(row.size_bytes, row.cache)

    yield from (requests, size)


def backend_device_families(devices: Mapping[str, str]) -> Iterator[Family]:
    """Which device each backend is on; `devices` is by backend."""
    family = Family(
        "switchgear_backend_device",
        "gauge",
        "Always 1: the device of a backend.",
        ("backend", "device"),
    )
    for backend, device in devices.items():
        family.set(1, backend, device)

    yield family
