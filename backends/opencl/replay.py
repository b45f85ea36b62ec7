"""Runs an artefact's launches through pyopencl, with as little Python for each as there can be.

Arguments are set once; a run enqueues what was prepared and waits. Where the device works in
the host's memory, kernels read the inputs and write the outputs in the shared memory itself.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any, Final

from switchgear.backends.opencl.artefact import (
    Artefact,
    BufferKind,
    Launch,
    without_constants,
)
from switchgear.backends.opencl.device import Device, driver_errors
from switchgear.ipc.dtypes import DTYPES

# A driver takes any address, a kernel's vector loads do not.
HOST_ALIGNMENT_BYTES: Final = 64
_NUMBERS: Final = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot's tensors: `direct` are the buffers that lie in it, None where one is copied.

    `copies` pairs a buffer's place in the slot with the tensor's memory.
    """

    number: int
    direct: tuple[Any, ...]
    copies: tuple[tuple[int, memoryview], ...]


class Replay:
    """The launches of one artefact on a device; it keeps the artefact's constants alive."""

    def __init__(self, device: Device, artefact: Artefact) -> None:
        """Builds the program and allocates all memory, blocking.

        :raises DriverError: the driver refuses one of them.
        """
        self._device = device
        self._artefact = artefact
        self._cl = device.cl
        with driver_errors():
            self._program, self.from_binary = self._build()
            self._memory = self._allocate()
            self._kernels = [
                device.cl.Kernel(self._program, artefact.kernels[launch.kernel])
                for launch in artefact.launches
            ]
            for kernel, launch in zip(self._kernels, artefact.launches, strict=True):
                for place, index in enumerate(launch.arguments):
                    kernel.set_arg(place, self._memory[index])

        self._launches = [
            (kernel, *_dimensions(launch))
            for kernel, launch in zip(self._kernels, artefact.launches, strict=True)
        ]
        self._direct = self._direct_buffers()
        # Which slots the arguments are set to; 0 is the buffers of our own.
        self._bound = dict.fromkeys(self._direct, 0)

    def _build(self) -> tuple[Any, bool]:
        """The program, and whether the artefact's binary did."""
        cl = self._cl
        context, device = self._device.context, self._device.device
        with warnings.catch_warnings():
            # What the compiler says of a kernel that it takes.
            warnings.simplefilter("ignore")
            if self._artefact.binary:
                with contextlib.suppress(cl.Error):
                    binary = cl.Program(context, [device], [self._artefact.binary])
                    return binary.build(["-w"]), True

            return cl.Program(context, self._artefact.source).build(["-w"]), False

    def program_binary(self) -> bytes:
        """The program as the driver has built it, with what it compiled at first launches."""
        with driver_errors():
            return bytes(self._program.get_info(self._cl.program_info.BINARIES)[0])

    def _allocate(self) -> list[Any]:
        cl, artefact = self._cl, self._artefact
        flags = cl.mem_flags
        # In place where the host's memory is the device's: pages of the file, shared between
        # processes.
        how = flags.USE_HOST_PTR if self._device.host_memory else flags.COPY_HOST_PTR
        scratch = constants = None
        if artefact.scratch_bytes and self._device.has_regions(artefact.scratch_bytes):
            scratch = self._buffer(flags.READ_WRITE, artefact.scratch_bytes)

        if len(artefact.constants) and self._device.has_regions(len(artefact.constants)):
            constants = self._buffer(flags.READ_ONLY | how, 0, artefact.constants)

        memory = []
        for buffer in artefact.buffers:
            place = (buffer.offset, buffer.size_bytes)
            if buffer.kind is BufferKind.SCRATCH and scratch is not None:
                memory.append(scratch.get_sub_region(*place))
            elif buffer.kind is BufferKind.CONSTANT and constants is not None:
                memory.append(constants.get_sub_region(*place, flags.READ_ONLY))
            elif buffer.kind is BufferKind.CONSTANT:
                data = artefact.constants[buffer.offset : buffer.offset + buffer.size_bytes]
                memory.append(self._buffer(flags.READ_ONLY | how, 0, data))
            else:
                memory.append(self._buffer(flags.READ_WRITE, buffer.size_bytes))

        return memory

    def _buffer(self, flags: int, size_bytes: int, data: memoryview | None = None) -> Any:
        return self._cl.Buffer(self._device.context, flags, size_bytes, hostbuf=data)

    def _direct_buffers(self) -> dict[int, list[tuple[Any, int]]]:
        """Buffers that may lie in shared memory, with the arguments that name them.

        Not integers that are read: a client may change them after a kernel has checked them,
        and they may be places.
        """
        artefact = self._artefact
        if not self._device.host_memory:
            return {}

        used: dict[int, list[tuple[Any, int]]] = {}
        for kernel, launch in zip(self._kernels, artefact.launches, strict=True):
            for place, index in enumerate(launch.arguments):
                used.setdefault(index, []).append((kernel, place))

        tensors = [*zip(artefact.inputs, artefact.info.inputs, strict=True)]
        tensors += zip(artefact.outputs, artefact.info.outputs, strict=True)
        indices = [index for index, _ in tensors]
        return {
            index: used.get(index, [])
            for index, spec in tensors
            if DTYPES[spec.dtype].name.startswith("float")
            and indices.count(index) == 1
            and artefact.buffers[index].kind in (BufferKind.INPUT, BufferKind.OUTPUT)
        }

    def attach(self, tensors: Sequence[memoryview], buffers: Sequence[int]) -> Slot:
        """Prepares the memory of a slot for `buffers`, the artefact's inputs or outputs.

        :raises ValueError: a tensor has not its buffer's size.
        :raises DriverError: the driver refuses the memory.
        """
        cl = self._cl
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR
        direct: list[Any] = []
        copies = []
        for place, (index, memory) in enumerate(zip(buffers, tensors, strict=True)):
            size_bytes = self._artefact.buffers[index].size_bytes
            if len(memory) != size_bytes:
                raise ValueError(f"a tensor of {len(memory)} bytes, not {size_bytes}")

            if index in self._direct and _is_aligned(memory):
                with driver_errors():
                    direct.append(cl.Buffer(self._device.context, flags, hostbuf=memory))
            else:
                direct.append(None)
                copies.append((place, memory))

        return Slot(next(_NUMBERS), tuple(direct), tuple(copies))

    def run(self, source: Slot, target: Slot) -> None:
        """Runs once, blocking, the inputs from one slot and the outputs into another.

        :raises DriverError: the driver refused something; nothing runs any more.
        """
        cl = self._cl
        queue = self._device.queue
        memory = self._memory
        artefact = self._artefact
        copy = cl.enqueue_copy
        enqueue = cl.enqueue_nd_range_kernel
        try:
            if self._direct:
                self._bind(source, artefact.inputs)
                self._bind(target, artefact.outputs)

            # Each copy's event waits when it is dropped: they are kept until the end.
            events = [
                copy(queue, memory[artefact.inputs[place]], data, is_blocking=False)
                for place, data in source.copies
            ]
            for kernel, global_size, local_size in self._launches:
                enqueue(queue, kernel, global_size, local_size)

            for place, data in target.copies:
                index = artefact.outputs[place]
                events.append(copy(queue, data, memory[index], is_blocking=False))

            queue.finish()
        except cl.Error:
            # What was enqueued still uses the slots.
            with contextlib.suppress(cl.Error):
                queue.finish()

            with driver_errors():
                raise

    def _bind(self, slot: Slot, buffers: Sequence[int]) -> None:
        """Sets the arguments that name a slot's memory, where they are set to another."""
        for index, buffer in zip(buffers, slot.direct, strict=True):
            if index not in self._direct:
                continue

            number = 0 if buffer is None else slot.number
            if self._bound[index] != number:
                self._set(index, self._memory[index] if buffer is None else buffer)
                self._bound[index] = number

    def _set(self, index: int, memory: Any) -> None:
        for kernel, place in self._direct[index]:
            kernel.set_arg(place, memory)

    def launch_times_ns(self, rounds: int = 1) -> list[int]:
        """How long each launch takes on the device by its own events, the least of the rounds.

        It runs on whatever the buffers hold, not in a slot.

        :raises DriverError: as `run`.
        """
        runs = [spans for _, spans in self.profiled_runs(rounds)]
        return [min(end - begin for begin, end in spans) for spans in zip(*runs, strict=True)]

    def profiled_runs(self, rounds: int) -> list[tuple[int, list[tuple[int, int]]]]:
        """Runs as `launch_times_ns`: the host's time for all launches, in nanoseconds, and when
        each of them began and ended on the device's clock.

        :raises DriverError: as `run`.
        """
        cl = self._cl
        found = []
        with driver_errors():
            # The slot of the last run may be gone.
            for index in self._direct:
                self._set(index, self._memory[index])
                self._bound[index] = 0

            queue = cl.CommandQueue(
                self._device.context,
                self._device.device,
                properties=cl.command_queue_properties.PROFILING_ENABLE,
            )
            for _ in range(rounds):
                begin_ns = monotonic_ns()
                events = [
                    cl.enqueue_nd_range_kernel(queue, kernel, global_size, local_size)
                    for kernel, global_size, local_size in self._launches
                ]
                queue.finish()
                took_ns = monotonic_ns() - begin_ns
                spans = [(event.profile.start, event.profile.end) for event in events]
                found.append((took_ns, spans))

        return found

    def write_constant(self, index: int, data: memoryview) -> None:
        """Puts other bytes into a constant buffer of this replay, blocking.

        :raises DriverError: the driver refuses.
        """
        with driver_errors():
            self._cl.enqueue_copy(self._device.queue, self._memory[index], data)

    def close(self) -> None:
        """Frees everything; the slots' buffers go with the slots."""
        self._launches = []
        self._kernels = []
        self._direct = {}
        self._memory = []
        self._program = None
        self._artefact = without_constants(self._artefact)


def _dimensions(launch: Launch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Both sizes without trailing dimensions of one."""
    _, y, z = launch.global_size
    count = 3 if z > 1 else 2 if y > 1 else 1
    return launch.global_size[:count], launch.local_size[:count]


def _is_aligned(memory: memoryview) -> bool:
    import numpy as np

    address = int(np.frombuffer(memory, np.uint8).ctypes.data)
    return address % HOST_ALIGNMENT_BYTES == 0
