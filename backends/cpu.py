"""The CPU backend: the classic TFLite interpreter of LiteRT, or of tflite_runtime."""

from __future__ import annotations

import errno
import importlib
import math
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import numpy as np

from switchgear.backends.contract import Coverage, Instance, LoadRequest, ModelInfo, Shape
from switchgear.backends.cpu_memory import fixed_memory, is_allocated
from switchgear.backends.tflite_file import read_facts
from switchgear.ipc.dtypes import DTYPES
from switchgear.ipc.errors import (
    BadShape,
    DriverError,
    OutputTooLarge,
    SwitchgearError,
    UnsupportedModel,
)
from switchgear.ipc.slot import MAX_RANK, MAX_TENSORS, SlotEntry, TensorSpec, check_shape

# The engines that have this interpreter, the preferred one first.
ENGINES: Final = (
    ("ai-edge-litert", "ai_edge_litert.interpreter"),
    ("tflite-runtime", "tflite_runtime.interpreter"),
)
# How the engine says that it lacks an operator: at construction one of the schema's, at
# allocation a custom one.
_LACKING: Final = re.compile(
    r"Didn't find op for builtin opcode '(?P<builtin>\w+)' version '(?P<version>\d+)'"
    r"|unresolved custom op: (?P<custom>\S+?)\.?(?:\s|$)"
)
MAX_NAME_CHARACTERS: Final = 256
# Room for an output whose size depends on the input: this many times the largest seen.
DYNAMIC_HEADROOM: Final = 4
DYNAMIC_MINIMUM_BYTES: Final = 65536
# The texts of failed runs that an interpreter may gather.
REPORTED_LIMIT_CHARACTERS: Final = 16384


def _engine_error(error: BaseException) -> DriverError:
    # The interpreter has one error code and says the rest in text.
    return DriverError("tflite", 1, "ERROR", str(error).strip()[:2000])


def _refusal(error: BaseException, request: LoadRequest) -> DriverError | SwitchgearError:
    """What a failed construction or allocation means."""
    text = str(error).strip()[:2000]
    if not text:
        # Whatever else it refuses it gives a reason for.
        return DriverError("errno", errno.ENOMEM, "ENOMEM", "no memory for the tensors")

    found = _LACKING.search(text)
    if found is None:
        if request.shapes:
            return BadShape(f"the engine refuses these shapes: {text}")

        return _engine_error(error)

    if found["builtin"]:
        lacking = f"{found['builtin']} in version {found['version']}"
    else:
        # The engine stops at the first one; these are all that may be lacking.
        lacking = f"{found['custom']}"
        others = [n for n in read_facts(request.path).custom_operators if n != lacking]
        if others:
            lacking += f"; the model's other custom operators are {', '.join(others)}"

    return UnsupportedModel(f"the engine has no operator {lacking}"[:2000])


def installed_engine() -> tuple[str, str, Any]:
    """Name, version and module of the first engine that imports.

    :raises DriverError: none does; the text has each one's reason.
    """
    reasons = []
    for distribution, module_name in ENGINES:
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # an extension built for another numpy raises anything
            reasons.append(f"{distribution}: {error}")
        else:
            from importlib.metadata import version

            return distribution, version(distribution), module

    raise DriverError("errno", 2, "ENOENT", "; ".join(reasons))


class CpuBackend:
    """Opened once in a worker. `threads` is the interpreter's thread count."""

    name = "cpu"
    # The model's own: whatever it computes in.
    precisions: tuple[str, ...] = ()

    def __init__(self, options: Mapping[str, object]) -> None:
        threads = options.get("threads", 1)
        if not isinstance(threads, int) or threads < 1:
            raise ValueError("threads is a positive integer")

        self.threads = threads
        self.engine, self.engine_version, self._module = installed_engine()

    def identity(self) -> Mapping[str, str]:
        """The processor has no driver; its architecture is the engine's choice of kernels."""
        return {"device": platform.machine(), "driver": "none"}

    def probe(self) -> str:
        from switchgear.backends.cpu_probe import check_known_answer

        return check_known_answer(self)

    def interpreter(self, path: str, *, delegates: bool = True) -> Any:
        """A new interpreter for the model at `path`; its tensors are not allocated yet.

        :raises DriverError: the engine cannot parse it.
        :raises UnsupportedModel: it lacks an operator.
        """
        resolver = self._module.OpResolverType
        kind = resolver.AUTO if delegates else resolver.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        try:
            interpreter: Any = self._module.Interpreter(
                model_path=path,
                num_threads=self.threads,
                experimental_op_resolver_type=kind,
            )
        except (ValueError, RuntimeError, OSError) as error:
            raise _refusal(error, LoadRequest(path)) from None

        return interpreter

    def load(self, request: LoadRequest) -> Instance:
        if request.precision not in ("auto", "fp32"):
            raise UnsupportedModel(f"the cpu backend computes in fp32, not {request.precision}")

        return CpuInstance(self, request)

    def close(self) -> None:
        pass


