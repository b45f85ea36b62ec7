"""The loaded models: who may use them, under which names, and how their load went."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, Final

from switchgear.daemon.config import Configuration
from switchgear.daemon.instances import Instance, Instances
from switchgear.daemon.jobs import Job
from switchgear.daemon.model_store import MEMORY_LIMIT_BYTES, ModelStore, Stored
from switchgear.daemon.pool import Pool
from switchgear.daemon.validation import Shapes, Validation, Verdict
from switchgear.ipc import worker
from switchgear.ipc.errors import (
    BadRequest,
    BadShape,
    Busy,
    Cancelled,
    ModelInUse,
    NotPrepared,
    QuotaExceeded,
    TimedOut,
    UnknownModel,
)
from switchgear.ipc.record import Priority
from switchgear.ipc.slot import TensorSpec

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# Names that one user may give one model; the oldest is forgotten.
NAMES_PER_USER: Final = 16
DIGEST_PREFIX: Final = re.compile(r"[0-9a-f]{8,64}")
# Threads that copy models, in all; a file system that never answers holds one of them.
COPIES_AT_ONCE: Final = 4
COPIES_PER_USER: Final = 2
COPY_LIMIT_S: Final = 120.0
# Each choice of input shapes tried for a model is remembered, up to this many.
SHAPES_PER_MODEL: Final = 64

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Model:
    """A model's bytes and what is known of it.

    `users` has each user that loaded it, with the names that the user gave it, the newest last.
    `resident_name` is its name for everybody, where the configuration keeps it loaded.
    `slowest_run_ns` and `deaths` are the lanes'.
    """

    stored: Stored
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    names: str
    state: bool
    operators: dict[str, int]
    instance_bytes: int
    run_us: int
    users: dict[int, list[str]] = field(default_factory=dict)
    resident_name: str = ""
    status: str = "loading"
    backends: dict[str, str] = field(default_factory=dict)
    timeline: list[tuple[str, int, int]] = field(default_factory=list)
    sessions: int = 0
    slowest_run_ns: int = 0
    deaths: int = 0
    quarantined: bool = False
    instance: Instance | None = None

    @property
    def digest(self) -> str:
        return self.stored.digest

    @property
    def fd(self) -> int:
        return self.stored.fd

    @property
    def label(self) -> str:
        """How logs and errors name it."""
        names = [name for _, names in sorted(self.users.items()) for name in names]
        return self.resident_name or (names[0] if names else self.digest[:12])

    @property
    def resident(self) -> bool:
        return bool(self.resident_name)

    def answers_to(self, name: str, uid: int) -> bool:
        return name in self.users.get(uid, ()) or (self.resident and name == self.resident_name)

    def add_name(self, name: str | None, uid: int) -> None:
        names = self.users.setdefault(uid, [])
        if name:
            if name in names:
                names.remove(name)

            names.append(name)
            del names[:-NAMES_PER_USER]

    def visible_to(self, uid: int) -> bool:
        return uid == 0 or self.resident or uid in self.users

    def to_json(self, uid: int) -> dict[str, Any]:
        return {
            "model": self.digest,
            "name": names[-1] if (names := self.users.get(uid)) else self.label,
            "size_bytes": self.stored.size_bytes,
            "storage": self.stored.storage,
            "owner_uid": uid if uid in self.users else min(self.users, default=os.geteuid()),
            "resident": self.resident,
            "status": "quarantined" if self.quarantined else self.status,
            "inputs": [worker.spec_to_json(spec) for spec in self.inputs],
            "outputs": [worker.spec_to_json(spec) for spec in self.outputs],
            "names": self.names,
            "state": self.state,
            "operators": self.operators,
            "backends": self.backends,
            "run_us": self.run_us,
            "sessions": self.sessions,
            "timeline": [
                {"name": name, "start_us": start, "duration_us": duration}
                for name, start, duration in self.timeline
            ],
        }


class Models:
    """All loaded models. Loading runs as a job; everything else does not wait."""

    def __init__(
        self,
        configuration: Configuration,
        store: ModelStore,
        validation: Validation,
        instances: Instances,
        pool: Pool,
    ) -> None:
        self._limits = configuration.limits
        self._store = store
        self._validation = validation
        self._instances = instances
        self._pool = pool
        self._models: dict[str, Model] = {}
        self._shapes: Counter[str] = Counter()
        self._copies: Counter[int] = Counter()

    def all_for(self, uid: int) -> list[Model]:
        return [model for model in self._models.values() if model.visible_to(uid)]

    def resolve(self, text: str, uid: int) -> Model:
        """A model by name, hash or the beginning of a hash.

        :raises UnknownModel: the user has none of this name, or several.
        """
        for model in self._models.values():
            if model.answers_to(text, uid):
                return model

        if DIGEST_PREFIX.fullmatch(text):
            found = [m for m in self.all_for(uid) if m.digest.startswith(text)]
            if len(found) == 1:
                return found[0]

        raise UnknownModel(f"no model {text[:140]!r} is loaded")

    def check_load(self, fd: int, name: str | None, uid: int) -> int:
        """Refuses at once what cannot be loaded; returns the size. Does not block.

        :raises SwitchgearError: BadRequest, BadDescriptor, BadModel, ModelTooLarge,
            QuotaExceeded."""
        if name is not None and not NAME.fullmatch(name):
            raise BadRequest(
                "a name has 1 to 128 letters, digits, '.', '_' and '-', and does not begin "
                "with one of the last three"
            )

        size = self._store.check(fd)
        own = [model for model in self._models.values() if uid in model.users]
        if len(own) >= self._limits.models_per_user:
            raise QuotaExceeded(f"user {uid} has {len(own)} models loaded, the most allowed")

        in_memory = sum(m.stored.size_bytes for m in own if m.stored.path is None)
        limit = self._limits.memory_models_mib_per_user << 20
        if size <= MEMORY_LIMIT_BYTES and in_memory + size > limit:
            raise QuotaExceeded(
                f"models of user {uid} hold {in_memory} bytes of memory, the limit is {limit}",
                bytes_needed=size,
                bytes_free=limit - in_memory,
            )

        return size

    async def load(
        self,
        job: Job,
        fd: int,
        size: int,
        name: str | None,
        uid: int,
        *,
        resident: bool = False,
    ) -> Model:
        """Copies, hashes, tries and loads a model. Takes over `fd`.

        :raises SwitchgearError: why it cannot be served; nothing of it is kept then.
        """
        begin_ns = monotonic_ns()
        timeline: list[tuple[str, int, int]] = []

        def mark(step: str, duration_us: int, ended_us_ago: int = 0) -> None:
            end_us = (monotonic_ns() - begin_ns) // 1000 - ended_us_ago
            timeline.append((step, max(0, end_us - duration_us), duration_us))

        stored = await self._copy(job, fd, size, uid)
        try:
            timeline.append(("copy", 0, stored.copy_us))
            timeline.append(("hash", stored.copy_us, stored.hash_us))
            job.progress("validate")
            start_ns = monotonic_ns()
            known = self._models.get(stored.digest)
            verdict = await self._validation.check(stored.digest, stored.fd, {})
            mark("validate", (monotonic_ns() - start_ns) // 1000)
            known = self._models.get(stored.digest)
            model = known or _from_verdict(stored, verdict)
            if known is None:
                self._models[stored.digest] = model
        except BaseException:
            os.close(stored.fd)
            raise

        if known is not None:
            os.close(stored.fd)

        model.add_name(name, uid)
        if resident:
            model.resident_name = name or model.digest[:12]

        model.quarantined = False
        model.deaths = 0
        self._drop_name(name, uid, model)
        try:
            await self._serve(job, model, uid, mark)
        except BaseException:
            if known is None:
                self._forget(model)

            raise

        model.timeline = timeline
        return model

    def _drop_name(self, name: str | None, uid: int, keep: Model) -> None:
        """A name means the model that was loaded last under it."""
        for model in self._models.values():
            if model is not keep and name in (names := model.users.get(uid, [])):
                names.remove(name)

    async def _copy(self, job: Job, fd: int, size: int, uid: int) -> Stored:
        job.progress("copy", 0, size)
        if self._copies[uid] >= COPIES_PER_USER or self._copies.total() >= COPIES_AT_ONCE:
            os.close(fd)
            raise Busy("too many models are being copied", retry_after_ms=100)

        loop = asyncio.get_running_loop()
        future: asyncio.Future[Stored] = loop.create_future()
        stop = threading.Event()
        self._copies[uid] += 1

        def end(result: Stored | BaseException) -> None:
            self._copies[uid] -= 1
            if future.done():
                if isinstance(result, Stored):
                    os.close(result.fd)
            elif isinstance(result, Stored):
                future.set_result(result)
            else:
                future.set_exception(result)

        def advance(done: int) -> None:
            if not stop.is_set():
                job.progress("copy", done, size)

        def tell(done: int) -> None:
            loop.call_soon_threadsafe(advance, done)

        def copy() -> None:
            result: Stored | BaseException
            try:
                result = self._store.take(fd, size, tell, stop)
            except BaseException as error:  # handed to the loop, whatever it is
                result = error
            finally:
                os.close(fd)

            try:
                loop.call_soon_threadsafe(end, result)
            except RuntimeError:
                # The daemon has ended meanwhile.
                if isinstance(result, Stored):
                    os.close(result.fd)

        # A daemon thread: a file system that never answers must not keep the process alive.
        threading.Thread(target=copy, name="copy", daemon=True).start()
        try:
            async with asyncio.timeout(COPY_LIMIT_S):
                return await asyncio.shield(future)
        except TimeoutError:
            raise TimedOut(f"copying the model took over {COPY_LIMIT_S:g} s") from None
        except asyncio.CancelledError:
            raise Cancelled("loading was cancelled") from None
        finally:
            stop.set()
            if not future.done():
                future.cancel()

    async def _serve(self, job: Job, model: Model, uid: int, mark: Any) -> None:
        """Loads the model in the user's worker, so that its first frame finds it warm."""
        if model.instance is None:
            model.instance = (
                self._instances.acquire(
                    model, {}, model.inputs, model.outputs, model.instance_bytes
                )
                if not model.state
                else None
            )

        job.progress("load")
        if model.instance is not None:
            start_ns = monotonic_ns()
            lane = self._pool.lane(uid, "cpu", Priority.NORMAL)
            result = await lane.load(model.instance)
            load_us = int(result.get("load_us", 0))
            run_us = int(result.get("first_run_us", 0))
            waited_us = (monotonic_ns() - start_ns) // 1000
            mark("start worker", max(0, waited_us - load_us - run_us), load_us + run_us)
            mark("compile", load_us, run_us)
            mark("first run", run_us)

        model.backends["cpu"] = "ready"
        model.status = "ready"

    async def check(self, job: Job, model: Model, uid: int) -> Model:
        """Tries a loaded model again, and on each backend.

        :raises SwitchgearError: what is wrong with it.
        """
        job.progress("validate")
        verdict = await self._validation.check(model.digest, model.fd, {}, again=True)
        model.run_us = int(verdict["run_us"])
        model.quarantined = False
        model.deaths = 0
        await self._serve(job, model, uid, lambda *_: None)
        return model

    async def prepare_shapes(self, job: Job, model: Model, shapes: Shapes) -> None:
        """Tries a model with a choice of input shapes.

        :raises BadShape: the model does not take them.
        :raises QuotaExceeded: it has been tried with too many.
        """
        check_shapes(model, shapes)
        job.progress("validate")
        if self._validation.known(model.digest, shapes) is None:
            if self._shapes[model.digest] >= SHAPES_PER_MODEL:
                raise QuotaExceeded(
                    f"model {model.label} was tried in {SHAPES_PER_MODEL} choices of shapes"
                )

            self._shapes[model.digest] += 1
            await self._validation.check(model.digest, model.fd, shapes)

    def instance_for(
        self, model: Model, shapes: Shapes, output_capacity_bytes: int | None
    ) -> tuple[Instance, tuple[TensorSpec, ...]]:
        """An instance for a session, and its outputs with the room that the session wants.

        :raises BadShape: the model does not take the shapes.
        :raises NotPrepared: it has not been tried with them.
        :raises Overloaded: there are too many instances.
        """
        if all(
            tuple(shape) == spec.shape
            for name, shape in shapes.items()
            for spec in model.inputs
            if spec.name == name
        ) and {spec.name for spec in model.inputs} >= set(shapes):
            shapes = {}

        inputs, outputs, size = model.inputs, model.outputs, model.instance_bytes
        if shapes:
            check_shapes(model, shapes)
            verdict = self._validation.known(model.digest, shapes)
            if verdict is None:
                raise NotPrepared(f"model {model.label} was not tried with these shapes")

            inputs = _specs(verdict["inputs"])
            outputs = _specs(verdict["outputs"])
            size = int(verdict["instance_bytes"])

        instance = self._instances.acquire(model, dict(shapes), inputs, outputs, size)
        if output_capacity_bytes is not None:
            outputs = tuple(_with_room(spec, output_capacity_bytes) for spec in outputs)

        return instance, outputs

    def release(self, instance: Instance) -> None:
        """A session ended; an instance that nobody uses leaves the workers."""
        if self._instances.release(instance):
            for lane in self._pool.lanes():
                lane.unload(instance)

    def unload(self, model: Model, uid: int, *, resident_too: bool) -> None:
        """Takes a user's hold away; the last one ends the model.

        :raises ModelInUse: the configuration keeps it, or sessions use it.
        """
        if model.resident and not resident_too:
            raise ModelInUse(f"model {model.label} is kept loaded by the configuration")

        if model.sessions:
            raise ModelInUse(f"{model.sessions} sessions use model {model.label}")

        model.users.pop(uid, None)
        if uid == 0:
            model.users.clear()

        if not model.users:
            self._forget(model)

    def _forget(self, model: Model) -> None:
        if self._models.pop(model.digest, None) is not None:
            if model.instance is not None:
                self.release(model.instance)
                model.instance = None

            os.close(model.fd)

    def close(self) -> None:
        for model in list(self._models.values()):
            self._forget(model)


