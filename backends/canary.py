"""Four small Vulkan kernels of our own with known answers: does this device still compute?

They are the canary after a crash and the probe of a tripped device: dot products, exp, sums
through shared memory, and an attention-like kernel, the first three feeding each other through
explicit memory barriers. Their pipelines come from a VkPipelineCache that is kept in our cache
store and made before anything else.

    python -m switchgear.backends.canary --cache DIR [--device N] [--json]
"""

from __future__ import annotations

import hashlib
import statistics
import sys
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final

import numpy as np

from switchgear.backends.cache_store import MAX_BLOB_BYTES, CacheStore
from switchgear.backends.canary_command import run_command
from switchgear.backends.canary_numbers import (
    ROWS,
    Array,
    finite,
    holds,
    numbers,
    relative_error,
)
from switchgear.backends.vulkan_compute.api import API_1_1, Instance, PhysicalDevice, Vulkan
from switchgear.backends.vulkan_compute.compute import Buffer, Device, Dispatch
from switchgear.backends.vulkan_compute.pipeline import (
    bound_pipeline,
    pipeline_cache,
    pipeline_cache_data,
)
from switchgear.ipc.errors import DriverError, NoBackend, NoSpace

# Per kernel: the buffers that it takes, the one it writes last, and its groups.
KERNELS: Final[dict[str, tuple[tuple[str, ...], tuple[int, int, int]]]] = {
    "dot": (("q", "k", "dot"), (ROWS // 8, ROWS // 8, 1)),
    "exp": (("dot", "exp"), (ROWS * ROWS // 64, 1, 1)),
    "reduce_sum": (("exp", "reduce_sum"), (ROWS, 1, 1)),
    "attention": (("q", "k", "v", "attention"), (ROWS // 32, 1, 1)),
}
_PUSH: Final = {"dot": ROWS, "exp": ROWS * ROWS, "reduce_sum": ROWS, "attention": ROWS}
_WARM_RUNS: Final = 5
# Some drivers compile at the first dispatch, and a busy machine takes its time over it; whoever
# starts the process has a limit of its own.
_FIRST_LIMIT_NS: Final = 120_000_000_000


@dataclass(frozen=True, slots=True)
class KernelResult:
    """`error` is relative to the largest element, None where a result is not finite.

    `first_us` is from the SPIR-V to the first result, the driver's compiler included (of a
    second check of one canary: of its first dispatch); `warm_us` the median of dispatches after
    it.
    """

    name: str
    error: float | None
    first_us: int
    warm_us: int


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """`chain_error` is the largest error when all kernels run in one submission.

    `cache_state` is what was found: `hit`, `miss`, `corrupt` (and the reason), or `off`.
    `cache_read_bytes` went to the driver, `cache_written_bytes` were kept. A driver that keeps
    nothing there gives 32 bytes, the header.
    """

    ok: bool
    device: dict[str, Any]
    kernels: tuple[KernelResult, ...]
    chain_error: float | None
    cache_state: str
    cache_reason: str
    cache_read_bytes: int
    cache_written_bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Canary:
    """The kernels on one device, compiled once, to be run again and again.

    Blocks, and may hang or end the process with its driver. `close` must not be called after a
    `DriverError`.
    """

    def __init__(self, cache_root: Path | None, index: int = 0) -> None:
        """Opens the device `index` of the loader's list.

        :raises NoBackend: no loader, no package, no such device.
        :raises DriverError: the driver's own code.
        """
        self._instance = Instance(Vulkan())
        physical = _device(self._instance, index)
        self._device = Device(self._instance.api, physical)
        self._store = None if cache_root is None else CacheStore(cache_root)
        self._key = cache_key(physical)
        self._found = None if self._store is None else self._store.get(self._key)
        self._initial = b"" if self._found is None else self._found.data or b""
        self._cache = self._made_cache()
        self._read_bytes = len(self._initial)
        self._numbers = numbers()
        self._buffers: dict[str, Buffer] = {}
        for name, values in {
            **{n: getattr(self._numbers, n) for n in ("q", "k", "v")},
            **self._numbers.answers,
        }.items():
            self._buffers[name] = self._device.host_buffer(values.nbytes)
            self._buffers[name].view[:] = values.tobytes()

        self._dispatches: dict[str, Dispatch] = {}
        # Recorded once: they live as long as the device.
        self._commands: dict[str, Any] = {}
        self._chain: Any = None

    def check(self) -> CanaryResult:
        """Runs every kernel by itself and all of them in one submission; blocks.

        :raises DriverError: the driver's own code.
        """
        kernels = tuple(self._kernel(name) for name in KERNELS)
        if self._chain is None:
            self._chain = self._device.dispatch_commands(list(self._dispatches.values()))

        for name in KERNELS:
            self._spoil(name)

        self._device.run(self._chain)
        errors = [self._error(name) for name in KERNELS]
        written = self._keep_cache()
        found = self._found
        return CanaryResult(
            ok=all(holds(error) for error in (*(each.error for each in kernels), max(errors))),
            device=self._device.physical.subject.to_json(),
            kernels=kernels,
            chain_error=finite(max(errors)),
            cache_state="off" if found is None else found.state,
            cache_reason="" if found is None else found.reason,
            cache_read_bytes=self._read_bytes,
            cache_written_bytes=written,
        )

    def close(self) -> None:
        self._device.close()
        self._instance.close()

    def _made_cache(self) -> Any:
        try:
            return pipeline_cache(self._device, self._initial)
        except DriverError:
            if not self._initial:
                raise

        # The driver refuses what it gave itself: without it, and not again.
        if self._store is not None:
            self._store.drop(self._key)

        self._initial = b""
        return pipeline_cache(self._device, b"")

    def _kernel(self, name: str) -> KernelResult:
        self._spoil(name)
        begin_ns = monotonic_ns()
        if name not in self._commands:
            self._dispatches[name] = self._made_dispatch(name)
            self._commands[name] = self._device.dispatch_commands([self._dispatches[name]])

        commands = self._commands[name]
        self._device.run(commands, _FIRST_LIMIT_NS)
        first_ns = monotonic_ns() - begin_ns
        error = self._error(name)
        times_ns = []
        for _ in range(_WARM_RUNS):
            begin_ns = monotonic_ns()
            self._device.run(commands)
            times_ns.append(monotonic_ns() - begin_ns)

        warm_us = int(statistics.median(times_ns)) // 1000
        return KernelResult(name, finite(error), first_ns // 1000, warm_us)

    def _made_dispatch(self, name: str) -> Dispatch:
        taken, groups = KERNELS[name]
        buffers = [self._buffers[each] for each in taken]
        parts = bound_pipeline(self._device, _spirv(name), buffers, self._cache)
        return Dispatch(*parts, _PUSH[name], groups)

    def _spoil(self, name: str) -> None:
        """Fills a result with NaN, so that one which is not written is seen."""
        answer = self._numbers.answers[name]
        self._buffers[name].view[:] = np.full_like(answer, np.nan).tobytes()

    def _error(self, name: str) -> float:
        answer = self._numbers.answers[name]
        result: Array = np.frombuffer(bytes(self._buffers[name].view), np.float32)
        return relative_error(result.reshape(answer.shape), answer)

    def _keep_cache(self) -> int:
        """Keeps what the driver has now in its cache where that is new; its length, else 0."""
        if self._store is None:
            return 0

        data = pipeline_cache_data(self._device, self._cache, MAX_BLOB_BYTES)
        if not data or data == self._initial:
            return 0

        try:
            self._store.put(self._key, data)
        except (NoSpace, DriverError) as error:
            # The check does not depend on it.
            print(f"the pipeline cache is not kept: {error}", file=sys.stderr)  # noqa: T201
            return 0

        self._initial = data
        return len(data)


def run_canary(cache_root: Path | None, index: int = 0) -> CanaryResult:
    """Opens, checks and closes the device `index`; blocks.

    :raises NoBackend: no loader, no package, no such device.
    :raises DriverError: the driver's own code; the process should end soon.
    """
    canary = Canary(cache_root, index)
    result = canary.check()
    canary.close()
    return result


def cache_key(physical: PhysicalDevice) -> dict[str, str]:
    """All that a pipeline cache of these kernels depends on.

    The specification's own key (vendor, device, pipelineCacheUUID) is not enough: lavapipe's
    is the same in every version. `driver_info` has its version.
    """
    subject = physical.subject
    shaders = hashlib.sha256(b"".join(_spirv(name) for name in KERNELS)).hexdigest()
    return {
        "what": "vulkan pipeline cache of the canary",
        "vendor_id": f"{subject.vendor_id:04x}",
        "device_id": f"{subject.device_id:04x}",
        "device_uuid": subject.device_uuid,
        "driver_name": subject.driver_name,
        "driver_version": subject.driver_version,
        "driver_info": subject.driver_info,
        "pipeline_cache_uuid": physical.pipeline_cache_uuid,
        "shaders": shaders,
    }


def _device(instance: Instance, index: int) -> PhysicalDevice:
    devices = instance.devices()
    if not 0 <= index < len(devices):
        raise NoBackend(f"there is no Vulkan device {index}; there are {len(devices)}")

    if devices[index].api_version < API_1_1:
        text = "the kernels need Vulkan 1.1"
        raise DriverError("vulkan", -9, "VK_ERROR_INCOMPATIBLE_DRIVER", text)

    return devices[index]


def _spirv(name: str) -> bytes:
    return (files("switchgear.backends") / "shaders" / f"{name}.spv").read_bytes()


def _in_words(result: CanaryResult) -> str:
    lines = [
        f"{each.name}: first {each.first_us} us, then {each.warm_us} us, error {each.error}"
        for each in result.kernels
    ]
    state = "right" if result.ok else "WRONG"
    lines.append(f"{result.device['name']}: {state}; cache: {result.cache_state}")
    return "\n".join(lines)


def main() -> int:
    return run_command(
        "switchgear-canary",
        "Checks a Vulkan device by four small kernels.",
        "its place in the loader's list",
        run_canary,
        _in_words,
    )


if __name__ == "__main__":
    sys.exit(main())
