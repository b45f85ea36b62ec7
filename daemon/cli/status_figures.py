"""What the metrics add to `switchgear status`: how requests went, temperatures, breakers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Final

from switchgear.daemon.cli.metrics_answer import metrics_text, reach, read
from switchgear.daemon.cli.tables import cut, wrap
from switchgear.daemon.cli.top_figures import Figures, ms_text, quantile, read_figures
from switchgear.daemon.cli.top_text import zones
from switchgear.ipc.errors import SwitchgearError

WIDTH: Final = 80
# What a breaker's state means to people; closed means nothing to tell.
_WORDS: Final = {
    "shedding": "gets warm: load moves away from it",
    "open": "is tripped",
    "half_open": "is recovering: it is probed",
    "ramping": "is recovering: it takes a part of the load",
    "quarantined": "is quarantined",
}


def ask_figures(socket: str | None) -> Figures | None:
    """The daemon's figures; None where it has none to give: the status goes without."""
    try:
        with closing(reach(socket)) as control:
            return read_figures(read(metrics_text(control)))
    except SwitchgearError:
        return None


def breaker_faults(figures: Figures) -> list[str]:
    """A sentence for each device, backend and pair that does not serve as usual."""
    return [
        f"{level} {subject} {_WORDS[state]}"
        for (level, subject), state in figures.breakers.items()
        if state in _WORDS
    ]


def lines(figures: Figures) -> list[str]:
    """The sections below the status's own, at most 80 columns wide."""
    found = []
    requests = _requests(figures)
    if requests:
        found += ["\nrequests", *requests]

    if figures.zones:
        found += ["\ntemperatures", *(f"  {line}" for line in zones(figures.zones, WIDTH - 2))]

    return found


def _requests(figures: Figures) -> list[str]:
    found = []
    for backend, times in sorted(figures.latency.items()):
        failed = _counts(figures.outcomes, backend)
        text = (
            f"  {backend:<8} {times.count} ok, median {ms_text(quantile(times, 0.5))} ms, "
            f"99 % under {ms_text(quantile(times, 0.99))} ms"
        )
        found.append(cut(text + (f"; {', '.join(failed)}" if failed else "")))

    refused = _counts(figures.outcomes, "none")
    if refused:
        found.append(wrap([f"refused  {refused[0]}", *refused[1:]]))

    return found


def _counts(outcomes: Mapping[tuple[str, str], int], backend: str) -> list[str]:
    """The errors of a backend with their counts, the most frequent first."""
    own = [(count, name) for (place, name), count in outcomes.items() if place == backend]
    return [f"{name} {count}" for count, name in sorted(own, reverse=True) if name != "ok"]