def _signature_names(interpreter: Any, inputs: list[Any], outputs: list[Any]) -> dict[int, str]:
    """Names of the first signature by tensor number; empty where none covers the tensors."""
    wanted = {int(d["index"]) for d in inputs} | {int(d["index"]) for d in outputs}
    for signature in interpreter._get_full_signature_list().values():
        names = {int(index): str(name) for name, index in signature["inputs"].items()}
        names |= {int(index): str(name) for name, index in signature["outputs"].items()}
        if set(names) == wanted:
            return names

    return {}


def _dtype_name(details: Any) -> str:
    try:
        name = str(np.dtype(details["dtype"]).name)
    except TypeError:
        name = str(details["dtype"])

    if name not in DTYPES:
        raise UnsupportedModel(f"tensor {details['name']!r} has the element type {name}")

    return name


def _unique(names: list[str]) -> list[str]:
    if all(names) and len(set(names)) == len(names):
        return names

    # All of them: a number on some could make them equal to others.
    return [f"{name}#{number}" for number, name in enumerate(names)]


class CpuInstance:
    """A model in an interpreter of its own."""

    def __init__(self, backend: CpuBackend, request: LoadRequest) -> None:
        self._backend = backend
        self._request = request
        self._interpreter: Any = None
        self.reset()
        self.info = self._describe()
        self.precision = _precision(self._interpreter)
        nodes = sum(self.info.operators.values())
        self.coverage = Coverage(nodes, nodes, 1.0)
        self._entries = tuple(
            SlotEntry(spec.dtype, spec.shape, spec.capacity_bytes) for spec in self.info.outputs
        )

    def reset(self) -> None:
        # Neither reset_all_variables nor allocate_tensors clears the variables; a new
        # interpreter does.
        interpreter = self._backend.interpreter(self._request.path)
        for details in (*interpreter.get_input_details(), *interpreter.get_output_details()):
            # Of strings the engine makes views that crash.
            _dtype_name(details)

        self._resize(interpreter)
        try:
            interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            # Not by a name: the traceback would keep the interpreter in a cycle.
            raise _refusal(error, self._request) from None

        self._interpreter = interpreter
        self._reported = ""
        # The wrapper's own invoke only counts references first, to find views; there are none.
        inner = getattr(interpreter, "_interpreter", None)
        self._invoke = getattr(inner, "Invoke", interpreter.invoke)
        self._inputs = interpreter.get_input_details()
        self._outputs = interpreter.get_output_details()
        self._in = [interpreter.tensor(d["index"]) for d in self._inputs]
        self._out = [interpreter.tensor(d["index"]) for d in self._outputs]
        self._memory = fixed_memory(self._in, self._out)

    def _resize(self, interpreter: Any) -> None:
        inputs = interpreter.get_input_details()
        names = self._tensor_names(interpreter, inputs, interpreter.get_output_details())[0]
        unknown = set(self._request.shapes) - set(names)
        if unknown:
            raise BadShape(f"the model has no input named {sorted(unknown)[0]!r}")

        for name, details in zip(names, inputs, strict=True):
            shape = self._request.shapes.get(name)
            if shape is None:
                continue

            check_shape(name, shape, tuple(int(d) for d in details["shape_signature"]))
            try:
                # strict: without it the engine takes shapes the model does not mean.
                interpreter.resize_tensor_input(details["index"], list(shape), strict=True)
            except (ValueError, RuntimeError) as error:
                raise BadShape(f"input {name!r}: {error}") from None

    @staticmethod
    def _tensor_names(
        interpreter: Any, inputs: list[Any], outputs: list[Any]
    ) -> tuple[list[str], list[str], str]:
        signature = _signature_names(interpreter, inputs, outputs)
        if signature:
            return (
                _unique([signature[int(d["index"])] for d in inputs]),
                _unique([signature[int(d["index"])] for d in outputs]),
                "signature",
            )

        return (
            _unique([str(d["name"]) for d in inputs]),
            _unique([str(d["name"]) for d in outputs]),
            "tensors",
        )

    def _describe(self) -> ModelInfo:
        interpreter = self._interpreter
        in_names, out_names, source = self._tensor_names(
            interpreter, self._inputs, self._outputs
        )
        for name in (*in_names, *out_names):
            if len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
                raise UnsupportedModel("a tensor's name is too long or not printable")

        if max(len(in_names), len(out_names)) > MAX_TENSORS:
            raise UnsupportedModel(f"more than {MAX_TENSORS} inputs or outputs")

        operators = Counter(str(op["op_name"]) for op in interpreter._get_ops_details())
        operators.pop("DELEGATE", None)
        inputs = tuple(
            self._spec(name, details)
            for name, details in zip(in_names, self._inputs, strict=True)
        )
        outputs = tuple(
            self._spec(name, details, dynamic=not is_allocated(get, details))
            for name, details, get in zip(out_names, self._outputs, self._out, strict=True)
        )
        state = read_facts(self._request.path).state
        return ModelInfo(inputs, outputs, source, state, dict(operators))

    @staticmethod
    def _spec(name: str, details: Any, *, dynamic: bool = False) -> TensorSpec:
        dtype = _dtype_name(details)
        shape = tuple(int(d) for d in details["shape"])
        if len(shape) > MAX_RANK:
            raise UnsupportedModel(f"tensor {name!r} has more than {MAX_RANK} dimensions")

        signature = tuple(int(d) for d in details.get("shape_signature", shape))
        size = math.prod(shape) * DTYPES[dtype].size_bytes
        return TensorSpec(name, dtype, shape, signature, size, dynamic)

    def attach_input(self, tensors: Sequence[memoryview]) -> Sequence[memoryview]:
        for spec, memory in zip(self.info.inputs, tensors, strict=True):
            if len(memory) != spec.capacity_bytes:
                raise ValueError(f"input {spec.name!r} has {len(memory)} bytes")

        return tensors

    def attach_output(self, tensors: Sequence[memoryview]) -> Sequence[memoryview]:
        # Without the spare room, so that a copy of the engine's bytes fits exactly.
        if self._memory is None:
            return tensors

        return [
            memory[: spec.capacity_bytes]
            for spec, memory in zip(self.info.outputs, tensors, strict=True)
        ]

    def run(self, source: object, target: object) -> Sequence[SlotEntry]:
        # Inputs are copied, so a client that changes them meanwhile changes nothing that the
        # engine has checked.
        inputs = cast(Sequence[memoryview], source)
        outputs = cast(Sequence[memoryview], target)
        memory = self._memory
        if memory is None:
            return self._run_by_views(inputs, outputs)

        # Their number and lengths were checked when they were attached.
        for engine, bytes_in in zip(memory.inputs, inputs):  # noqa: B905
            engine[:] = bytes_in

        try:
            self._invoke()
        except (ValueError, RuntimeError) as error:
            raise self._failed_run(error) from None

        for engine, bytes_out in zip(memory.outputs, outputs):  # noqa: B905
            bytes_out[:] = engine

        return self._entries

    def _failed_run(self, error: BaseException) -> DriverError:
        """What the engine says of this run.

        It tells the texts of all failed runs, one behind the other, so only what is new counts,
        and before that grows a new interpreter takes over; not for a model with state, which
        would be lost.
        """
        text = str(error)
        new = text.removeprefix(self._reported).strip()[:2000]
        self._reported = text
        if len(text) > REPORTED_LIMIT_CHARACTERS and not self.info.state:
            self.reset()

        return DriverError("tflite", 1, "ERROR", new or text[-2000:].strip())

    def _run_by_views(
        self, inputs: Sequence[memoryview], outputs: Sequence[memoryview]
    ) -> list[SlotEntry]:
        """Runs a model whose tensors may move: every view is taken anew."""
        for spec, get, details, bytes_in in zip(
            self.info.inputs, self._in, self._inputs, inputs, strict=True
        ):
            array = np.frombuffer(bytes_in, dtype=spec.dtype).reshape(spec.shape)
            if array.ndim == 0:
                # The engine's view of a scalar is a copy.
                self._interpreter.set_tensor(details["index"], array)
            elif array.size:
                # The view must be gone before invoke.
                np.copyto(get(), array)

        try:
            self._invoke()
        except (ValueError, RuntimeError) as error:
            raise self._failed_run(error) from None

        return [
            self._copy_output(spec, get, details, bytes_out)
            for spec, get, details, bytes_out in zip(
                self.info.outputs, self._out, self._outputs, outputs, strict=True
            )
        ]

    def _copy_output(
        self, spec: TensorSpec, get: Any, details: Any, memory: memoryview
    ) -> SlotEntry:
        try:
            value = get()
        except ValueError:
            # The engine has no memory for a tensor without elements.
            return SlotEntry(spec.dtype, self._shape_now(details), 0)

        size = value.nbytes
        if size > len(memory):
            raise OutputTooLarge(
                f"output {spec.name!r} has {size} bytes, its slot {len(memory)}",
                bytes_needed=size,
            )

        if size:
            # ravel is a view here: the engine's tensors are contiguous.
            memory[:size] = memoryview(value.ravel().view(np.uint8))

        return SlotEntry(spec.dtype, value.shape, size)

    def _shape_now(self, details: Any) -> Shape:
        for now in self._interpreter.get_output_details():
            if now["index"] == details["index"]:
                return tuple(int(d) for d in now["shape"])

        raise DriverError("tflite", 1, "ERROR", f"no output tensor {details['index']}")

    def close(self) -> None:
        # Each of these keeps the interpreter alive.
        self._memory = None
        self._interpreter = self._invoke = None
        self._in = []
        self._out = []


def _precision(interpreter: Any) -> str:
    """What the model computes in: int8 for a quantised one, none without any arithmetic.

    A model of half floats is computed in fp32 here: the engine converts its weights.
    """
    tensors = interpreter.get_tensor_details()
    if any(d["dtype"] in (np.int8, np.uint8) and d["quantization"][0] for d in tensors):
        return "int8"

    floats = (np.float32, np.float16, np.float64, np.complex64)
    return "fp32" if any(d["dtype"] in floats for d in tensors) else "none"


def dynamic_capacity(seen_bytes: int) -> int:
    """Room kept for an output whose size is known only after a run."""
    return max(DYNAMIC_MINIMUM_BYTES, DYNAMIC_HEADROOM * seen_bytes)
