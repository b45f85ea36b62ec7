"""Where the daemon's socket is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

SYSTEM_SOCKET: Final = "/run/switchgear/switchgear.sock"


def default_socket() -> str:
    """The socket's path: `SWITCHGEAR_SOCKET`, else the user's own daemon's where there is one,
    else the system's."""
    named = os.environ.get("SWITCHGEAR_SOCKET")
    if named:
        return named

    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        own = Path(runtime, "switchgear", "switchgear.sock")
        if own.exists():
            return str(own)

    return SYSTEM_SOCKET
