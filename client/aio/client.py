"""The asyncio client: control calls, and the sessions it opens."""

from __future__ import annotations

import asyncio
import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from switchgear.client import forks
from switchgear.client.aio.control import AsyncControl
from switchgear.client.aio.session import Session
from switchgear.client.models import Info, Model, Status
from switchgear.client.operations import OnEvent, OnProgress, Operations, reference
from switchgear.client.options import SessionOptions
from switchgear.client.paths import default_socket
from switchgear.client.result import Result
from switchgear.client.source import ModelSource
from switchgear.client.steps import Attach, Blocking, Call, Next, Step, Steps, Wait
from switchgear.client.tensors import Value
from switchgear.ipc.errors import ConnectionLost

T = TypeVar("T")


async def connect(
    path: str | os.PathLike[str] | None = None,
    *,
    timeout_s: float = 10.0,
    reconnect: bool = True,
    reconnect_s: float = 10.0,
) -> Client:
    """Connects to the daemon; see `switchgear.client.connect`.

    async with await connect() as client: ...
    """
    client = Client(
        Operations(
            os.fspath(path) if path is not None else default_socket(),
            timeout_s,
            reconnect,
            reconnect_s,
        )
    )
    try:
        await client._run(client._operations.attach())
    except BaseException:
        client._close()
        raise

    return client


