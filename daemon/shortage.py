"""What to answer when the system has no room for something of the daemon's own."""

from __future__ import annotations

import errno
from typing import Final

from switchgear.ipc.errors import NoSpace

_TEXTS: Final = {
    errno.EMFILE: "the daemon has no free descriptor",
    errno.ENFILE: "the system has no free descriptor",
    errno.EAGAIN: "the system starts no further process or thread",
    errno.ENOMEM: "the system has no free memory",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.ETOOMANYREFS: "too many descriptors are on their way",
}
RETRY_AFTER_MS: Final = 1000


def as_no_space(error: BaseException) -> NoSpace | None:
    """The answer when `error` says that memory, disk, descriptors or processes are short."""
    if isinstance(error, MemoryError):
        return NoSpace("the daemon has no free memory", retry_after_ms=RETRY_AFTER_MS)

    number = error.errno if isinstance(error, OSError) else None
    if number not in _TEXTS:
        return None

    return NoSpace(
        _TEXTS[number],
        domain="errno",
        driver_code=number,
        driver_name=errno.errorcode[number],
        retry_after_ms=RETRY_AFTER_MS,
    )
