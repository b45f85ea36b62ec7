"""A search for faster kernels within a time: the one that takes the most first, step by step.

tinygrad says which ways of computing a kernel there are, the device which is the fastest. What
is found is kept only where the whole model is faster with it and says the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from switchgear.backends.opencl import tinygrad_jit
from switchgear.backends.opencl.kernel_time import KernelClock, KernelRun
from switchgear.ipc.errors import DriverError

if TYPE_CHECKING:
    from switchgear.backends.opencl.device import Device
    from switchgear.backends.opencl.tinygrad_jit import Captured, CapturedLaunch

# A step has to save this share to count; less is noise.
LEAST_GAIN: Final = 0.03
# Ways that are looked at further at a time.
_WIDTH: Final = 2
# Rounds without a gain after which a kernel is left: from nothing it takes a few steps to be
# better than tinygrad's own.
_IDLE_ROUNDS: Final = 2


@dataclass
class _Kernel:
    """One kernel of the model, the launches that use it, and the best ways so far."""

    launches: list[int]
    original: CapturedLaunch
    sizes_bytes: tuple[int, ...]
    original_ns: float
    best: CapturedLaunch
    best_ns: float
    frontier: list[tuple[Any, ...]]
    seen: set[tuple[Any, ...]] = field(default_factory=set)
    sources: set[str] = field(default_factory=set)
    idle_rounds: int = 0

    @property
    def done(self) -> bool:
        return not self.frontier or self.idle_rounds >= _IDLE_ROUNDS

    @property
    def total_ns(self) -> float:
        return self.best_ns * len(self.launches)


@dataclass(frozen=True, slots=True)
class Tuned:
    """The launches with faster kernels; how many were tried, and how many kernels changed."""

    captured: Captured
    tried: int
    changed: int


class KernelSearch:
    """Looks for faster kernels until `deadline` of `clock`, a time in seconds."""

    def __init__(
        self,
        device: Device,
        captured: Captured,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timer = KernelClock(device)
        self._captured = captured
        self._deadline = deadline
        self._clock = clock
        self.tried = 0

    def run(self) -> Tuned:
        """Blocks for the budget, less where nothing is left to try."""
        kernels = self._kernels()
        while not self._late():
            open_kernels = [kernel for kernel in kernels if not kernel.done]
            if not open_kernels:
                break

            self._round(max(open_kernels, key=lambda kernel: kernel.total_ns))

        launches = list(self._captured.launches)
        changed = 0
        for kernel in kernels:
            if kernel.best_ns <= (1 - LEAST_GAIN) * kernel.original_ns:
                changed += 1
                for number in kernel.launches:
                    old, new = launches[number], kernel.best
                    launches[number] = replace(
                        old,
                        name=new.name,
                        source=new.source,
                        global_size=new.global_size,
                        local_size=new.local_size,
                        steps=new.steps,
                    )

        return Tuned(replace(self._captured, launches=tuple(launches)), self.tried, changed)

    def _late(self) -> bool:
        return self._clock() >= self._deadline

    def _kernels(self) -> list[_Kernel]:
        found: dict[tuple[str, str], _Kernel] = {}
        for number, launch in enumerate(self._captured.launches):
            if launch.syntax is None:
                continue

            same = (launch.name, launch.source)
            if same in found:
                found[same].launches.append(number)
                continue

            sizes = tuple(self._captured.buffers[i].size_bytes for i in launch.arguments)
            took = self._timer.time_ns(_run_of(launch), sizes)
            # Beside tinygrad's own way also the one without any step.
            found[same] = _Kernel(
                [number], launch, sizes, took, launch, took, [launch.steps, ()]
            )

        return list(found.values())

    def _round(self, kernel: _Kernel) -> None:
        """One step further from the best ways of a kernel."""
        before = kernel.best_ns
        timed: list[tuple[float, tuple[Any, ...]]] = []
        for start in kernel.frontier:
            for steps in tinygrad_jit.next_steps(kernel.original, start):
                if self._late():
                    return

                took = self._tried(kernel, steps)
                if math.isfinite(took):
                    timed.append((took, steps))

        timed.sort(key=lambda each: each[0])
        kernel.frontier = [steps for _, steps in timed[:_WIDTH]]
        gained = kernel.best_ns <= (1 - LEAST_GAIN) * before
        kernel.idle_rounds = 0 if gained else kernel.idle_rounds + 1

    def _tried(self, kernel: _Kernel, steps: tuple[Any, ...]) -> float:
        if steps in kernel.seen:
            return math.inf

        kernel.seen.add(steps)
        launch = tinygrad_jit.with_steps(kernel.original, steps)
        if launch is None or launch.source in kernel.sources:
            return math.inf

        kernel.sources.add(launch.source)
        self.tried += 1
        try:
            took = self._timer.time_ns(_run_of(launch), kernel.sizes_bytes, kernel.best_ns)
        except DriverError:
            # More registers or work items than the device has.
            return math.inf

        if took < kernel.best_ns:
            kernel.best, kernel.best_ns = launch, took

        return took


def _run_of(launch: CapturedLaunch) -> KernelRun:
    return KernelRun(launch.source, launch.name, launch.global_size, launch.local_size)
