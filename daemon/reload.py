"""Which changes of the configuration a running daemon takes over, and which need a restart."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from switchgear.daemon.config import Configuration

# By section, the keys that are applied at once; all others are read at the start only.
APPLIED: Final = {
    "daemon": frozenset({"log_level", "stop_limit_s"}),
    "models": None,  # the whole of it
}


@dataclass(frozen=True, slots=True)
class Merged:
    """`configuration` is what holds from now on. `applied` and `waiting` name changed keys:
    those that it has taken over, and those that wait for a restart."""

    configuration: Configuration
    applied: tuple[str, ...]
    waiting: tuple[str, ...]

    @property
    def problems(self) -> list[str]:
        if not self.waiting:
            return []

        return [f"changed in the configuration, needs a restart: {', '.join(self.waiting)}"]

    @property
    def text(self) -> str:
        return f"reloaded: {', '.join(self.applied) or 'nothing'} applied"


def merge(old: Configuration, new: Configuration) -> Merged:
    """The old configuration with those changes of the new one that need no restart."""
    applied, waiting = [], []
    update: dict[str, Any] = {}
    for section, before, after in _parts(old, new):
        keys = APPLIED.get(section, frozenset())
        if keys is None:
            if before != after:
                update[section] = after
                applied.append(section)

            continue

        changes = {}
        for key, value, other in _parts(before, after):
            if value == other:
                continue

            if key in keys:
                changes[key] = other
                applied.append(f"{section}.{key}")
            else:
                waiting.append(f"{section}.{key}")

        if changes:
            update[section] = before.model_copy(update=changes)

    return Merged(old.model_copy(update=update), tuple(applied), tuple(waiting))


def _parts(old: BaseModel, new: BaseModel) -> Iterator[tuple[str, Any, Any]]:
    for name in type(old).model_fields:
        yield name, getattr(old, name), getattr(new, name)


def set_log_level(level: str) -> None:
    """`level`: a name of the configuration."""
    logging.getLogger().setLevel(level.upper())
