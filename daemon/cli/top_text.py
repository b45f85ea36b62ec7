"""The lines of `switchgear top`: plain text of the width that there is, no colour needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from switchgear.daemon.cli.tables import cut
from switchgear.daemon.cli.top_figures import ms_text

if TYPE_CHECKING:
    from switchgear.daemon.cli.top_figures import Zone
    from switchgear.daemon.cli.top_picture import BackendLine, Picture, QueueLine

_BARS: Final = "▁▂▃▄▅▆▇█"
_NO_POINT: Final = " "
_MIN_WIDTH: Final = 20


def backends(lines: Sequence[BackendLine], width: int) -> list[str]:
    """A table with a line for each backend; beneath a heading."""
    rows = [
        (
            f"{'BACKEND':<9}{'STATE':<12}{'TEMP':>7} {'LEFT':>6} {'QUEUED':>6} {'RUNS':>4}"
            f" {'REQ/S':>7} {'MEDIAN':>7} {'P99 MS':>7} {'RESTARTS':>8}"
        )
    ]
    for line in lines:
        zone = line.zone
        headroom = None if zone is None else zone.headroom_c
        rows.append(
            f"{line.name[:8]:<9}{line.state[:11]:<12}"
            f"{_degrees(zone.temperature_c if zone else None):>7} {_degrees(headroom):>6}"
            f" {line.queued:>6} {line.running:>4}"
            f" {'-' if line.rate is None else f'{line.rate:.1f}':>7}"
            f" {ms_text(line.median_s):>7} {ms_text(line.p99_s):>7} {line.restarts:>8}"
        )

    return [cut(row.rstrip(), width) for row in rows]


def reasons(lines: Sequence[BackendLine], width: int) -> list[str]:
    """Why a backend is not ready, a line each."""
    return [cut(f"{line.name}: {line.reason}", width) for line in lines if line.reason]


def latency(picture: Picture, width: int) -> list[str]:
    """A sparkline of each backend's median, scaled to its own highest point."""
    lines = []
    for name, points in picture.latency.items():
        known = [point for point in points if point is not None]
        if not known:
            lines.append(cut(f"{name[:8]:<9}nothing ran", width))
            continue

        tail = f" {ms_text(min(known))} to {ms_text(max(known))} ms"
        room = max(_MIN_WIDTH, width - 9 - len(tail))
        lines.append(cut(f"{name[:8]:<9}{sparkline(points[-room:])}{tail}", width))

    return lines


def sparkline(points: Sequence[float | None]) -> str:
    """A bar for each point, a blank where there is none; the highest point is a full bar."""
    top = max((point for point in points if point is not None), default=0.0)
    bars = []
    for point in points:
        if point is None:
            bars.append(_NO_POINT)
        else:
            share = point / top if top > 0 else 0.0
            bars.append(_BARS[min(len(_BARS) - 1, int(share * len(_BARS)))])

    return "".join(bars)


def queues(lines: Sequence[QueueLine], width: int) -> list[str]:
    """A line for each worker: what waits as a bar and as a number."""
    rows = []
    for line in lines:
        name = f"{line.backend}/{line.lane}"
        bar = "#" * min(line.queued, 16)
        rows.append(
            cut(
                f"{name[:22]:<23}{line.state:<9}pid {line.pid:<8}{line.rss_mb:>5.0f} MB"
                f"  runs {line.running}  waits {line.queued:<4}{bar}".rstrip(),
                width,
            )
        )

    return rows


def zones(found: Sequence[Zone], width: int) -> list[str]:
    """The sensors in one or more lines, the hottest first."""
    words = [
        f"{zone.name} {zone.temperature_c:.1f} C"
        + (f" ({zone.headroom_c:.1f} left)" if zone.headroom_c is not None else "")
        for zone in sorted(found, key=lambda zone: -zone.temperature_c)
    ]
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) + 3 <= width:
            lines[-1] += f"   {word}"
        else:
            lines.append(cut(word, width))

    return lines


def _degrees(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}C"
