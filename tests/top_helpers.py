"""Statuses and metrics for the tests of `switchgear top`, and the text of its screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from switchgear.daemon.telemetry.device_families import (
    BreakerRow,
    ZoneRow,
    backend_device_families,
    breaker_families,
    zone_families,
)
from switchgear.daemon.telemetry.families import Distribution, Family

if TYPE_CHECKING:
    from textual.app import App

    from switchgear.client import Status

BOUNDS = (0.001, 0.002, 0.005, 0.01)


def status(**changes: Any) -> Status:
    """What `GetStatus` answers of a daemon with two backends, with some fields changed."""
    fields: dict[str, Any] = {
        "version": "0.1.0",
        "pid": 4711,
        "ready": True,
        "state": "serving",
        "uptime_s": 3725.0,
        "rss_mb": 41.2,
        "problems": [],
        "backends": [
            {"name": "cpu", "state": "ready", "reason": "sum and product exact"},
            {"name": "vulkan", "state": "ready", "reason": "matmul exact"},
        ],
        "workers": [worker("cpu", "interactive", 4712), worker("vulkan", "interactive", 4713)],
        "models": [{"model": "ab" * 32, "name": "face", "status": "ready"}],
        "sessions": [],
        "jobs": [],
        "fingerprint": {"stale": [], "measuring": False},
        "connections": 1,
        "idle_connections": 0,
        "counters": {},
    }
    return cast("Status", {**fields, **changes})


def worker(backend: str, lane: str, pid: int, **changes: Any) -> dict[str, Any]:
    return {
        "backend": backend,
        "lane": lane,
        "group": "1000",
        "pid": pid,
        "state": "ready",
        "threads": 1,
        "engine": "engine",
        "engine_version": "1",
        "restarts": 0,
        "last_end": "",
        "queued": 0,
        "running": 0,
        "rss_mb": 87.4,
        **changes,
    }


def metrics(
    counts: dict[str, list[int]],
    failed: dict[tuple[str, str], int] | None = None,
    breaker: str = "closed",
    temperature_mc: int | None = None,
) -> list[Family]:
    """Requests by backend and bucket; a breaker and a zone of the GPU where they are given."""
    latency = Family(
        "switchgear_request_duration_seconds", "histogram", "", ("model", "hash", "backend")
    )
    requests = Family(
        "switchgear_requests_total", "counter", "", ("model", "hash", "backend", "outcome")
    )
    for backend, buckets in counts.items():
        value = Distribution(BOUNDS, buckets, 0.001 * sum(buckets))
        latency.set(value, "face", "ab" * 6, backend)
        requests.set(sum(buckets), "face", "ab" * 6, backend, "ok")

    for (backend, outcome), count in (failed or {}).items():
        requests.set(count, "face", "ab" * 6, backend, outcome)

    rows = [BreakerRow("device", "gpu0", breaker)]
    zones = []
    if temperature_mc is not None:
        zones.append(
            ZoneRow("gpu-thermal", "gpu0", temperature_mc, 0.02, 65_000 - temperature_mc)
        )

    return [
        latency,
        requests,
        *breaker_families(rows),
        *zone_families(zones),
        *backend_device_families({"cpu": "cpu", "vulkan": "gpu0"}),
    ]


def screen_text(app: App[Any]) -> list[str]:
    """The lines that are on the screen, without their colours, less blanks at their ends."""
    width, height = app.size
    lines = []
    for strip in app.screen._compositor.render_strips()[:height]:
        text = "".join(segment.text for segment in strip)
        assert len(text) <= width
        lines.append(text.rstrip())

    return lines
