"""The one way a benchmark states its figures: a table for people, the same as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. `limit` is None where there is none; then `ok` is None too."""

    name: str
    value: float
    unit: str
    limit: float | None
    ok: bool | None
    how: str


class Figures:
    """Collects figures, prints them and writes them to a file."""

    def __init__(self) -> None:
        self._figures: list[Figure] = []

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        limit: float | None = None,
        ok: bool | None = None,
        how: str = "",
    ) -> Figure:
        """Adds a figure. With a `limit` and no `ok`, ok means `value <= limit`."""
        if any(figure.name == name for figure in self._figures):
            raise ValueError(f"figure {name!r} is there already")

        if limit is not None and ok is None:
            ok = value <= limit

        figure = Figure(name, value, unit, limit, ok, how)
        self._figures.append(figure)
        return figure

    @property
    def ok(self) -> bool:
        """Whether every figure that has a limit keeps it."""
        return all(figure.ok is not False for figure in self._figures)

    def table(self) -> str:
        """The figures as aligned lines of text."""
        rows = [("figure", "value", "unit", "limit", "ok", "how")]
        for figure in self._figures:
            limit = "" if figure.limit is None else f"{figure.limit:g}"
            ok = {True: "yes", False: "NO", None: ""}[figure.ok]
            rows.append(
                (figure.name, f"{figure.value:.4g}", figure.unit, limit, ok, figure.how)
            )

        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if column in (1, 3) else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row[:5], widths, strict=True))
            )
            + ("  " + row[5]).rstrip()
            for row in rows
        )

    def to_json(self) -> dict[str, Any]:
        """`{"commit", "machine", "figures": [{"name", "value", "unit", ...}]}`."""
        return {
            "commit": commit(),
            "machine": machine(),
            "figures": [asdict(figure) for figure in self._figures],
        }

    def finish(self, json_path: str | None) -> int:
        """Prints the table, writes the JSON where a path is given; 0, or 1 over a limit."""
        print(self.table())
        if json_path is not None:
            Path(json_path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

        return 0 if self.ok else 1


def commit() -> str:
    """The checkout's commit, with `+` when tracked files differ; empty outside a checkout."""
    git = ("git", "-C", str(ROOT))
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""

    return head + ("+" if changed else "")


def machine() -> dict[str, Any]:
    """CPU model, usable CPUs, memory, kernel and Python: what a figure depends on."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as cpuinfo:
        for line in cpuinfo:
            key, _, text = line.partition(":")
            if key.strip() in ("model name", "Hardware"):
                model = text.strip()
                break

    return {
        "cpu": model,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mb": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 10**6,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
