"""The service's own user and group, which systemd-sysusers has made."""

from __future__ import annotations

import grp
import pwd
import subprocess
from typing import Final

from switchgear.daemon.cli.command import CommandError

NAME: Final = "switchgear"
HOME: Final = "/var/lib/switchgear"


def remove_account() -> bool:
    """Removes them where they are the ones that we made; whether there was anything.

    :raises CommandError: the system's tools refuse.
    """
    try:
        made_by_us = pwd.getpwnam(NAME).pw_dir == HOME
    except KeyError:
        made_by_us = False

    if not made_by_us:
        return False

    _run("userdel", NAME)
    try:
        grp.getgrnam(NAME)
    except KeyError:
        return True

    # userdel leaves the group where others are in it.
    _run("groupdel", NAME)
    return True


def _run(*command: str) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise CommandError(f"there is no {command[0]} here: remove {NAME} by hand") from None

    if result.returncode != 0:
        raise CommandError(f"{' '.join(command)}: {' '.join(result.stderr.split())}")
