"""A forked child must not use the parent's connections: both would read the same replies."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    def after_fork(self) -> None:
        """In the child: closes its copies of the descriptors, without a word to the daemon."""


_objects: weakref.WeakSet[Forkable] = weakref.WeakSet()


def watch(item: Forkable) -> None:
    """Has `item.after_fork` called in each forked child for as long as the item lives."""
    _objects.add(item)


def _after_fork() -> None:
    for item in list(_objects):
        item.after_fork()


os.register_at_fork(after_in_child=_after_fork)
