"""Which backends there are: the entry points of the group `switchgear.backends`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final, cast

from switchgear.backends.contract import Backend
from switchgear.ipc.errors import DriverError, UnknownBackend

GROUP: Final = "switchgear.backends"


def installed() -> dict[str, EntryPoint]:
    """Names of the installed backends. Reads metadata only: nothing of them is imported."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def open_backend(name: str, options: Mapping[str, object]) -> Backend:
    """Imports and opens a backend. Only a worker or another disposable process calls this.

    :raises UnknownBackend: nothing installed has this name.
    :raises DriverError: its engine or driver is not there, or does not import.
    """
    entry = installed().get(name)
    if entry is None:
        raise UnknownBackend(
            f"no backend {name!r}; installed: {', '.join(sorted(installed()))}"
        )

    try:
        factory = entry.load()
    except ImportError as error:
        raise DriverError("errno", 2, "ENOENT", f"backend {name!r}: {error}") from None

    return cast(Backend, factory(options))
