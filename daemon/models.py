"""The loaded models: who may use them, under which names, and how their load went."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final

from switchgear.daemon import warming
from switchgear.daemon.config import Configuration
from switchgear.daemon.copying import Copies
from switchgear.daemon.instances import Instance, Instances
from switchgear.daemon.jobs import Job
from switchgear.daemon.model import Model as Model
from switchgear.daemon.model import check_shapes
from switchgear.daemon.model_store import MEMORY_LIMIT_BYTES, ModelStore, Stored
from switchgear.daemon.pool import Pool
from switchgear.daemon.validation import Shapes, Validation
from switchgear.daemon.verdicts import Verdict, Verdicts
from switchgear.ipc import worker
from switchgear.ipc.errors import (
    BadModel,
    BadRequest,
    ModelInUse,
    NotPrepared,
    QuotaExceeded,
    UnknownModel,
    UnsupportedModel,
)
from switchgear.ipc.record import Priority
from switchgear.ipc.slot import TensorSpec

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
DIGEST_PREFIX: Final = re.compile(r"[0-9a-f]{8,64}")
# Each choice of input shapes tried for a model is remembered, up to this many.
SHAPES_PER_MODEL: Final = 64

log = logging.getLogger(__name__)


class Models:
    """All loaded models. Loading runs as a job; everything else does not wait.

    `cache_dir` has a folder of what is prepared for each model; `on_loaded` is called once the
    CPU serves one, `on_gone` when nobody uses it any more.
    """

    def __init__(
        self,
        configuration: Configuration,
        store: ModelStore,
        validation: Validation,
        instances: Instances,
        pool: Pool,
        cache_dir: Path,
        on_loaded: Callable[[Model], None],
        on_gone: Callable[[Model], None],
    ) -> None:
        self._limits = configuration.limits
        self._store = store
        self._validation = validation
        self._instances = instances
        self._pool = pool
        self._cache_dir = cache_dir
        self._on_loaded = on_loaded
        self._on_gone = on_gone
        self._models: dict[str, Model] = {}
        self._shapes: Counter[str] = Counter()
        self._copies = Copies(store)
        # What loads hold that are not through, by user: their number and bytes of memory.
        self._loading: Counter[int] = Counter()
        self._loading_bytes: Counter[int] = Counter()

    @property
    def verdicts(self) -> Verdicts:
        """What was found of models before, by their bytes and shapes."""
        return self._validation.verdicts

    def all_for(self, uid: int) -> list[Model]:
        return [model for model in self._models.values() if model.visible_to(uid)]

    def resolve(self, text: str, uid: int) -> Model:
        """A model by name, hash or the beginning of a hash.

        :raises UnknownModel: the user has none of this name, or several.
        """
        # A user's own name goes before one of the configuration's.
        for model in self._models.values():
            if text in model.users.get(uid, ()):
                return model

        for model in self._models.values():
            if model.resident and text == model.resident_name:
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
        self._admit(size, uid)
        return size

    def _admit(self, size: int, uid: int) -> None:
        """:raises QuotaExceeded: the user has no room for one more model of this size."""
        own = [model for model in self._models.values() if uid in model.users]
        count = len(own) + self._loading[uid]
        if count >= self._limits.models_per_user:
            raise QuotaExceeded(f"user {uid} has {count} models loaded, the most allowed")

        in_memory = self._loading_bytes[uid] + sum(
            m.stored.size_bytes for m in own if m.stored.path is None
        )
        limit = self._limits.memory_models_mib_per_user << 20
        if size <= MEMORY_LIMIT_BYTES and in_memory + size > limit:
            raise QuotaExceeded(
                f"models of user {uid} hold {in_memory} bytes of memory, the limit is {limit}",
                bytes_needed=size,
                bytes_free=limit - in_memory,
            )

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
        try:
            # Others have come in since it was checked.
            self._admit(size, uid)
        except BaseException:
            os.close(fd)
            raise

        in_memory = size if size <= MEMORY_LIMIT_BYTES else 0
        self._loading[uid] += 1
        self._loading_bytes[uid] += in_memory
        try:
            return await self._load(job, fd, size, name, uid, resident=resident)
        finally:
            self._loading[uid] -= 1
            self._loading_bytes[uid] -= in_memory

    async def _load(
        self, job: Job, fd: int, size: int, name: str | None, uid: int, *, resident: bool
    ) -> Model:
        begin_ns = monotonic_ns()
        timeline: list[tuple[str, int, int]] = []

        def mark(step: str, duration_us: int, ended_us_ago: int = 0) -> None:
            end_us = (monotonic_ns() - begin_ns) // 1000 - ended_us_ago
            timeline.append((step, max(0, end_us - duration_us), duration_us))

        stored = await self._copies.take(job, fd, size, uid)
        try:
            timeline.append(("copy", 0, stored.copy_us))
            timeline.append(("hash", stored.copy_us, stored.hash_us))
            if stored.path is not None:
                # Until it is on disk for good.
                taken_us = stored.copy_us + stored.hash_us
                mark("store", max(0, (monotonic_ns() - begin_ns) // 1000 - taken_us))

            job.progress("validate")
            start_ns = monotonic_ns()
            verdict = await self._validation.check(stored.digest, stored.fd, {})
            mark("validate", (monotonic_ns() - start_ns) // 1000)
            model = self._models.get(stored.digest)
            if model is None:
                model = _from_verdict(stored, verdict)
                model.cache = str(self._cache_dir / stored.digest)
        except BaseException as error:
            if isinstance(error, BadModel | UnsupportedModel):
                self._store.discard(stored)

            os.close(stored.fd)
            raise

        if model.stored is not stored:
            os.close(stored.fd)

        self._models[stored.digest] = model
        with self._held(model):
            await self._serve(job, model, uid, mark)
            model.add_name(name, uid)
            if resident:
                model.resident_name = name or model.digest[:12]

        model.forgive(self._pool.group_of(uid))
        self._drop_name(name, uid, model)
        model.timeline = timeline
        self._on_loaded(model)
        return model

    @contextlib.contextmanager
    def _held(self, model: Model) -> Iterator[None]:
        """Keeps a model and its descriptor while a job works with it, though its users go.

        :raises UnknownModel: they went before the job began.
        """
        if self._models.get(model.digest) is not model:
            raise UnknownModel(f"model {model.label} was unloaded")

        model.holds += 1
        try:
            yield
        finally:
            model.holds -= 1
            self._forget_unused(model)

    def _drop_name(self, name: str | None, uid: int, keep: Model) -> None:
        """A name means the model that was loaded last under it."""
        for model in self._models.values():
            if model is not keep and name in (names := model.users.get(uid, [])):
                names.remove(name)

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
            result = await warming.load(lane, model.instance)
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
        with self._held(model):
            verdict = await self._validation.check(model.digest, model.fd, {}, again=True)
            model.run_us = int(verdict["run_us"])
            model.forgive(self._pool.group_of(uid))
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
            with self._held(model):
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

    def check_unload(self, model: Model, *, resident_too: bool) -> None:
        """:raises ModelInUse: the configuration keeps it."""
        if model.resident and not resident_too:
            raise ModelInUse(f"model {model.label} is kept loaded by the configuration")

    def unload(self, model: Model, uid: int, *, resident_too: bool) -> None:
        """Takes a user's hold away; the last one ends the model.

        :raises ModelInUse: the configuration keeps it, or sessions of the user use it.
        """
        self.check_unload(model, resident_too=resident_too)
        if sessions := model.sessions_of(uid):
            raise ModelInUse(f"{sessions} sessions use model {model.label}")

        model.users.pop(uid, None)
        if uid == 0:
            model.users.clear()

        # Of the configuration it was, and whoever may do so has taken that away too.
        model.resident_name = ""
        self._forget_unused(model)

    def _forget_unused(self, model: Model) -> None:
        if not model.users and not model.resident and not model.holds:
            self._forget(model)

    def _forget(self, model: Model) -> None:
        if self._models.pop(model.digest, None) is not None:
            self._shapes.pop(model.digest, None)
            self._on_gone(model)
            if model.instance is not None:
                self.release(model.instance)
                model.instance = None

            os.close(model.fd)

    def close(self) -> None:
        self._validation.flush()
        for model in list(self._models.values()):
            self._forget(model)


def _specs(data: list[worker.Packet]) -> tuple[TensorSpec, ...]:
    return tuple(worker.spec_from_json(item) for item in data)


def _with_room(spec: TensorSpec, capacity_bytes: int) -> TensorSpec:
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
