"""The blocking client: control calls, and the sessions it opens."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from switchgear.client import forks
from switchgear.client.control import Control
from switchgear.client.models import Info, Model, Status
from switchgear.client.operations import OnEvent, OnProgress, Operations, reference
from switchgear.client.options import SessionOptions
from switchgear.client.paths import default_socket
from switchgear.client.result import Result
from switchgear.client.session import Session
from switchgear.client.source import ModelSource
from switchgear.client.steps import Attach, Blocking, Call, Next, Step, Steps, Wait
from switchgear.client.tensors import Value
from switchgear.ipc.errors import ConnectionLost

T = TypeVar("T")


def connect(
    path: str | os.PathLike[str] | None = None,
    *,
    timeout_s: float = 10.0,
    reconnect: bool = True,
    reconnect_s: float = 10.0,
) -> Client:
    """Connects to the daemon: on `path`, else on the default socket (`paths.default_socket`).

    `timeout_s` bounds each control call. `reconnect`: when the daemon went away, the next call
    waits for it to come back, for `reconnect_s` at most. Close the client, or use it in `with`.

    :raises NotRunning: no daemon answers; the text names the socket.
    :raises PermissionDenied: this user may not connect.
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
        client._run(client._operations.attach())
    except BaseException:
        client.close()
        raise

    return client


class Client:
    """A connection to the daemon. Several threads may use it; `connect` makes one.

    Each method raises the exceptions of `switchgear.ipc.errors`: what the daemon answered,
    TimedOut, ConnectionLost (in the middle of a call), NotRunning.
    """

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._lock = threading.Lock()
        self._idle: list[Control] = []
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._closed = False
        forks.watch(self)

    @property
    def path(self) -> str:
        """The daemon's socket."""
        return self._operations.path

    def info(self) -> Info:
        """Version, pid and readiness of the daemon."""
        return self._run(self._operations.info())

    def status(self) -> Status:
        """Backends, workers, models, sessions, jobs and counters."""
        return self._run(self._operations.status())

    def models(self) -> list[Model]:
        """The loaded models."""
        return self._run(self._operations.models())

    def describe(self, model: Model | str) -> Model:
        """A model by name, hash or the first 8 or more digits of a hash, as it is now.

        :raises UnknownModel: none is loaded by that name.
        """
        return self._run(self._operations.describe(model))

    def load_model(
        self,
        model: ModelSource,
        name: str | None = None,
        on_progress: OnProgress | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Model:
        """Hands a .tflite model to the daemon and waits until it serves.

        `model` is a path, bytes or a descriptor. The client keeps its own copy (the bytes, or a
        descriptor of the file) to load it again after the daemon went away. `on_progress` is
        called in this thread. `timeout_s`: stop to wait; the job goes on.

        :raises BadModel: the bytes are no model that runs.
        :raises UnsupportedModel: no backend here has what it needs.
        :raises BadDescriptor: the file cannot be read.
        """
        return self._run(self._operations.load_model(model, name, on_progress, timeout_s))

    def check_model(
        self,
        model: Model | str,
        on_progress: OnProgress | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Model:
        """Has the daemon try the model again on each backend, and waits for the outcome."""
        return self._run(self._operations.check_model(model, on_progress, timeout_s))

    def prepare_model(
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
        return self._run(
            self._operations.prepare_model(
                model, backends, precision, tune_s, again, on_progress, timeout_s
            )
        )

    def explain(
        self, last: int = 1, *, session: int | None = None, request: int | None = None
    ) -> list[dict[str, Any]]:
        """Why the newest requests ran where they ran, the oldest first; `text` is in words."""
        return self._run(self._operations.explain(last, session, request))

    def watch_events(self, on_event: OnEvent, timeout_s: float | None = None) -> None:
        """Calls `on_event` with what the protocol did last and does from now on (shedding,
        tripped, degraded, recovering), until it returns False or the time is over."""
        self._run(self._operations.watch_events(on_event, timeout_s))

    def unload_model(self, model: Model | str, force: bool = False) -> None:
        """Unloads a model; with `force` its sessions are ended.

        :raises ModelInUse: sessions use it.
        """
        self._run(self._operations.unload_model(model, force))

    def infer(
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
        return self._run(
            self._operations.infer(model, inputs, deadline_ms, backends, strict, precision)
        )

    def open_session(
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
        """Opens a session, in which at most `slots` requests are in flight.

        `on_busy`: wait, reject, or replace_oldest (the newest frame counts). `priority`: high,
        normal or batch. `backends`: the wanted ones in order of preference, for which the CPU
        stands in while none is ready; `strict`: an error instead (where they are still to be
        prepared, that is waited for). `precision`: the lowest that may be used: int4, int8,
        fp16 or fp32; "auto" is any that was checked, but int4. `input_shapes`: sizes for the
        dimensions that the model leaves open; shapes that are new to the daemon are prepared
        first, which takes a while.
        `output_capacity_bytes`: room for each output of unknown size. `policy`:
        max_performance, prefer_gpu, prefer_npu, prefer_cpu, max_efficiency or min_power.
        `slow_ms`, `recover_ms`: this session's own limits of a frame. `events`: the daemon
        tells how the places where it may run stand: `Session.events`. `hedge`: a request may
        run in a second place too, where that idles; the first good answer is the result.

        :raises BadShape: the model fixes a dimension that `input_shapes` changes.
        :raises UnknownModel: no such model is loaded.
        """
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
        core, sock = self._run(operations.open_session(options))
        session = Session(
            core,
            sock,
            options,
            lambda: self._run(operations.open_session(options)),
            operations.reconnect,
        )
        self._sessions.add(session)
        return session

    def close(self) -> None:
        """Ends the client and the sessions that it opened. May be repeated."""
        self._closed = True
        for session in list(self._sessions):
            session.close()

        with self._lock:
            idle, self._idle = self._idle, []

        for control in idle:
            control.close()

        self._operations.close()

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        idle, self._idle = self._idle, []
        for control in idle:
            control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(
                f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2
            )
            self.close()

    def _run(self, steps: Steps[T]) -> T:
        """Carries out steps in this thread."""
        if self._closed:
            steps.close()
            raise ConnectionLost("the client is closed")

        work = _Work(self)
        try:
            step = next(steps)
            while True:
                try:
                    outcome = work.carry_out(step)
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(outcome)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            work.end()

    def _checkout(self) -> Control:
        while True:
            with self._lock:
                control = self._idle.pop() if self._idle else None

            if control is None:
                return Control(self._operations.path, self._operations.timeout_s)

            if control.idle:
                return control

            control.close()

    def _checkin(self, control: Control) -> None:
        # One is kept: further ones were for calls that ran at the same time.
        with self._lock:
            if control.idle and not self._idle and not self._closed:
                self._idle.append(control)
                return

        control.close()


class _Work:
    """One piece of work and the connection that it has."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._control: Control | None = None

    def carry_out(self, step: Step) -> Any:
        if isinstance(step, Attach):
            self.end()
            self._control = self._client._checkout()
            return None

        if isinstance(step, Wait):
            time.sleep(step.seconds)
            return None

        if isinstance(step, Blocking):
            return step.function()

        assert self._control is not None
        if isinstance(step, Next):
            return self._control.next(timeout_s=step.timeout_s)

        assert isinstance(step, Call)
        return self._control.call(
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
