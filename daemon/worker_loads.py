"""What a worker was asked to load, in which order, and how that went."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import chain
from time import monotonic_ns
from typing import TYPE_CHECKING, TypeAlias

from switchgear.daemon.failure import Failure
from switchgear.ipc import worker
from switchgear.ipc.errors import UnknownModel

if TYPE_CHECKING:
    from switchgear.daemon.model import Model

Load: TypeAlias = "asyncio.Future[worker.Packet | Failure]"


class Loads:
    """Of one worker, which answers in the order in which it was asked. Instances are known by
    the worker's number for them. Nothing here blocks."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._first: dict[int, Load] = {}
        # Loads of what was loaded already, in their order.
        self._renewals: dict[int, deque[Load]] = {}
        # What is not answered, in the order asked: instance, model and since when.
        self._open: list[tuple[int, Model, int]] = []

    def get(self, instance: int) -> Load | None:
        """The load of an instance that was asked for, whether it has ended or not."""
        return self._first.get(instance)

    def begin(self, instance: int, model: Model) -> Load:
        """An instance is asked for, for the first time."""
        future: Load = self._loop.create_future()
        self._first[instance] = future
        self._open.append((instance, model, monotonic_ns()))
        return future

    def begin_renewal(self, instance: int, model: Model) -> Load | None:
        """An instance is asked for once more; None where it was not before."""
        if instance not in self._first:
            return None

        future: Load = self._loop.create_future()
        self._renewals.setdefault(instance, deque()).append(future)
        self._open.append((instance, model, monotonic_ns()))
        return future

    def is_loaded(self, instance: int) -> bool:
        future = self._first.get(instance)
        return future is not None and future.done() and not isinstance(future.result(), Failure)

    def failure(self, instance: int) -> Failure | None:
        """Why an instance was not loaded; None where it was, or may still be."""
        future = self._first.get(instance)
        if future is not None and future.done() and not future.cancelled():
            result = future.result()
            if isinstance(result, Failure):
                return result

        return None

    @property
    def present(self) -> tuple[Model, int] | None:
        """The model that is loaded now, and the monotonic ns at which that was asked for or the
        one before was done."""
        return self._open[0][1:] if self._open else None

    def took(self, instance: int, result: worker.Packet | Failure) -> bool:
        """The worker has loaded an instance, or could not; False where it has none of this
        number now."""
        self._close(instance)
        future = self._first.get(instance)
        renewals = self._renewals.get(instance)
        if renewals and (future is None or future.done()):
            renewed = renewals.popleft()
            if not renewals:
                del self._renewals[instance]

            if self.failure(instance) is not None and not isinstance(result, Failure):
                # The load before it had failed.
                self._first[instance] = renewed

            renewed.set_result(result)
            return True

        if future is not None and not future.done():
            future.set_result(result)

        return not isinstance(result, Failure)

    def _close(self, instance: int) -> None:
        """The oldest load of an instance was answered: the next one begins."""
        for number, (which, _, _) in enumerate(self._open):
            if which == instance:
                del self._open[number]
                break

        if self._open:
            following, model, _ = self._open[0]
            self._open[0] = (following, model, monotonic_ns())

    def forget(self, instance: int) -> Load | None:
        """An instance is asked for anew at the next need; its load until now. Nobody waits for
        what nobody wants any more."""
        future = self._first.pop(instance, None)
        if future is not None and not future.done():
            future.set_result(
                Failure("switchgear", UnknownModel.code, "UnknownModel", "unloaded")
            )

        return future

    def end(self, reason: Failure) -> None:
        """The worker is gone."""
        for future in (*self._first.values(), *chain(*self._renewals.values())):
            if not future.done():
                future.set_result(reason)
