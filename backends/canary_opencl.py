"""The canary's four kernels through OpenCL: does this device still compute?

The program is built from source once; its binary is kept in our cache store, behind our own
checksum: a truncated binary aborts some drivers.

    python -m switchgear.backends.canary_opencl --cache DIR [--device N] [--json]
"""

from __future__ import annotations

import hashlib
import importlib
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final

import numpy as np

from switchgear.backends.cache_store import CacheStore, Lookup
from switchgear.backends.canary import KernelResult
from switchgear.backends.canary_command import run_command
from switchgear.backends.canary_numbers import (
    ROWS,
    WIDTH,
    finite,
    holds,
    numbers,
    relative_error,
)
from switchgear.ipc.errors import DriverError, NoBackend, NoSpace

SOURCE: Final = """
kernel void dot_rows(global const float *q, global const float *k, global float *scores)
{
    size_t j = get_global_id(0), i = get_global_id(1);
    float sum = 0.0f;
    for (int c = 0; c < WIDTH; c++)
        sum = fma(q[i * WIDTH + c], k[j * WIDTH + c], sum);

    scores[i * ROWS + j] = sum * rsqrt((float)WIDTH);
}

kernel void exp_all(global const float *scores, global float *powers)
{
    size_t i = get_global_id(0);
    powers[i] = exp(scores[i]);
}

kernel void reduce_sum(global const float *powers, global float *sums)
{
    local float part[64];
    size_t row = get_group_id(0);
    uint lane = get_local_id(0);
    float sum = 0.0f;
    for (uint j = lane; j < ROWS; j += 64)
        sum += powers[row * ROWS + j];

    part[lane] = sum;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint width = 32; width > 0; width >>= 1) {
        if (lane < width)
            part[lane] += part[lane + width];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    if (lane == 0)
        sums[row] = part[0];
}

kernel void attention(global const float *q, global const float *k, global const float *v,
                      global float *o)
{
    size_t i = get_global_id(0);
    float sums[WIDTH] = {0.0f};
    float greatest = -1e30f, total = 0.0f;
    for (int j = 0; j < ROWS; j++) {
        float score = 0.0f;
        for (int c = 0; c < WIDTH; c++)
            score = fma(q[i * WIDTH + c], k[j * WIDTH + c], score);

        score *= rsqrt((float)WIDTH);
        float next = fmax(greatest, score);
        float keep = exp(greatest - next), weight = exp(score - next);
        greatest = next;
        total = fma(total, keep, weight);
        for (int c = 0; c < WIDTH; c++)
            sums[c] = fma(sums[c], keep, weight * v[j * WIDTH + c]);
    }
    for (int c = 0; c < WIDTH; c++)
        o[i * WIDTH + c] = sums[c] / total;
}
"""
_OPTIONS: Final = (f"-DROWS={ROWS}", f"-DWIDTH={WIDTH}")
# Per result: the kernel, the buffers it takes (the result last), global and local size.
_KERNELS: Final[dict[str, tuple[str, tuple[str, ...], Any, Any]]] = {
    "dot": ("dot_rows", ("q", "k", "dot"), (ROWS, ROWS), None),
    "exp": ("exp_all", ("dot", "exp"), (ROWS * ROWS,), None),
    "reduce_sum": ("reduce_sum", ("exp", "reduce_sum"), (ROWS * 64,), (64,)),
    "attention": ("attention", ("q", "k", "v", "attention"), (ROWS,), None),
}
_WARM_RUNS: Final = 5


@dataclass(frozen=True, slots=True)
class OpenclCanaryResult:
    """As the Vulkan canary's; `build_us` is from source or binary to a built program."""

    ok: bool
    device: dict[str, str]
    kernels: tuple[KernelResult, ...]
    build_us: int
    cache_state: str
    cache_reason: str
    cache_written_bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_canary(cache_root: Path | None, index: int = 0) -> OpenclCanaryResult:
    """Builds and checks the kernels on the device `index` of all platforms; blocks.

    :raises NoBackend: no package, no driver, no such device.
    :raises DriverError: the driver's own code.
    """
    try:
        cl: Any = importlib.import_module("pyopencl")
    except ImportError as error:
        raise NoBackend(f"the Python package pyopencl does not import: {error}") from None

    try:
        return _checked(cl, _device(cl, index), cache_root)
    except cl.Error as error:
        raise _driver_error(cl, error) from None


