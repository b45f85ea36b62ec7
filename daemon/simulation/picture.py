"""Runs as an SVG picture: temperatures, frame times and the backend, over time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape

from switchgear.daemon.simulation.metrics import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from switchgear.daemon.simulation.run import Trace

_WIDTH: Final = 960
_LEFT: Final = 60
_RIGHT: Final = 130
_TITLE: Final = 30
_HEAT: Final = 130
_TIME: Final = 110
_STRIP: Final = 18
_GAP: Final = 26
_BLOCK: Final = _TITLE + _HEAT + _GAP + _TIME + _GAP + _STRIP + 2 * _GAP
# Points across the picture: more is not seen.
_POINTS: Final = 240
# Told apart by people who see red and green alike (Okabe and Ito).
_COLOURS: Final = {
    "gpu": "#d55e00",
    "vulkan": "#d55e00",
    "opencl": "#e69f00",
    "opencl_int4": "#f0e442",
    "npu": "#0072b2",
    "cpu": "#009e73",
    "skin": "#cc79a7",
    "die": "#999999",
}
_OTHER: Final = "#444444"


def picture(title: str, runs: Sequence[tuple[str, Trace]], duration_s: float) -> str:
    """An SVG document with a block for each (policy, trace)."""
    parts = []
    for number, (policy, trace) in enumerate(runs):
        parts.append(f'<g transform="translate(0,{_TITLE + number * _BLOCK})">')
        parts += _block(policy, trace, duration_s)
        parts.append("</g>")

    height = _TITLE + len(runs) * _BLOCK
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="11">',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
            _text(_LEFT, 20, title, "font-size='14' font-weight='bold'"),
            *parts,
            "</svg>\n",
        ]
    )


def _block(policy: str, trace: Trace, duration_s: float) -> list[str]:
    top = _TITLE
    parts = [_text(_LEFT, 18, policy, "font-weight='bold'")]
    parts += _heat(trace, duration_s, top)
    top += _HEAT + _GAP
    parts += _times(trace, duration_s, top)
    top += _TIME + _GAP
    parts += _backends(trace, duration_s, top)
    return parts


def _heat(trace: Trace, duration_s: float, top: float) -> list[str]:
    every = max(1, len(trace.seconds) // _POINTS)
    rows = trace.seconds[::every]
    if not rows:
        return []

    values = [value for _, temperatures, _ in rows for value in temperatures]
    panel = _Panel(duration_s, min(values), max(values), top, _HEAT)
    parts = panel.frame("C")
    shown = [name for name in trace.nodes if name != "die"]
    for line, name in enumerate(shown):
        at = trace.nodes.index(name)
        points = [(when_s, temperatures[at]) for when_s, temperatures, _ in rows]
        parts.append(panel.line(points, _COLOURS.get(name, _OTHER)))
        parts.append(_key(line, top, name))

    return parts


def _times(trace: Trace, duration_s: float, top: float) -> list[str]:
    bins: dict[int, list[float]] = {}
    for end_s, latency_ms in zip(trace.ends_s, trace.latencies_ms, strict=True):
        bins.setdefault(int(end_s * _POINTS / duration_s), []).append(latency_ms)

    if not bins:
        return []

    middle = []
    late = []
    for number, latencies in sorted(bins.items()):
        latencies.sort()
        when_s = (number + 0.5) * duration_s / _POINTS
        middle.append((when_s, percentile(latencies, 50.0)))
        late.append((when_s, percentile(latencies, 97.5)))

    panel = _Panel(duration_s, 0.0, max(value for _, value in late), top, _TIME)
    return [
        *panel.frame("ms"),
        panel.line(late, "#bbbbbb"),
        panel.line(middle, "#000000"),
        _text(_WIDTH - _RIGHT + 10, top + 10, "frame time"),
        _text(_WIDTH - _RIGHT + 10, top + 24, "black 50 %, grey 97.5 %"),
    ]


def _backends(trace: Trace, duration_s: float, top: float) -> list[str]:
    bins: dict[int, Counter[str]] = {}
    for end_s, backend in zip(trace.ends_s, trace.backends, strict=True):
        bins.setdefault(int(end_s * _POINTS / duration_s), Counter())[backend] += 1

    width = (_WIDTH - _LEFT - _RIGHT) / _POINTS
    parts = []
    for number, counts in sorted(bins.items()):
        below = 0.0
        for backend, count in sorted(counts.items()):
            height = _STRIP * count / counts.total()
            parts.append(
                f'<rect x="{_LEFT + number * width:.1f}" y="{top + below:.1f}" '
                f'width="{width + 0.2:.2f}" height="{height:.1f}" '
                f'fill="{_COLOURS.get(backend, _OTHER)}"/>'
            )
            below += height

    names = sorted({backend for counts in bins.values() for backend in counts})
    for line, name in enumerate(names):
        parts.append(_key(line, top - 6, name))

    return parts


class _Panel:
    """A plot over the run's time, with its range of values."""

    def __init__(
        self, duration_s: float, low: float, high: float, top: float, height: float
    ) -> None:
        self._duration_s = duration_s
        self._low = low
        self._high = max(high, low + 1.0)
        self._top = top
        self._height = height

    def x(self, when_s: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * when_s / self._duration_s

    def y(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return self._top + self._height * (1.0 - share)

    def line(self, points: Sequence[tuple[float, float]], colour: str) -> str:
        text = " ".join(f"{self.x(at):.1f},{self.y(value):.1f}" for at, value in points)
        return f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="1.3"/>'

    def frame(self, unit: str) -> list[str]:
        width = _WIDTH - _LEFT - _RIGHT
        parts = [
            f'<rect x="{_LEFT}" y="{self._top}" width="{width}" height="{self._height}" '
            'fill="none" stroke="#cccccc"/>'
        ]
        for value in (self._low, (self._low + self._high) / 2.0, self._high):
            label = f"{value:.0f} {unit}"
            parts.append(_text(_LEFT - 6, self.y(value) + 4, label, "text-anchor='end'"))

        for quarter in range(5):
            when_s = self._duration_s * quarter / 4.0
            label = f"{when_s / 60.0:.3g} min"
            y = self._top + self._height + 14
            parts.append(_text(self.x(when_s), y, label, "text-anchor='middle' fill='#777'"))

        return parts


def _key(line: int, top: float, name: str) -> str:
    x = _WIDTH - _RIGHT + 10
    y = top + 10 + 14 * line
    colour = _COLOURS.get(name, _OTHER)
    return f'<rect x="{x}" y="{y - 8:.0f}" width="10" height="8" fill="{colour}"/>' + _text(
        x + 15, y, name
    )


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{escape(text)}</text>'
