"""Where the daemon's socket is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from switchgear.ipc.places import fallback_runtime_dir

SYSTEM_SOCKET: Final = "/run/switchgear/switchgear.sock"


def default_socket() -> str:
    """The socket's path: `SWITCHGEAR_SOCKET`, else the user's own daemon's where there is one,
    else the system's."""
    named = os.environ.get("SWITCHGEAR_SOCKET")
    if named:
        return named

    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime, "switchgear") if runtime else fallback_runtime_dir()
    own = folder / "switchgear.sock"
    return str(own) if _is_ours(own) else SYSTEM_SOCKET


def _is_ours(path: Path) -> bool:
    """Anybody may make a file in a shared folder: only our own user's socket counts."""
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False
