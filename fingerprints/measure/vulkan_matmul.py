"""The Vulkan test: a 1024 x 1024 x 1024 matrix product in fp32 on every physical device."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from switchgear.backends.mapped import library_named
from switchgear.backends.vulkan_compute.api import API_1_1, Instance, Vulkan
from switchgear.backends.vulkan_compute.compute import HOST_POINTER, Device
from switchgear.fingerprints.installed import drivers
from switchgear.fingerprints.measure.sampling import Contention, collect, drifted
from switchgear.fingerprints.measurement import (
    VULKAN_MATMUL,
    Measured,
    Report,
    Value,
    failure_of,
    own_failure,
    value_of,
)
from switchgear.ipc.errors import DriverError, NoBackend

if TYPE_CHECKING:
    from switchgear.backends.vulkan_compute.api import PhysicalDevice
    from switchgear.fingerprints.measure.channel import Channel
    from switchgear.fingerprints.measure.options import Options

SIZE: Final = 1024
# Largest error over the largest element of the reference. A sum of 1024 products in fp32, in
# whatever order, stays under 1e-5; a kernel that skips or mixes elements is far above.
TOLERANCE: Final = 1e-4
_TILE_INVOCATIONS: Final = 256
_IMPORT_BYTES: Final = 4 * 2**20


def run(options: Options, channel: Channel) -> None:
    """Reports on every physical device that `options.skip` does not name."""
    started = time.monotonic()
    loader = ""
    try:
        api = Vulkan()
        loader = api.loader_path
        instance = Instance(api)
        library = _only_driver()
        devices = [
            replace(each, subject=replace(each.subject, library=library))
            for each in instance.devices()
        ]
    except NoBackend as error:
        failure = own_failure(VULKAN_MATMUL, error.name, error.text)
        channel.report(Report(VULKAN_MATMUL, None, (failure,)))
        return
    except DriverError as error:
        channel.report(
            Report(
                VULKAN_MATMUL,
                None,
                (failure_of(VULKAN_MATMUL, error, loader),),
                duration_s=time.monotonic() - started,
            )
        )
        return

    if not devices:
        failure = own_failure(
            VULKAN_MATMUL, "NoBackend", "the drivers present no physical device", loader
        )
        channel.report(Report(VULKAN_MATMUL, None, (failure,)))

    sound = True
    for physical in devices:
        if physical.subject.index not in options.skip:
            sound = _measure(api, physical, options, channel) and sound

    # Tearing down a driver that has just failed can hang: the process's end does it then.
    if sound:
        instance.close()


def _only_driver() -> str:
    """The mapped file of the one installed driver that is open, empty where there are more."""
    names = {os.path.basename(each.library) for each in drivers(VULKAN_MATMUL, os.environ)}
    mapped = {library_named(name) for name in names if name} - {""}
    return mapped.pop() if len(mapped) == 1 else ""


def kernel_for(device_type: str, max_invocations: int) -> tuple[str, tuple[int, int, int]]:
    """The kernel's name and its number of groups: tiles for GPUs, blocks for Vulkan on a CPU.

    A device that takes fewer than the 256 invocations of a tile's group gets the blocks too;
    drivers have been seen to take a group beyond their limit without an error.

    On a software Vulkan the tiles took 8 to 11 s, the blocks 0.13 to 0.34 s.
    """
    if device_type == "cpu" or max_invocations < _TILE_INVOCATIONS:
        return "matmul_blocks", (SIZE // 64, SIZE // 64, 1)

    return "matmul_tiles", (SIZE // 16, SIZE // 16, 1)


def operands() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The same two matrices at every run, uniform in [-1, 1)."""
    generator = np.random.default_rng(1024)
    shape = (2, SIZE, SIZE)
    left, right = generator.random(shape, dtype=np.float32) * np.float32(2) - np.float32(1)
    return left, right


def relative_error(result: np.ndarray[Any, Any], reference: np.ndarray[Any, Any]) -> float:
    """Largest error over the largest element; infinite when the result is not finite."""
    if not np.isfinite(result).all():
        return float("inf")

    return float(np.abs(result - reference).max() / np.abs(reference).max())


def _measure(api: Vulkan, physical: PhysicalDevice, options: Options, channel: Channel) -> bool:
    """Reports on one device; whether its driver still works."""
    subject = physical.subject
    started = time.monotonic()
    channel.begin(subject)
    values: list[Measured] = []
    notes: list[str] = []
    sound = True
    try:
        if physical.api_version < API_1_1:
            raise DriverError(
                "vulkan", -9, "VK_ERROR_INCOMPATIBLE_DRIVER", "the kernels need Vulkan 1.1"
            )

        device = Device(api, physical)
        subject = replace(subject, library=device.library())
        channel.begin(subject)
        values += _matmul(device, options, channel, notes)
        values.append(_submit_overhead(device, options))
        values.append(_host_pointer_import(device, notes))
        device.close()
    except DriverError as error:
        sound = False
        values.append(failure_of(VULKAN_MATMUL, error, subject.library))

    duration_s = time.monotonic() - started
    channel.report(Report(VULKAN_MATMUL, subject, tuple(values), tuple(notes), duration_s))
    return sound


