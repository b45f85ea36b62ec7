"""Lets a process run only when nobody else wants the CPU or the disk; it cannot be undone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from typing import Final

# The system call has no wrapper in the C library; its number is the kernel's, by architecture.
_IOPRIO_SET: Final = {
    "x86_64": 251,
    "aarch64": 30,
    "riscv64": 30,
    "armv7l": 314,
    "armv8l": 314,
    "i686": 289,
}
_WHO_PROCESS: Final = 1
_CLASS_IDLE: Final = 3 << 13


def run_when_idle() -> None:
    """SCHED_IDLE, the highest niceness and idle disk priority, as far as each is allowed.

    For this thread and those that it starts afterwards.
    """
    with contextlib.suppress(OSError):
        # First: under SCHED_IDLE it has no effect, but where that is forbidden it has.
        os.nice(19)

    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    number = _IOPRIO_SET.get(platform.machine())
    # A 32-bit process on a 64-bit kernel has other numbers.
    if number is not None and (ctypes.sizeof(ctypes.c_void_p) == 8) == (
        platform.machine() in ("x86_64", "aarch64", "riscv64")
    ):
        ctypes.CDLL(None).syscall(number, _WHO_PROCESS, 0, _CLASS_IDLE)
