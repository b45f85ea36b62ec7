"""Copies models out of clients' descriptors, in threads: a descriptor may never answer."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING, Final

from switchgear.ipc.errors import Busy, Cancelled, SwitchgearError, TimedOut

if TYPE_CHECKING:
    from switchgear.daemon.jobs import Job
    from switchgear.daemon.model_store import ModelStore, Stored

# Threads that copy models, in all; a file system that never answers holds one of them.
COPIES_AT_ONCE: Final = 4
COPIES_PER_USER: Final = 2
COPY_LIMIT_S: Final = 120.0
_RETRY_AFTER_MS: Final = 100


class Copies:
    """The copies that are being made, with bounds on their number."""

    def __init__(self, store: ModelStore) -> None:
        self._store = store
        self._running: Counter[int] = Counter()

    async def take(self, job: Job, fd: int, size: int, uid: int) -> Stored:
        """Copies and hashes `size` bytes of a user's descriptor; takes over `fd`.

        :raises Busy: as many copies are being made as may be.
        :raises TimedOut: it took too long.
        :raises Cancelled: the job was cancelled.
        :raises SwitchgearError: as `ModelStore.take`.
        """
        job.progress("copy", 0, size)
        if self._running[uid] >= COPIES_PER_USER or self._running.total() >= COPIES_AT_ONCE:
            os.close(fd)
            raise Busy("too many models are being copied", retry_after_ms=_RETRY_AFTER_MS)

        loop = asyncio.get_running_loop()
        future: asyncio.Future[Stored] = loop.create_future()
        stop = threading.Event()

        def end(result: Stored | BaseException) -> None:
            self._running[uid] -= 1
            if future.done():
                if not isinstance(result, BaseException):
                    os.close(result.fd)
            elif isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

        def advance(done: int) -> None:
            if not stop.is_set():
                job.progress("copy", done, size)

        def tell(done: int) -> None:
            loop.call_soon_threadsafe(advance, done)

        def copy() -> None:
            result: Stored | BaseException
            try:
                result = self._store.take(fd, size, tell, stop)
            except SwitchgearError as error:
                # Without this frame, which names it: together they would never be freed.
                result = error.with_traceback(None)
            except BaseException as error:  # handed to the loop, whatever it is
                result = error
            finally:
                os.close(fd)

            try:
                loop.call_soon_threadsafe(end, result)
            except RuntimeError:
                # The daemon has ended meanwhile.
                if not isinstance(result, BaseException):
                    os.close(result.fd)

        # A daemon thread: a file system that never answers must not keep the process alive.
        thread = threading.Thread(target=copy, name="copy", daemon=True)
        try:
            thread.start()
        except BaseException:
            os.close(fd)
            raise

        self._running[uid] += 1
        taken = False
        try:
            async with asyncio.timeout(COPY_LIMIT_S):
                stored = await asyncio.shield(future)

            taken = True
            return stored
        except TimeoutError:
            raise TimedOut(f"copying the model took over {COPY_LIMIT_S:g} s") from None
        except asyncio.CancelledError:
            raise Cancelled("loading was cancelled") from None
        finally:
            stop.set()
            if not taken:
                _give_up(future)


def _give_up(future: asyncio.Future[Stored]) -> None:
    """Nobody takes the copy any more; it may have come in the same turn of the loop."""
    if not future.done():
        future.cancel()
    elif not future.cancelled() and future.exception() is None:
        os.close(future.result().fd)