def _matmul(
    device: Device, options: Options, channel: Channel, notes: list[str]
) -> list[Measured]:
    kernel, groups = kernel_for(
        device.physical.subject.device_type, device.physical.max_invocations
    )
    spirv = (files("switchgear.fingerprints") / "shaders" / f"{kernel}.spv").read_bytes()
    left, right = operands()
    staging = device.host_buffer(left.nbytes)
    buffers = [device.device_buffer(left.nbytes) for _ in range(3)]
    for matrix, target in zip((left, right), buffers, strict=False):
        staging.view[:] = matrix.tobytes()
        device.run(device.copy_commands(staging, target))

    commands = device.kernel_commands(spirv, buffers, SIZE, groups)
    notes.append(f"kernel {kernel}, fp32, {SIZE} x {SIZE} x {SIZE}")
    channel.progress(0.1, "compiling the kernel")
    # The first dispatch compiles on drivers that put it off; the second meets cold caches.
    channel.expect(20)
    device.run(commands)
    device.run(commands)
    clock_ms: list[float] = []
    stamps = device.physical.timestamp_bits > 0

    def sample() -> float:
        begin = time.perf_counter()
        device.run(commands)
        clock_ms.append((time.perf_counter() - begin) * 1e3)
        return device.device_time_ms() if stamps else clock_ms[-1]

    contention = Contention()
    device_ms = collect(
        sample,
        budget_s=options.budget_s / 2,
        minimum=5,
        maximum=31 if options.quick else 101,
        tick=lambda done: channel.progress(0.1 + 0.7 * done, "matrix product"),
    )
    disturbed = contention.disturbed
    device.run(device.copy_commands(buffers[2], staging, to_host=True))
    result = np.frombuffer(bytes(staging.view), np.float32).reshape(SIZE, SIZE)
    error = relative_error(result, left @ right)
    if not error <= TOLERANCE:
        text = f"the product is wrong: relative error {error:.3g}, tolerance {TOLERANCE:g}"
        library = device.physical.subject.library or device.library()
        return [
            own_failure(name, "BackendFailed", text, library)
            for name in ("matmul_ms", "matmul_clock_ms")
        ]

    notes.append(f"checked against the reference: relative error {error:.2g}")
    if not stamps:
        notes.append("the queue has no timestamps: matmul_ms is the clock's")

    how = "timestamp queries around the dispatch" if stamps else "clock around submit and wait"
    return [
        value_of("matmul_ms", device_ms, "ms", how, disturbed=disturbed or drifted(device_ms)),
        value_of(
            "matmul_clock_ms",
            clock_ms,
            "ms",
            "clock around submit and wait",
            disturbed=disturbed or drifted(clock_ms),
        ),
    ]


def _submit_overhead(device: Device, options: Options) -> Value:
    commands = device.empty_commands()

    def sample() -> float:
        begin = time.perf_counter()
        device.run(commands)
        return (time.perf_counter() - begin) * 1e6

    collect(sample, budget_s=0.1, minimum=5, maximum=200)
    contention = Contention()
    samples = collect(sample, budget_s=0.1 if options.quick else 0.4, maximum=5000)
    return value_of(
        "submit_overhead_us",
        samples,
        "us",
        "submit and wait of an empty recorded command buffer",
        disturbed=contention.disturbed or drifted(samples),
    )


def _host_pointer_import(device: Device, notes: list[str]) -> Measured:
    name = "host_pointer_import_us"
    if not device.imports_host_pointers:
        error = device.api.error(-7, f"the driver does not offer {HOST_POINTER}")
        return failure_of(name, error, device.library())

    alignment = device.host_pointer_alignment()
    if alignment < 1 or _IMPORT_BYTES % alignment:
        error = device.api.error(-7, f"import alignment {alignment} does not divide 4 MiB")
        return failure_of(name, error, device.library())

    try:
        return _timed_import(device, name, alignment, notes)
    except DriverError as error:
        # The extension is there and does not work: the rest of the device still counts.
        return failure_of(name, error, device.library())


def _timed_import(device: Device, name: str, alignment: int, notes: list[str]) -> Measured:
    ffi = device.api.ffi
    fd = os.memfd_create("fingerprint")
    try:
        # A larger mapping, to start at a multiple of the alignment.
        os.ftruncate(fd, _IMPORT_BYTES + alignment)
        with mmap.mmap(fd, _IMPORT_BYTES + alignment) as mapping:
            whole = ffi.from_buffer(mapping, require_writable=True)
            base = int(ffi.cast("uintptr_t", whole))
            offset = -base % alignment
            pointer = ffi.cast("void*", base + offset)
            pattern = np.random.default_rng(4).bytes(_IMPORT_BYTES)
            mapping[offset : offset + _IMPORT_BYTES] = pattern

            def sample() -> float:
                begin = time.perf_counter()
                buffer = device.import_host(pointer, _IMPORT_BYTES)
                took_us = (time.perf_counter() - begin) * 1e6
                device.free(buffer)
                return took_us

            contention = Contention()
            sample()
            samples = collect(sample, budget_s=0.2, minimum=11, maximum=101)
            buffer = device.import_host(pointer, _IMPORT_BYTES)
            staging = device.host_buffer(_IMPORT_BYTES)
            device.run(device.copy_commands(buffer, staging, to_host=True))
            same = bytes(staging.view) == pattern
            device.free(buffer)
            ffi.release(whole)
    finally:
        os.close(fd)

    if not same:
        text = "the device reads other bytes than the process wrote"
        return own_failure(name, "BackendFailed", text, device.library())

    notes.append(f"{HOST_POINTER}: a memfd mapping is read in place, alignment {alignment}")
    return value_of(
        name,
        samples,
        "us",
        "buffer and memory over a 4 MiB memfd mapping",
        disturbed=contention.disturbed,
    )
