"""What a process does to itself at its start: hardening, limits, priority."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"prctl({option})")


def set_not_dumpable() -> None:
    """Keeps other processes of the same user from opening this one's descriptors and memory.

    The kernel resets it at exec: every process calls this for itself. One that is traced is
    left as it was: its tracer has all of it already, and where that is a loader such as proot
    (Termux), which carries out its system calls, it would lose hold of it.
    """
    if not _tracer():
        _prctl(_PR_SET_DUMPABLE, 0)


def _tracer() -> int:
    """The pid of the process that traces this one; 0 for none."""
    # As bytes: this runs before anything else, and a codec is an import.
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"TracerPid:"):
                return int(line.split()[1])

    return 0


def die_with_parent(parent_pid: int) -> None:
    """Asks for SIGKILL when the parent's thread that started this process ends.

    Exits at once when that has happened before the call.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def raise_descriptor_limit() -> int:
    """Raises the soft limit of descriptors to the hard one; returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def rss_mb(pid: int | str = "self") -> float:
    """Resident memory of a process in MiB (VmRSS); 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) / 1024
    except OSError:
        pass

    return 0.0
