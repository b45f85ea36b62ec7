"""Where a user's own daemon listens when the system names no folder for that."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def fallback_runtime_dir() -> Path:
    """A user's own folder for the socket where there is no `XDG_RUNTIME_DIR`."""
    return Path(tempfile.gettempdir(), f"switchgear-{os.geteuid()}")