def _specs(data: list[worker.Packet]) -> tuple[TensorSpec, ...]:
    return tuple(worker.spec_from_json(item) for item in data)


def _with_room(spec: TensorSpec, capacity_bytes: int) -> TensorSpec:
    from dataclasses import replace

    return replace(spec, capacity_bytes=capacity_bytes) if spec.dynamic else spec


def _from_verdict(stored: Stored, verdict: Verdict) -> Model:
    return Model(
        stored=stored,
        inputs=_specs(verdict["inputs"]),
        outputs=_specs(verdict["outputs"]),
        names=str(verdict["names"]),
        state=bool(verdict["state"]),
        operators={str(name): int(count) for name, count in verdict["operators"].items()},
        instance_bytes=int(verdict["instance_bytes"]),
        run_us=int(verdict["run_us"]),
    )


def check_shapes(model: Model, shapes: Shapes) -> None:
    """Only dimensions that are -1 in the signature may be chosen.

    :raises BadShape: a name is unknown, or a fixed dimension would change.
    """
    specs = {spec.name: spec for spec in model.inputs}
    for name, shape in shapes.items():
        spec = specs.get(name)
        if spec is None:
            raise BadShape(f"model {model.label} has no input {name[:140]!r}")

        fits = len(shape) == len(spec.signature) and all(
            want > 0 and have in (-1, want)
            for want, have in zip(shape, spec.signature, strict=False)
        )
        if not fits:
            raise BadShape(f"input {name!r} takes {list(spec.signature)}, not {list(shape)}")
