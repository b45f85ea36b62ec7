"""Figures for people from a daemon's metrics: latencies, outcomes, temperatures, breakers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from switchgear.daemon.telemetry.families import Distribution, Family

_NONE: Final = "none"
# A breaker's states as people name them; closed is nothing to tell.
PEOPLE: Final = {
    "shedding": "shedding",
    "open": "tripped",
    "half_open": "recovering",
    "ramping": "recovering",
    "quarantined": "degraded",
}


@dataclass(frozen=True, slots=True)
class Zone:
    """One sensor; `headroom_c` is how far its device is below its limit, None: not known."""

    name: str
    device: str
    temperature_c: float
    headroom_c: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """What one answer says. `latency` is by backend and over all models, from arrival to reply;
    `outcomes` by backend and outcome, `breakers` by level and subject: the present state;
    `devices` names the device of each backend that has one."""

    latency: Mapping[str, Distribution]
    outcomes: Mapping[tuple[str, str], int]
    zones: Sequence[Zone]
    breakers: Mapping[tuple[str, str], str]
    devices: Mapping[str, str]

    def zone_of(self, backend: str) -> Zone | None:
        """The hottest sensor of a backend's device."""
        device = self.devices.get(backend, backend)
        own = [zone for zone in self.zones if zone.device == device]
        return max(own, key=lambda zone: zone.temperature_c, default=None)

    def breaker_of(self, backend: str) -> str:
        """The state of a backend's breaker, or of its device's where that says more, in a word
        for people; empty where nothing stands against it."""
        places = (("backend", backend), ("device", self.devices.get(backend, backend)))
        states = [self.breakers[place] for place in places if place in self.breakers]
        return next((PEOPLE[state] for state in states if state in PEOPLE), "")


def read_figures(families: Iterable[Family]) -> Figures:
    """Reads what is there; what an older or newer daemon does not tell stays empty."""
    by_name = {family.name: family for family in families}
    return Figures(
        _latency(by_name.get("switchgear_request_duration_seconds")),
        _outcomes(by_name.get("switchgear_requests_total")),
        _zones(by_name),
        _breakers(by_name.get("switchgear_breaker_state")),
        {
            row["backend"]: row["device"]
            for row, _ in _rows(by_name.get("switchgear_backend_device"))
        },
    )


def _rows(family: Family | None) -> Iterable[tuple[dict[str, str], float | Distribution]]:
    if family is not None:
        for values, value in family.samples.items():
            yield dict(zip(family.labels, values, strict=True)), value


def _latency(family: Family | None) -> dict[str, Distribution]:
    found: dict[str, Distribution] = {}
    for row, value in _rows(family):
        if isinstance(value, Distribution):
            backend = row.get("backend", "")
            found[backend] = added(found[backend], value) if backend in found else value

    return found


def _outcomes(family: Family | None) -> dict[tuple[str, str], int]:
    found: Counter[tuple[str, str]] = Counter()
    for row, value in _rows(family):
        if not isinstance(value, Distribution):
            found[row.get("backend", _NONE), row.get("outcome", "")] += int(value)

    return dict(found)


def _zones(by_name: Mapping[str, Family]) -> list[Zone]:
    headroom = {
        (row["zone"], row["device"]): value
        for row, value in _rows(by_name.get("switchgear_headroom_celsius"))
        if isinstance(value, float)
    }
    return [
        Zone(row["zone"], row["device"], value, headroom.get((row["zone"], row["device"])))
        for row, value in _rows(by_name.get("switchgear_temperature_celsius"))
        if isinstance(value, float)
    ]


def _breakers(family: Family | None) -> dict[tuple[str, str], str]:
    return {
        (row["level"], row["subject"]): row["state"]
        for row, value in _rows(family)
        if value == 1
    }


def added(one: Distribution, other: Distribution) -> Distribution:
    """The sum of two histograms of the same buckets."""
    counts = [a + b for a, b in zip(one.counts, other.counts, strict=True)]
    return Distribution(one.bounds, counts, one.total + other.total)


def since(now: Distribution, before: Distribution | None) -> Distribution:
    """What came between two answers; all of it where the daemon began anew."""
    if before is None or list(before.bounds) != list(now.bounds):
        return now

    counts = [a - b for a, b in zip(now.counts, before.counts, strict=True)]
    if min(counts) < 0:
        return now

    return Distribution(now.bounds, counts, max(0.0, now.total - before.total))


def quantile(times: Distribution, share: float) -> float | None:
    """The time in seconds under which `share` of the requests were, as far as buckets tell: in
    a straight line within the bucket. None without requests; the last bound above it."""
    wanted = share * times.count
    if not times.count:
        return None

    below = 0.0
    low = 0.0
    for bound, count in zip(times.bounds, times.counts, strict=False):
        if count and below + count >= wanted:
            return low + (bound - low) * (wanted - below) / count

        below += count
        low = bound

    return low


def ms_text(seconds: float | None) -> str:
    """Milliseconds with three figures: `0.21`, `4.9`, `68`; a dash for None."""
    if seconds is None:
        return "-"

    value = 1e3 * seconds
    digits = 2 if value < 1 else 1 if value < 10 else 0
    return f"{value:.{digits}f}"
