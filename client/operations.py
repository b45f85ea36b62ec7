"""What a client does on the control plane, as steps without I/O (`steps.py`)."""

from __future__ import annotations

import base64
import binascii
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

from switchgear.client.core import SessionCore
from switchgear.client.models import (
    Info,
    Model,
    Progress,
    Status,
    model_from_json,
    tensors_from_json,
)
from switchgear.client.opened import Opened
from switchgear.client.options import SessionOptions
from switchgear.client.result import BACKENDS, PRECISIONS, REASONS, ReplyFields, Result
from switchgear.client.source import ModelCopy, ModelSource
from switchgear.client.steps import Attach, Blocking, Call, Next, Steps, Wait, growing_waits
from switchgear.client.tensors import Target, Value, missing_inputs, view_of, write_all
from switchgear.client.wire import INTERFACE, Reply, error_of
from switchgear.ipc.arena import map_arena
from switchgear.ipc.dtypes import DTYPES
from switchgear.ipc.errors import (
    BadModel,
    BadRequest,
    Cancelled,
    NotPrepared,
    NotRunning,
    ProtocolError,
    SwitchgearError,
    TimedOut,
    UnknownModel,
    UnsupportedModel,
)
from switchgear.ipc.record import NO_READING, Backend
from switchgear.ipc.varlink import Descriptors
from switchgear.ipc.worker import layout_from_json

# False ends the watch.
OnEvent = Callable[[dict[str, Any]], "bool | None"]
OnProgress = Callable[[Progress], None]
_END_STATES: Final = ("done", "failed", "cancelled")


