"""The tables of `docs/protocol-states.md`, written from the code.

    python tests/protocol_document.py     rewrites them

Everything between a `<!-- NAME -->` and an `<!-- end -->` line is written here, the rest of the
document by hand.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from protocol_case import TABLES

from switchgear.daemon.protocol.constants import table
from switchgear.daemon.protocol.table import SAME, Row

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "protocol-states.md"
_PART = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.S)


def _value(value: Any) -> str:
    if value is None:
        return "none"

    if isinstance(value, bool):
        return "yes" if value else "no"

    if isinstance(value, tuple):
        return ", ".join(_value(each) for each in value) or "none"

    if isinstance(value, float):
        return "never" if value == float("inf") else f"{value:g}"

    return f"{value:,}".replace(",", " ") if isinstance(value, int) else str(value)


def constants() -> str:
    """Every constant, its default, the report's value where that differs, unit and source."""
    lines = ["| constant | default | report | unit | source |", "|---|---|---|---|---|"]
    for known in table():
        literal = "" if known.report == known.default else _value(known.report)
        lines.append(
            f"| `{known.name}` | {_value(known.default)} | {literal} | {known.unit} "
            f"| {known.source} |"
        )

    return "\n".join(lines) + "\n"


def rows(level: str) -> str:
    """The rows of a level, in the order they are tried."""
    lines = ["| phase | event | guard | next | what happens |", "|---|---|---|---|---|"]
    lines += [_row(row) for row in TABLES[level].rows]
    return "\n".join(lines) + "\n"


def _row(row: Row[Any]) -> str:
    after = "the same" if row.to == SAME else row.to
    phases = ", ".join(row.phases)
    cells = (phases, row.event.__name__, row.guard or "always", after, row.why)
    return f"| {' | '.join(cells)} |"


def parts() -> dict[str, str]:
    return {"constants": constants(), **{level: rows(level) for level in TABLES}}


def written(text: str) -> str:
    """The document with its tables as the code has them."""
    known = parts()
    return _PART.sub(lambda found: found[1] + known[found[2]] + found[3], text)


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
