"""A process that stands still: what it was sent is answered when the test lets it go on.

So a run lasts as long as the test needs it, however slow the machine is.
"""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def held(pid: int) -> Iterator[None]:
    """Stops a process for the block. It may be killed meanwhile."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        while not _stands_still(pid):
            pass

        yield
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)

        os.close(pidfd)


def _stands_still(pid: int) -> bool:
    # The name may hold blanks and brackets: the state stands behind the last bracket.
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T"