class Operations:
    """The client's state that is not I/O, and its work. Owns the copies of models."""

    def __init__(
        self, path: str, timeout_s: float, reconnect: bool, reconnect_s: float
    ) -> None:
        self.path = path
        self.timeout_s = timeout_s
        self.reconnect = reconnect
        self.reconnect_s = reconnect_s
        self._connected = False
        self._copies: dict[str, ModelCopy] = {}

    def close(self) -> None:
        for model_copy in self._copies.values():
            model_copy.close()

        self._copies.clear()

    def attach(self) -> Steps[None]:
        """A connection to work on. Once connected, the client waits for a daemon to come back.

        :raises NotRunning: no daemon answers.
        """
        patient = self._connected and self.reconnect
        until = time.monotonic() + (self.reconnect_s if patient else 0)
        for wait_s in growing_waits():
            try:
                yield Attach()
            except NotRunning:
                if time.monotonic() + wait_s > until:
                    raise
            else:
                self._connected = True
                return

            yield Wait(wait_s)

    def _call(self, method: str, **parameters: object) -> Steps[dict[str, Any]]:
        """One call on a connection of its own."""
        yield from self.attach()
        reply: Reply = yield Call(method, parameters, timeout_s=self.timeout_s)
        return reply.parameters

    def info(self) -> Steps[Info]:
        return cast(Info, (yield from self._call("GetInfo")))

    def status(self) -> Steps[Status]:
        return cast(Status, (yield from self._call("GetStatus")))

    def models(self) -> Steps[list[Model]]:
        answer = yield from self._call("ListModels")
        return [model_from_json(model) for model in _field(answer, "models", list)]

    def describe(self, model: Model | str) -> Steps[Model]:
        answer = yield from self._call("DescribeModel", model=reference(model))
        return model_from_json(_field(answer, "model", dict))

    def explain(self, last: int, session: int | None, request: int | None) -> Steps[list[Any]]:
        parameters: dict[str, object] = {"last": last}
        if session is not None:
            parameters["session"] = session

        if request is not None:
            parameters["request"] = request

        answer = yield from self._call("Explain", **parameters)
        decisions: list[Any] = _field(answer, "decisions", list)
        return decisions

    def watch_events(self, on_event: OnEvent, timeout_s: float | None) -> Steps[None]:
        yield from self.attach()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        reply: Reply = yield Call("WatchEvents", {}, more=True, timeout_s=self.timeout_s)
        while True:
            for event in _field(reply.parameters, "events", list):
                if on_event(event) is False:
                    return

            left_s = None if until is None else until - time.monotonic()
            if left_s is not None and left_s <= 0:
                return

            try:
                reply = yield Next(timeout_s=left_s)
            except TimedOut:
                return

    def unload_model(self, model: Model | str, force: bool) -> Steps[None]:
        yield from self._call("UnloadModel", model=reference(model), force=force)
        kept = self._copies.pop(reference(model), None)
        if kept is not None:
            kept.close()

    def check_model(
        self, model: Model | str, on_progress: OnProgress | None, timeout_s: float | None
    ) -> Steps[Model]:
        answer = yield from self._call("CheckModel", model=reference(model))
        result = yield from self._watch(answer, on_progress, timeout_s)
        return model_from_json(result)

    def prepare_model(
        self,
        model: Model | str,
        backends: Sequence[str] | None,
        precision: str,
        tune_s: int,
        again: bool,
        on_progress: OnProgress | None,
        timeout_s: float | None,
    ) -> Steps[Model]:
        parameters: dict[str, object] = {"model": reference(model), "precision": precision}
        if backends is not None:
            parameters["backends"] = list(backends)

        if tune_s:
            parameters["tune_s"] = tune_s

        if again:
            parameters["again"] = again

        answer = yield from self._call("PrepareModel", **parameters)
        result = yield from self._watch(answer, on_progress, timeout_s)
        return model_from_json(result)

    def load_model(
        self,
        source: ModelSource,
        name: str | None,
        on_progress: OnProgress | None,
        timeout_s: float | None,
    ) -> Steps[Model]:
        model_copy = ModelCopy(source, name)
        try:
            yield from self.attach()
            model = yield from self._load(model_copy, on_progress, timeout_s)
        except BaseException:
            model_copy.close()
            raise

        before = self._copies.pop(model.hash, None)
        if before is not None:
            model_copy.name = model_copy.name or before.name
            before.close()

        self._copies[model.hash] = model_copy
        return model

    def _load(
        self, model_copy: ModelCopy, on_progress: OnProgress | None, timeout_s: float | None
    ) -> Steps[Model]:
        descriptor, temporary = yield Blocking(model_copy.descriptor)
        try:
            parameters: dict[str, object] = {"descriptor": 0}
            if model_copy.name is not None:
                parameters["name"] = model_copy.name

            reply: Reply = yield Call(
                "LoadModel", parameters, (descriptor,), timeout_s=self.timeout_s
            )
        finally:
            if temporary:
                os.close(descriptor)

        result = yield from self._watch(reply.parameters, on_progress, timeout_s)
        return model_from_json(result)

    def _watch(
        self,
        started: Mapping[str, Any],
        on_progress: OnProgress | None,
        timeout_s: float | None,
    ) -> Steps[dict[str, Any]]:
        """Follows a job to its end, which is its result.

        :raises TimedOut: it runs on after `timeout_s`. The job is not cancelled: another client
            may wait for the same one.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        job = _field(started, "job", int)
        reply: Reply = yield Call(
            "WatchJob", {"job": job}, more=True, timeout_s=_left_s(until, job)
        )
        while True:
            said = reply.parameters
            state = _field(said, "state", str)
            if on_progress is not None:
                on_progress(
                    Progress(
                        state,
                        str(said.get("phase") or ""),
                        int(said.get("done") or 0),
                        int(said.get("total") or 0),
                    )
                )

            if state in _END_STATES:
                return _end_of_job(state, said)

            if not reply.continues:
                raise ProtocolError(f"the daemon stopped to report job {job} in state {state}")

            reply = yield Next(timeout_s=_left_s(until, job))

    def open_session(self, options: SessionOptions) -> Steps[tuple[SessionCore, socket.socket]]:
        """Opens a session; loads the model and prepares it for its shapes or its backends where
        the daemon asks for it and the client can. The caller owns what is returned."""
        yield from self.attach()
        tried: set[type[SwitchgearError]] = set()
        while True:
            try:
                reply: Reply = yield Call(
                    "OpenSession", options.parameters(), timeout_s=self.timeout_s
                )
                break
            except (NotPrepared, UnknownModel) as refusal:
                # Each remedy is tried once.
                error: NotPrepared | UnknownModel = refusal
                if type(error) in tried:
                    raise

            tried.add(type(error))
            if isinstance(error, NotPrepared):
                yield from self._prepare(options, error)
            else:
                yield from self._load_again(options.model, error)

        with _closed_after(reply):
            opened, socket_index, arena_index = _read_opening(reply.parameters)
            sock = socket.socket(fileno=reply.descriptors.take(socket_index))
            try:
                core: SessionCore = yield Blocking(
                    lambda: _map(opened, reply.descriptors, arena_index)
                )
            except BaseException:
                sock.close()
                raise

        core.events.wanted = options.events
        return core, sock

    def _prepare(self, options: SessionOptions, error: NotPrepared) -> Steps[None]:
        shapes = options.shapes()
        if shapes is not None:
            method: str = "PrepareShapes"
            parameters: dict[str, object] = {"input_shapes": shapes}
        elif options.strict and options.backends:
            method = "PrepareModel"
            parameters = {"backends": list(options.backends), "precision": options.precision}
        else:
            raise error

        parameters["model"] = options.model
        reply: Reply = yield Call(method, parameters, timeout_s=self.timeout_s)
        yield from self._watch(reply.parameters, None, None)

    def _load_again(self, model: str, error: UnknownModel) -> Steps[None]:
        for digest, model_copy in self._copies.items():
            if model in (digest, model_copy.name):
                loaded = yield from self._load(model_copy, None, None)
                if loaded.hash != digest:
                    raise BadModel(f"the file of model {model} has changed since it was loaded")

                return

        raise error

    def infer(
        self,
        model: Model | str,
        inputs: Mapping[str, Value],
        deadline_ms: float | None,
        backends: Sequence[str] | None,
        strict: bool,
        precision: str,
    ) -> Steps[Result]:
        described = model if isinstance(model, Model) else (yield from self.describe(model))
        parameters: dict[str, object] = {
            "model": reference(model),
            "inputs": _inline(described, inputs),
            "strict": strict,
        }
        if backends is not None:
            parameters["backends"] = list(backends)

        if precision != "auto":
            parameters["precision"] = precision

        if deadline_ms is not None:
            if not deadline_ms > 0:
                raise BadRequest(f"deadline_ms is {deadline_ms}; it has to be above 0")

            parameters["timeout_us"] = max(1, int(deadline_ms * 1000))

        answer = yield from self._call("Infer", **parameters)
        return _inline_result(answer)


def reference(model: Model | str) -> str:
    """What the daemon's methods take for a model: its hash, or the name that was given."""
    return model.hash if isinstance(model, Model) else model


