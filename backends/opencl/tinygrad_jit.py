"""The one file that touches tinygrad's internals (0.14): a function of tensors becomes kernels.

A function is traced once, with nothing run: what comes out is tinygrad's list of calls. Those
that no input reaches are run here, once, and their results are constants; the others are the
launches of a replay. `import tinygrad` happens in the functions below only: a worker that
serves never imports it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from switchgear.ipc.errors import DriverError, UnsupportedModel

# What tinygrad reads once, when it is imported. No cache of its own on the disk, no pool of
# processes, none of its prints; OpenCL is its device.
_SETTINGS: Final = {
    "DEV": "CL",
    "CACHELEVEL": "0",
    "CCACHE": "0",
    "PARALLEL": "0",
    "DEBUG": "0",
    "BEAM": "0",
}

Shape = tuple[int, ...]
# A tinygrad Tensor; its module has no types that this project checks against.
Tensor = Any


@dataclass(frozen=True, slots=True)
class CapturedBuffer:
    """A buffer; `data` holds a constant's bytes."""

    size_bytes: int
    data: memoryview | None


@dataclass(frozen=True, slots=True)
class CapturedLaunch:
    """One kernel run. Sizes are work items in all and per group; `arguments` are buffers.

    `writes` are those of the arguments that the kernel writes. `syntax` is tinygrad's own form
    of the kernel, for a search of faster ones, and `steps` how it was optimised; None and empty
    for a kernel that was given as source.
    """

    name: str
    source: str
    global_size: tuple[int, int, int]
    local_size: tuple[int, int, int]
    arguments: tuple[int, ...]
    writes: tuple[int, ...]
    syntax: Any
    steps: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Captured:
    """The launches of a function; `inputs` and `outputs` are buffers in its order.

    `named` are the buffers of constants that were asked for.
    """

    buffers: tuple[CapturedBuffer, ...]
    launches: tuple[CapturedLaunch, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    named: Mapping[int, int]


def installed_version() -> str:
    """The version of tinygrad by its metadata, empty where it is not installed."""
    try:
        return version("tinygrad")
    except PackageNotFoundError:
        return ""


def load_tinygrad() -> Any:
    """Imports tinygrad with our settings; its module.

    :raises DriverError: it is not installed, or does not import.
    """
    os.environ.update(_SETTINGS)
    try:
        import tinygrad
    except ImportError as error:
        text = f"the OpenCL backend compiles with tinygrad, and {error}"
        raise DriverError("errno", 2, "ENOENT", text) from None

    return tinygrad


def open_device(name: str, driver: str, *, group_memory: bool) -> None:
    """Makes tinygrad compile for this device; before anything else here.

    `group_memory` lets the work items of a group sum through memory that they share, which pays
    where it is a memory of its own. It is set once in a process.

    :raises DriverError: tinygrad finds no device, or another: it takes the first platform's.
    """
    load_tinygrad()
    from tinygrad.device import Device

    try:
        device = Device["CL"]
    except Exception as error:  # whatever its loader raises for a missing driver
        raise DriverError("opencl", -1, "CL_DEVICE_NOT_FOUND", str(error)[:2000]) from None

    found = (str(device.device_name).strip(), str(device.driver_version).strip())
    if found != (name, driver):
        text = f"tinygrad compiles for {found[0]} {found[1]}, not for {name} {driver}"
        raise DriverError("opencl", -1, "CL_DEVICE_NOT_FOUND", text)

    if not group_memory:
        device.renderer.has_shared = False
        device.renderer.shared_max = 0


class _Calls:
    """What tinygrad hands its calls to instead of running them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def add_linear(self, linear: Any, variables: dict[str, int]) -> None:
        if variables:
            raise UnsupportedModel("a shape that is known at run time only")

        self.calls.extend(linear.src)


def capture(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[tuple[Shape, str]],
    named: Mapping[int, Tensor] | None = None,
) -> Captured:
    """Compiles `function(*tensors)` for inputs of these shapes and element types.

    Blocks for as long as tinygrad takes, on the device of `open_device`. What the function
    builds from constants alone is computed once, here. `named` are constants that it makes
    while it is traced and whose buffers are wanted.

    :raises DriverError: there is no device, or a kernel does not compile.
    :raises UnsupportedModel: a call that is no kernel, or an output that is no tensor of its
        own.
    """
    from tinygrad import Tensor as TinyTensor
    from tinygrad import dtypes
    from tinygrad.engine.realize import capturing, compile_linear, run_linear
    from tinygrad.uop.ops import Ops, UOp

    tensors = [
        TinyTensor.empty(*shape, dtype=getattr(dtypes, dtype), device="CL").realize()
        for shape, dtype in inputs
    ]
    trace = _Calls()
    capturing.append(trace)
    try:
        outputs = [tensor.contiguous() for tensor in function(*tensors)]
        TinyTensor.realize(*outputs)
    finally:
        capturing.clear()

    syntaxes = [call.src[0] for call in trace.calls]
    try:
        compiled = compile_linear(UOp(Ops.LINEAR, src=tuple(trace.calls)), beam=0)
        once, kept = _split(compiled.src, syntaxes, {tensor.uop.base for tensor in tensors})
        run_linear(UOp(Ops.LINEAR, src=tuple(once)), {}, jit=True)
    except RuntimeError as error:
        raise _device_error(error) from None

    marks = {name: tensor.uop.base for name, tensor in (named or {}).items()}
    return _describe(kept, [t.uop for t in tensors], [t.uop for t in outputs], marks)


def _device_error(error: RuntimeError) -> DriverError:
    text = str(error)[:2000]
    words = text.split()
    # "OpenCL Error -5: CL_OUT_OF_RESOURCES"
    if text.startswith("OpenCL Error") and len(words) > 3:
        return DriverError("opencl", int(words[2].rstrip(":")), words[3], text)

    return DriverError("opencl", -11, "CL_BUILD_PROGRAM_FAILURE", text)


def _arguments(call: Any) -> list[Any]:
    from tinygrad.engine.realize import get_call_arg_uops

    return [uop.base for uop in get_call_arg_uops(call)]


def _split(
    calls: Sequence[Any], syntaxes: Sequence[Any], inputs: set[Any]
) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Calls that no input reaches, and the others with their syntax."""
    from tinygrad.engine.realize import get_call_outs_ins

    reached = set(inputs)
    once = []
    kept = []
    for call, syntax in zip(calls, syntaxes, strict=True):
        arguments = _arguments(call)
        outs, ins = get_call_outs_ins(call)
        read = {arguments[i] for i in ins} or set(arguments)
        if read.isdisjoint(reached):
            once.append(call)
        else:
            reached |= {arguments[i] for i in outs}
            kept.append((call, syntax))

    return once, kept


def _describe(
    kept: Sequence[tuple[Any, Any]],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    named: Mapping[int, Any],
) -> Captured:
    numbers: dict[Any, int] = {}

    def number(uop: Any) -> int:
        return numbers.setdefault(uop, len(numbers))

    for uop in inputs:
        number(uop.base)

    launches = [_launch(call, syntax, number) for call, syntax in kept]
    for uop in outputs:
        number(_whole_buffer(uop))

    written = {i for launch in launches for i in launch.writes}
    given = {numbers[uop.base] for uop in inputs}
    buffers = tuple(
        _buffer(uop, constant=i not in written and i not in given) for uop, i in numbers.items()
    )
    if written & given:
        raise UnsupportedModel("an input that is written")

    return Captured(
        buffers,
        tuple(launches),
        tuple(numbers[uop.base] for uop in inputs),
        tuple(numbers[uop.base] for uop in outputs),
        {name: numbers[uop] for name, uop in named.items() if uop in numbers},
    )


def _launch(call: Any, syntax: Any, number: Callable[[Any], int]) -> CapturedLaunch:
    from tinygrad.uop.ops import Ops

    program = call.src[0]
    if program.op is not Ops.PROGRAM:
        raise UnsupportedModel(f"a call that is no kernel: {program.op.name}")

    facts = program.arg
    if facts.vars:
        raise UnsupportedModel("a kernel with a shape that is known at run time only")

    arguments = _arguments(call)
    local = _three(facts.local_size or (1, 1, 1))
    groups = _three(facts.global_size)
    return CapturedLaunch(
        facts.function_name,
        str(program.src[2].arg),
        (groups[0] * local[0], groups[1] * local[1], groups[2] * local[2]),
        local,
        tuple(number(arguments[i]) for i in facts.globals),
        tuple(number(arguments[i]) for i in facts.outs),
        syntax if syntax.op is Ops.SINK else None,
        tuple(program.src[0].arg.applied_opts),
    )


def _three(sizes: Sequence[Any]) -> tuple[int, int, int]:
    whole = [int(size) for size in sizes] + [1, 1, 1]
    if any(size != number for size, number in zip(sizes, whole, strict=False)):
        raise UnsupportedModel(f"a kernel of {sizes} groups")

    return whole[0], whole[1], whole[2]


def _whole_buffer(uop: Any) -> Any:
    from tinygrad.uop.ops import Ops

    inner = uop
    while inner.op is Ops.RESHAPE:
        inner = inner.src[0]

    if inner.op is not Ops.BUFFER or inner.max_numel() != math.prod(uop.shape):
        raise UnsupportedModel("an output that is no tensor of its own")

    return inner


def _buffer(uop: Any, *, constant: bool) -> CapturedBuffer:
    size_bytes = int(uop.max_numel()) * int(uop.dtype.itemsize)
    if not constant:
        return CapturedBuffer(size_bytes, None)

    return CapturedBuffer(size_bytes, uop.buffer.as_memoryview().cast("B"))


def placeholders(inputs: Sequence[tuple[Shape, str]]) -> list[Tensor]:
    """Tensors of these shapes and element types that are never computed."""
    from tinygrad import Tensor as TinyTensor
    from tinygrad import dtypes

    return [
        TinyTensor.empty(*shape, dtype=getattr(dtypes, dtype), device="CL")
        for shape, dtype in inputs
    ]


def constant(values: NDArray[Any]) -> Tensor:
    """A constant of the function that is being traced."""
    from tinygrad import Tensor as TinyTensor

    return TinyTensor(np.ascontiguousarray(values), device="CL")


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel of our own: OpenCL C, its function's name, groups, and work items of a group.

    Its first parameter is what it writes, the others are what it reads.
    """

    name: str
    source: str
    groups: tuple[int, int, int]
    local_size: tuple[int, int, int]


def own_kernel(
    kernel: KernelSource, shape: Shape, dtype: str, arguments: Sequence[Tensor]
) -> Tensor:
    """The tensor that the kernel writes from these, as part of the function that is traced."""
    from tinygrad import Tensor as TinyTensor
    from tinygrad import dtypes
    from tinygrad.device import Device
    from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo, UOp

    count = 1 + len(arguments)

    def program(*parameters: Any) -> Any:
        facts = ProgramInfo(
            kernel.name,
            kernel.groups,
            kernel.local_size,
            (),
            tuple(range(count)),
            (0,),
            tuple(range(1, count)),
            Device["CL"].renderer.target,
        )
        parts = (
            UOp(Ops.SINK, src=(), arg=KernelInfo(name=kernel.name)),
            UOp(Ops.LINEAR, src=tuple(p.base for p in parameters)),
            UOp(Ops.SOURCE, arg=kernel.source),
            UOp(Ops.BINARY, arg=kernel.source.encode()),
        )
        return UOp(Ops.PROGRAM, src=parts, arg=facts)

    empty = TinyTensor.empty(*shape, dtype=getattr(dtypes, dtype), device="CL")
    return TinyTensor.custom_kernel(empty, *arguments, fxn=program)[0]


def next_steps(launch: CapturedLaunch, steps: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The ways to optimise a kernel that are one step longer than this one."""
    from tinygrad.codegen import (
        pm_flatten_range,
        pm_load_collapse,
        pm_mops,
        pm_simplify_ranges,
        pm_split_ranges,
        sym,
    )
    from tinygrad.codegen.opt import KernelOptError
    from tinygrad.codegen.opt.postrange import Scheduler
    from tinygrad.codegen.opt.search import get_kernel_actions
    from tinygrad.device import Device
    from tinygrad.uop.ops import graph_rewrite

    # What tinygrad does before it optimises: the steps count its axes.
    form = graph_rewrite(launch.syntax, pm_mops, bottom_up=True)
    form = graph_rewrite(form, pm_load_collapse)
    form = graph_rewrite(form, pm_split_ranges + pm_flatten_range, ctx={})
    form = graph_rewrite(form, sym + pm_flatten_range)
    form = graph_rewrite(form, pm_flatten_range + pm_simplify_ranges, ctx={})
    scheduler = Scheduler(form, Device["CL"].renderer)
    scheduler.convert_loop_to_global()
    try:
        for step in steps:
            scheduler.apply_opt(step)
    except KernelOptError:
        return []

    found = get_kernel_actions(scheduler, include_0=False)
    return [tuple(each.applied_opts) for each in found.values()]


def with_steps(launch: CapturedLaunch, steps: tuple[Any, ...]) -> CapturedLaunch | None:
    """The same launch, optimised otherwise; None where tinygrad cannot."""
    from dataclasses import replace

    from tinygrad.codegen import to_program
    from tinygrad.device import Device

    syntax = launch.syntax
    wanted = syntax.replace(arg=replace(syntax.arg, opts_to_apply=steps))
    try:
        program = to_program(wanted, Device["CL"].renderer)
    except Exception:  # a way that does not work may end in any of its assertions
        return None

    facts = program.arg
    # The buffers keep their order: it is that of the syntax.
    if facts.vars or len(facts.globals) != len(launch.arguments):
        return None

    local = _three(facts.local_size or (1, 1, 1))
    groups = _three(facts.global_size)
    return replace(
        launch,
        name=facts.function_name,
        source=str(program.src[2].arg),
        global_size=(groups[0] * local[0], groups[1] * local[1], groups[2] * local[2]),
        local_size=local,
        steps=steps,
    )
