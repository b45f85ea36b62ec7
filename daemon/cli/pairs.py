"""How pairs (a model on a backend) are shown: what holds, what does not, and why."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, Final

from switchgear.daemon.cli.tables import WIDTH, bytes_text, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from switchgear.client.models import Pair

_NONE: Final = "-"


def summary(pairs: Iterable[Pair]) -> str:
    """A table of pairs; below it a paragraph for each that is not ready."""
    pairs = list(pairs)
    rows = [
        (
            pair.backend,
            pair.precision or pair.asked,
            pair.state,
            _error(pair.figures),
            _ms(pair.figures, "run_us"),
            _ms(pair.figures, "cpu_us"),
            _share(pair.figures),
            _cold(pair.figures),
            _warm(pair.figures),
            _cache(pair.figures),
        )
        for pair in pairs
    ]
    headings = (
        "BACKEND",
        "AS",
        "STATE",
        "ERROR",
        "RUN",
        "CPU",
        "ON IT",
        "COLD",
        "WARM",
        "CACHE",
    )
    lines = [table(headings, rows)]
    for pair in pairs:
        text = pair.reason or (pair.step if pair.state in ("waiting", "preparing") else "")
        if text:
            name = pair.precision or pair.asked
            lines.append(
                textwrap.fill(
                    f"{pair.backend} {name}: {text}",
                    WIDTH,
                    initial_indent="  ",
                    subsequent_indent="    ",
                    break_on_hyphens=False,
                )
            )

    return "\n".join(lines)


def _ms(figures: Mapping[str, Any], name: str) -> str:
    value = figures.get(name)
    return _NONE if value is None else f"{value / 1000:.1f} ms"


def _seconds(figures: Mapping[str, Any], first: str, second: str) -> str:
    """Of a load and the first run after it."""
    if first not in figures:
        return _NONE

    return f"{(figures[first] + figures.get(second, 0)) / 1e6:.2f} s"


def _cold(figures: Mapping[str, Any]) -> str:
    return _seconds(figures, "load_us", "first_run_us")


def _warm(figures: Mapping[str, Any]) -> str:
    return _seconds(figures, "warm_load_us", "warm_first_run_us")


def _error(figures: Mapping[str, Any]) -> str:
    """Against the reference: as a share of its largest value, for INT4 in decibels."""
    if figures.get("rule") == "int4" and figures.get("snr_db") is not None:
        return f"{figures['snr_db']:.0f} dB"

    error = figures.get("error")
    return _NONE if error is None else f"{error:.0e}"


def _share(figures: Mapping[str, Any]) -> str:
    coverage = figures.get("coverage")
    if not coverage:
        return _NONE

    return f"{coverage['nodes']}/{coverage['nodes_total']}"


def _cache(figures: Mapping[str, Any]) -> str:
    size = figures.get("cache_bytes")
    return _NONE if not size else bytes_text(size)