def _field(answer: Mapping[str, Any], name: str, kind: type) -> Any:
    value = answer.get(name)
    if not isinstance(value, kind):
        raise ProtocolError(f"the daemon's answer has no {name}")

    return value


def _left_s(until: float | None, job: int) -> float | None:
    if until is None:
        return None

    left_s = until - time.monotonic()
    if left_s <= 0:
        raise TimedOut(f"job {job} is not done within the time limit; it goes on", job=job)

    return left_s


def _end_of_job(state: str, said: Mapping[str, Any]) -> dict[str, Any]:
    if state == "done":
        result = said.get("result")
        return result if isinstance(result, dict) else {}

    if state == "cancelled":
        raise Cancelled("the job was cancelled")

    name = str(said.get("error") or "InternalError")
    raise error_of(name if "." in name else f"{INTERFACE}.{name}", said.get("parameters") or {})


@contextmanager
def _closed_after(reply: Reply) -> Iterator[None]:
    try:
        yield
    finally:
        reply.descriptors.close()


def _read_opening(said: Mapping[str, Any]) -> tuple[Opened, int, int]:
    """The session, and the indices of its socket and its arena."""
    try:
        opened = Opened(
            session=int(said["session"]),
            epoch=int(said["epoch"]),
            slots=int(said["slots"]),
            layout=layout_from_json(said["layout"]),
            inputs=tensors_from_json(said["inputs"]),
            outputs=tensors_from_json(said["outputs"]),
            state=bool(said["state"]),
        )
        return opened, int(said["socket"]), int(said["arena"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the daemon's session cannot be read: {error!r}") from None


def _map(opened: Opened, descriptors: Descriptors, index: int) -> SessionCore:
    # Taken here, in the thread that maps: where that is never started, the reply closes it.
    arena = descriptors.take(index)
    try:
        return SessionCore(opened, map_arena(arena, opened.layout.size_bytes))
    finally:
        os.close(arena)


def _inline(model: Model, inputs: Mapping[str, Value]) -> dict[str, object]:
    """Tensors as `Value`s of the interface; the same checks as a session's."""
    memory: dict[str, bytearray] = {}
    targets: dict[str, Target] = {}
    for spec in model.inputs:
        if spec.dtype not in DTYPES:
            raise UnsupportedModel(f"tensor {spec.name!r} is of the unknown dtype {spec.dtype}")

        size = DTYPES[spec.dtype].size_bytes
        for dim in spec.shape:
            size *= dim

        memory[spec.name] = bytearray(size)
        targets[spec.name] = Target(spec, memoryview(memory[spec.name]))

    if len(inputs) != len(targets):
        raise missing_inputs(targets, inputs)

    write_all(targets, inputs)
    return {
        spec.name: {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data": base64.b64encode(memory[spec.name]).decode(),
        }
        for spec in model.inputs
    }


def _inline_result(answer: Mapping[str, Any]) -> Result:
    try:
        views = {}
        for name, value in answer["outputs"].items():
            raw = memoryview(bytearray(base64.b64decode(value["data"], validate=True)))
            shape = [int(dim) for dim in value["shape"]]
            views[str(name)] = view_of(raw, DTYPES[value["dtype"]], shape)

        fields = ReplyFields(
            kind=0,
            version=0,
            flags=0,
            epoch=0,
            request_id=0,
            output_slot=0,
            domain=0,
            backend=_number(BACKENDS, answer["backend"], Backend.OTHER),
            precision=_number(PRECISIONS, answer["precision"], 0),
            code=0,
            reason=_number(REASONS, answer["reason"], 0),
            retries=0,
            tried=0,
            temperature_age_ms=NO_READING,
            retry_after_ms=0,
            queue_ns=int(answer["queue_us"]) * 1000,
            run_ns=int(answer["run_us"]) * 1000,
            total_ns=int(answer["total_us"]) * 1000,
        )
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        raise ProtocolError(f"the daemon's result cannot be read: {error!r}") from None

    return Result(views, fields)


def _number(names: tuple[str, ...], name: str, other: int) -> int:
    return names.index(name) if name in names else other
