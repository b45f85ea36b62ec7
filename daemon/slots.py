"""Who owns an output slot of a session's arena."""

from __future__ import annotations

from enum import Enum, auto


class Slot(Enum):
    """The client gives its slots away with a request and gets one back with the reply. Spare
    ones are the daemon's. A worker may still write to a poisoned one, for a request that was
    answered otherwise."""

    CLIENT = auto()
    REQUEST = auto()
    SPARE = auto()
    POISONED = auto()
