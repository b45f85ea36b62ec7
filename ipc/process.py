"""What a process does to itself at its start: hardening, limits, priority."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
# For `give_way_for_memory`: a worker costs its requests a retry, a process for one job nothing
# but time.
WORKER_SCORE: Final = 200
JOB_SCORE: Final = 500

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


def begin_child(parent_pid: int, memory_score: int = 0) -> None:
    """What processes of the daemon do first: they end with their parent, give way for memory
    where they have a score, and are not dumpable, in this order. Exits at once where the parent
    has ended."""
    die_with_parent(parent_pid)
    if memory_score:
        give_way_for_memory(memory_score)

    set_not_dumpable()


def raise_descriptor_limit() -> int:
    """Raises the soft limit of descriptors to the hard one; returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def rss_mb() -> float:
    """Resident memory of this process in MiB (VmRSS)."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024

    return 0.0


def give_way_for_memory(score: int) -> None:
    """Has the kernel end this process before others where memory runs out: `score`, up to
    1000, is added to the share of all memory in thousandths that it holds.

    For what can be started again, while what starts it cannot. Before `set_not_dumpable`, which
    gives the file to root. Where it may not be written, the sizes alone decide.
    """
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+b") as file:
        if int(file.read()) < score:
            file.seek(0)
            file.write(b"%d" % score)
