"""Where the daemon keeps its files: the system's folders, or the XDG ones of a user.

Each has an override: `SWITCHGEAR_SOCKET`, `SWITCHGEAR_STATE_DIR`, `SWITCHGEAR_CACHE_DIR`,
`SWITCHGEAR_CONFIG`. systemd's `RUNTIME_DIRECTORY`, `STATE_DIRECTORY` and `CACHE_DIRECTORY` come
next. None of these functions creates anything.
"""

from __future__ import annotations

import os
from pathlib import Path

from switchgear.ipc.places import fallback_runtime_dir


def _is_system() -> bool:
    return os.geteuid() == 0


def _folder(override: str, systemd: str, system: str, xdg: str, fallback: str) -> Path:
    for variable in (override, systemd):
        value = os.environ.get(variable)
        if value:
            # systemd lists several folders with colons; the first is ours.
            return Path(value.split(":")[0])

    if _is_system():
        return Path(system)

    base = os.environ.get(xdg)
    return Path(base) / "switchgear" if base else Path.home() / fallback / "switchgear"


def runtime_dir() -> Path:
    """Folder of the socket; private to the user."""
    if (
        not _is_system()
        and not os.environ.get("RUNTIME_DIRECTORY")
        and not os.environ.get("XDG_RUNTIME_DIR")
    ):
        return fallback_runtime_dir()

    return _folder(
        "SWITCHGEAR_RUNTIME_DIR",
        "RUNTIME_DIRECTORY",
        "/run/switchgear",
        "XDG_RUNTIME_DIR",
        ".run",
    )


def socket_path() -> Path:
    value = os.environ.get("SWITCHGEAR_SOCKET")
    return Path(value) if value else runtime_dir() / "switchgear.sock"


def state_dir() -> Path:
    """Folder of what must survive a restart: models, verdicts, the fingerprint."""
    return _folder(
        "SWITCHGEAR_STATE_DIR",
        "STATE_DIRECTORY",
        "/var/lib/switchgear",
        "XDG_STATE_HOME",
        ".local/state",
    )


def cache_dir() -> Path:
    """Folder of what can be made again."""
    return _folder(
        "SWITCHGEAR_CACHE_DIR",
        "CACHE_DIRECTORY",
        "/var/cache/switchgear",
        "XDG_CACHE_HOME",
        ".cache",
    )


def config_path() -> Path:
    value = os.environ.get("SWITCHGEAR_CONFIG")
    if value:
        return Path(value)

    if _is_system():
        return Path("/etc/switchgear/switchgear.toml")

    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "switchgear/switchgear.toml"
