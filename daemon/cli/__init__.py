"""The `switchgear` command."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status (0 done, 1 failed, 2 wrong usage)."""
    raise SystemExit(2)