def _checked(cl: Any, device: Any, cache_root: Path | None) -> OpenclCanaryResult:
    about = {
        "name": device.name.strip(),
        "platform": device.platform.name.strip(),
        "platform_version": device.platform.version.strip(),
        "driver_version": device.driver_version.strip(),
        "version": device.version.strip(),
    }
    context = cl.Context([device])
    queue = cl.CommandQueue(context)
    begin_ns = monotonic_ns()
    program, found, written = _program(cl, context, device, about, cache_root)
    build_us = (monotonic_ns() - begin_ns) // 1000
    known = numbers()
    flags = cl.mem_flags.READ_WRITE
    buffers = {}
    for name, values in {"q": known.q, "k": known.k, "v": known.v, **known.answers}.items():
        buffers[name] = cl.Buffer(context, flags, values.nbytes)
        cl.enqueue_copy(queue, buffers[name], np.ascontiguousarray(values)).wait()

    kernels = []
    for name, (function, taken, size, local) in _KERNELS.items():
        answer = known.answers[name]
        cl.enqueue_copy(queue, buffers[name], np.full_like(answer, np.nan)).wait()
        kernel = cl.Kernel(program, function)
        kernel.set_args(*(buffers[each] for each in taken))
        times_ns = []
        for _ in range(1 + _WARM_RUNS):
            begin_ns = monotonic_ns()
            cl.enqueue_nd_range_kernel(queue, kernel, size, local).wait()
            times_ns.append(monotonic_ns() - begin_ns)

        result = np.empty_like(answer)
        cl.enqueue_copy(queue, result, buffers[name]).wait()
        error = relative_error(result, answer)
        warm_us = int(statistics.median(times_ns[1:])) // 1000
        kernels.append(KernelResult(name, finite(error), times_ns[0] // 1000, warm_us))

    return OpenclCanaryResult(
        ok=all(holds(each.error) for each in kernels),
        device=about,
        kernels=tuple(kernels),
        build_us=build_us,
        cache_state=found.state,
        cache_reason=found.reason,
        cache_written_bytes=written,
    )


def _program(
    cl: Any, context: Any, device: Any, about: dict[str, str], cache_root: Path | None
) -> tuple[Any, Lookup, int]:
    """The built program, what the cache had, and the bytes that were kept in it now."""
    source = hashlib.sha256(" ".join((SOURCE, *_OPTIONS)).encode()).hexdigest()
    key = {"what": "opencl canary", "source": source, **about}
    store = None if cache_root is None else CacheStore(cache_root)
    found = Lookup("off") if store is None else store.get(key)
    if store is not None and found.data is not None:
        try:
            return cl.Program(context, [device], [found.data]).build(cache_dir=False), found, 0
        except cl.Error as error:
            # A driver that changed without another version: from source again.
            store.drop(key)
            found = Lookup("corrupt", None, f"the driver refuses it: {error}")

    program = cl.Program(context, SOURCE).build(options=list(_OPTIONS), cache_dir=False)
    if store is None:
        return program, found, 0

    (binary,) = program.get_info(cl.program_info.BINARIES)
    try:
        store.put(key, binary)
    except (NoSpace, DriverError) as error:
        print(f"the program is not kept: {error}", file=sys.stderr)  # noqa: T201
        return program, found, 0

    return program, found, len(binary)


def _device(cl: Any, index: int) -> Any:
    devices = [device for platform in cl.get_platforms() for device in platform.get_devices()]
    if not 0 <= index < len(devices):
        raise NoBackend(f"there is no OpenCL device {index}; there are {len(devices)}")

    return devices[index]


def _driver_error(cl: Any, error: Any) -> DriverError:
    code = int(error.code)
    name = cl.status_code.to_string(code, f"OpenCL {code}")
    return DriverError("opencl", code, f"CL_{name}", str(error).splitlines()[0])


def _in_words(result: OpenclCanaryResult) -> str:
    state = "right" if result.ok else "WRONG"
    return f"{result.device['name']}: {state}; built in {result.build_us} us"


def main() -> int:
    return run_command(
        "switchgear-canary-opencl",
        "Checks an OpenCL device by four small kernels.",
        "its place among all platforms'",
        run_canary,
        _in_words,
    )


if __name__ == "__main__":
    sys.exit(main())