class Client:
    """A connection to the daemon for one event loop; see `switchgear.client.Client`.

    Cancelling a task ends its control call; a job that the call started goes on.
    """

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._idle: list[AsyncControl] = []
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._closed = False
        forks.watch(self)

    @property
    def path(self) -> str:
        """The daemon's socket."""
        return self._operations.path

    async def info(self) -> Info:
        """Version, pid and readiness of the daemon."""
        return await self._run(self._operations.info())

    async def status(self) -> Status:
        """Backends, workers, models, sessions, jobs and counters."""
        return await self._run(self._operations.status())

    async def models(self) -> list[Model]:
        """The loaded models."""
        return await self._run(self._operations.models())

    async def describe(self, model: Model | str) -> Model:
        """A model by name or hash, as it is now.

        :raises UnknownModel: none is loaded by that name.
        """
        return await self._run(self._operations.describe(model))

    async def load_model(
        self,
        model: ModelSource,
        name: str | None = None,
        on_progress: OnProgress | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Model:
        """Hands a .tflite model to the daemon and waits until it serves. `on_progress` is a
        plain function."""
        return await self._run(self._operations.load_model(model, name, on_progress, timeout_s))

    async def check_model(
        self,
        model: Model | str,
        on_progress: OnProgress | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Model:
        """Has the daemon try the model again on each backend, and waits for the outcome."""
        return await self._run(self._operations.check_model(model, on_progress, timeout_s))

    async def prepare_model(
        self,
        model: Model | str,
        backends: Sequence[str] | None = None,
        precision: str = "auto",
        *,
        tune_s: int = 0,
        again: bool = False,
        on_progress: OnProgress | None = None,
        timeout_s: float | None = None,
    ) -> Model:
        """Has the daemon compile and check the model on `backends` (default: all), and waits.

        It does so by itself after a load; this goes before what else is queued. `again`: though
        it was done. `tune_s`: seconds that a search for faster kernels may take. What came of
        it stands in the result's `pairs`; a backend that refuses the model is no error.

        :raises UnknownBackend: one of them is not installed.
        """
        return await self._run(
            self._operations.prepare_model(
                model, backends, precision, tune_s, again, on_progress, timeout_s
            )
        )

    async def explain(
        self, last: int = 1, *, session: int | None = None, request: int | None = None
    ) -> list[dict[str, Any]]:
        """Why the newest requests ran where they ran, the oldest first; `text` is in words."""
        return await self._run(self._operations.explain(last, session, request))

    async def watch_events(self, on_event: OnEvent, timeout_s: float | None = None) -> None:
        """Calls `on_event` with what the protocol did last and does from now on (shedding,
        tripped, degraded, recovering), until it returns False or the time is over."""
        await self._run(self._operations.watch_events(on_event, timeout_s))

    async def unload_model(self, model: Model | str, force: bool = False) -> None:
        """Unloads a model; with `force` its sessions are ended."""
        await self._run(self._operations.unload_model(model, force))

    async def infer(
        self,
        model: Model | str,
        inputs: Mapping[str, Value],
        *,
        deadline_ms: float | None = None,
        backends: Sequence[str] | None = None,
        strict: bool = False,
        precision: str = "auto",
    ) -> Result:
        """One inference without a session, the tensors in the messages: for small tensors."""
        return await self._run(
            self._operations.infer(model, inputs, deadline_ms, backends, strict, precision)
        )

    async def open_session(
        self,
        model: Model | str,
        slots: int = 2,
        on_busy: str = "wait",
        priority: str = "normal",
        backends: Sequence[str] | None = None,
        strict: bool = False,
        input_shapes: Mapping[str, Sequence[int]] | None = None,
        output_capacity_bytes: int | None = None,
        precision: str = "auto",
        policy: str | None = None,
        slow_ms: float | None = None,
        recover_ms: float | None = None,
        events: bool = False,
        hedge: bool = False,
    ) -> Session:
        """Opens a session; parameters and errors as with the blocking client."""
        options = SessionOptions(
            reference(model),
            slots,
            on_busy,
            priority,
            backends,
            strict,
            input_shapes,
            output_capacity_bytes,
            precision,
            policy,
            slow_ms,
            recover_ms,
            events,
            hedge,
        )
        operations = self._operations
        core, sock = await self._run(operations.open_session(options))
        session = Session(
            core,
            sock,
            options,
            lambda: self._run(operations.open_session(options)),
            operations.reconnect,
        )
        self._sessions.add(session)
        return session

    async def close(self) -> None:
        """Ends the client and the sessions that it opened. May be repeated."""
        self._close()

    def _close(self) -> None:
        self._closed = True
        for session in list(self._sessions):
            session._close()

        idle, self._idle = self._idle, []
        for control in idle:
            control.close()

        self._operations.close()

    def after_fork(self) -> None:
        idle, self._idle = self._idle, []
        for control in idle:
            control.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(
                f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2
            )
            self._close()

    async def _run(self, steps: Steps[T]) -> T:
        """Carries out steps in this task."""
        if self._closed:
            steps.close()
            raise ConnectionLost("the client is closed")

        work = _Work(self)
        try:
            step = next(steps)
            while True:
                try:
                    outcome = await work.carry_out(step)
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(outcome)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            work.end()

    async def _checkout(self) -> AsyncControl:
        while self._idle:
            control = self._idle.pop()
            if control.idle:
                return control

            control.close()

        return await AsyncControl.open(self._operations.path, self._operations.timeout_s)

    def _checkin(self, control: AsyncControl) -> None:
        # One is kept: further ones were for calls that ran at the same time.
        if control.idle and not self._idle and not self._closed:
            self._idle.append(control)
        else:
            control.close()


class _Work:
    """One piece of work and the connection that it has."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._control: AsyncControl | None = None

    async def carry_out(self, step: Step) -> Any:
        if isinstance(step, Attach):
            self.end()
            self._control = await self._client._checkout()
            return None

        if isinstance(step, Wait):
            await asyncio.sleep(step.seconds)
            return None

        if isinstance(step, Blocking):
            return await asyncio.to_thread(step.function)

        assert self._control is not None
        if isinstance(step, Next):
            return await self._control.next(timeout_s=step.timeout_s)

        assert isinstance(step, Call)
        return await self._control.call(
            step.method,
            step.parameters,
            step.descriptors,
            more=step.more,
            timeout_s=step.timeout_s,
        )

    def end(self) -> None:
        if self._control is not None:
            self._client._checkin(self._control)
            self._control = None
