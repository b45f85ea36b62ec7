"""The OpenCL test: how fast bytes get to and from every device of every platform."""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from switchgear.backends.mapped import library_at, library_named
from switchgear.fingerprints.measure.memory import MIB, available_bytes, largest_size
from switchgear.fingerprints.measure.sampling import Contention, collect, drifted
from switchgear.fingerprints.measurement import (
    OPENCL_BANDWIDTH,
    Failure,
    Measured,
    Report,
    Subject,
    Value,
    failure_of,
    own_failure,
    value_of,
)
from switchgear.ipc.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Callable

    from switchgear.fingerprints.measure.channel import Channel
    from switchgear.fingerprints.measure.options import Options

FULL_BYTES: Final = 1024 * MIB
QUICK_BYTES: Final = 128 * MIB
# Read-back and pinned writes: their buffers are new, and page faults cost more than copies.
BESIDE_BYTES: Final = 256 * MIB
LEAST_BYTES: Final = 16 * MIB
# Random bytes are made once for this much and repeated: 1 GiB of them takes up to 8 s.
TILE_BYTES: Final = 64 * MIB
# The source, the device's buffer (in the same memory on most phones), and the pinned or
# read-back buffer beside them.
_COPIES: Final = 3
_TRANSFERS: Final = ("write_mb_s", "read_mb_s", "pinned_write_mb_s")
_EMPTY_KERNEL: Final = "__kernel void empty(void) {}"
# Values of cl_ext.h.
_DEVICE_UUID: Final = 0x106A  # CL_DEVICE_UUID_KHR
_DRIVER_UUID: Final = 0x106B  # CL_DRIVER_UUID_KHR
_PCI_BUS_INFO: Final = 0x410F  # CL_DEVICE_PCI_BUS_INFO_KHR


def run(options: Options, channel: Channel) -> None:
    """Reports on every device of every platform that `options.skip` does not name."""
    # Without it pyopencl answers a device that has no compiler with a KeyError of its own.
    os.environ.setdefault("PYOPENCL_CACHE_FAILURE_FATAL", "1")
    try:
        import pyopencl
    except (ImportError, OSError) as error:
        text = f"the Python package pyopencl cannot be loaded: {error}"
        failure = own_failure(OPENCL_BANDWIDTH, "NoBackend", text)
        channel.report(Report(OPENCL_BANDWIDTH, None, (failure,)))
        return

    test = _Test(pyopencl, options, channel)
    loader = library_named("libOpenCL")
    try:
        platforms = pyopencl.get_platforms()
    except pyopencl.Error as error:
        failure = failure_of(OPENCL_BANDWIDTH, test.error(error), loader)
        channel.report(Report(OPENCL_BANDWIDTH, None, (failure,)))
        return

    index = 0
    for platform in platforms:
        try:
            devices = platform.get_devices()
            trouble = None if devices else _no_device()
        except pyopencl.Error as error:
            devices, trouble = [], test.error(error)

        if trouble is not None:
            # One platform without a device must not hide the next.
            name = platform.name.strip()
            library = _library(platform)
            subject = Subject("opencl", name, index, platform=name, library=library)
            failure = failure_of(OPENCL_BANDWIDTH, trouble, library)
            if index not in options.skip:
                channel.report(Report(OPENCL_BANDWIDTH, subject, (failure,)))

            index += 1

        for device in devices:
            if index not in options.skip:
                test.measure(platform, device, index)

            index += 1


def _no_device() -> DriverError:
    # pyopencl turns CL_DEVICE_NOT_FOUND into an empty list.
    return DriverError("opencl", -1, "CL_DEVICE_NOT_FOUND", "the platform presents no device")


@dataclass(frozen=True, slots=True)
class _Test:
    cl: Any
    options: Options
    channel: Channel

    def error(self, error: Any) -> DriverError:
        """The driver's code and name out of pyopencl's exception."""
        code = int(error.code)
        name = self.cl.status_code.to_string(code, "unknown error")
        text = str(error).strip().partition("\n")[0].partition(" - ")[0]
        return DriverError("opencl", code, f"CL_{name}", text)

    def measure(self, platform: Any, device: Any, index: int) -> None:
        cl = self.cl
        started = time.monotonic()
        subject = _subject(platform, device, index)
        self.channel.begin(subject)
        values: list[Measured] = []
        notes: list[str] = []
        try:
            context = cl.Context([device])
            queue = cl.CommandQueue(context)
            values.append(self._submit_overhead(context, queue, subject))
            values += self._bandwidth(context, queue, device, subject, notes)
        except cl.Error as error:
            values.append(failure_of(OPENCL_BANDWIDTH, self.error(error), subject.library))
        except MemoryError as error:
            text = str(error) or "out of memory"
            values.append(
                Failure(OPENCL_BANDWIDTH, "errno", 12, "ENOMEM", text, subject.library)
            )

        duration_s = time.monotonic() - started
        self.channel.report(
            Report(OPENCL_BANDWIDTH, subject, tuple(values), tuple(notes), duration_s)
        )

    def _bandwidth(
        self, context: Any, queue: Any, device: Any, subject: Subject, notes: list[str]
    ) -> list[Measured]:
        cl = self.cl
        size = self._size(device, notes)
        self.channel.progress(0.05, f"making {size // MIB} MiB of random bytes")
        self.channel.expect(30)
        raw = np.random.SFC64(1).random_raw(min(size, TILE_BYTES) // 8)
        tile = raw.view(np.uint8)
        source = np.tile(tile, size // tile.size)
        # Never Buffer(COPY_HOST_PTR): that is another call, and it holds the interpreter.
        target = cl.Buffer(context, cl.mem_flags.READ_WRITE, size)
        write = self._timed(
            "write_mb_s",
            size,
            lambda: cl.enqueue_copy(queue, target, source, is_blocking=True),
            f"blocking clEnqueueWriteBuffer of {size // MIB} MiB, first one dropped",
            (0.1, 0.5),
        )
        read = self._read_back(queue, target, source, subject, notes)
        if isinstance(read, Failure):
            return [replace(read, name=name) for name in _TRANSFERS]

        return [write, read, self._pinned(context, queue, target, source, subject)]

    def _read_back(
        self, queue: Any, target: Any, source: Any, subject: Subject, notes: list[str]
    ) -> Measured:
        """Reads what was written, and compares it: a driver may drop bytes without an error."""
        cl = self.cl
        size = min(source.size, BESIDE_BYTES)
        back = np.zeros(size, np.uint8)
        read = self._timed(
            "read_mb_s",
            size,
            lambda: cl.enqueue_copy(queue, back, target, is_blocking=True),
            f"blocking clEnqueueReadBuffer of {size // MIB} MiB, first one dropped",
            (0.5, 0.7),
        )
        if not np.array_equal(back, source[:size]):
            text = "the device returns other bytes than were written to it"
            return own_failure("read_mb_s", "BackendFailed", text, subject.library)

        notes.append(f"{size // MIB} MiB read back and compared: equal")
        return read

    def _pinned(
        self, context: Any, queue: Any, target: Any, source: Any, subject: Subject
    ) -> Measured:
        cl = self.cl
        size = min(source.size, BESIDE_BYTES)
        try:
            flags = cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR
            buffer = cl.Buffer(context, flags, size)
            pinned, _ = cl.enqueue_map_buffer(
                queue, buffer, cl.map_flags.WRITE, 0, (size,), np.uint8, is_blocking=True
            )
            pinned[:] = source[:size]
            value = self._timed(
                "pinned_write_mb_s",
                size,
                lambda: cl.enqueue_copy(queue, target, pinned, is_blocking=True),
                f"blocking clEnqueueWriteBuffer of {size // MIB} MiB from a mapped "
                "CL_MEM_ALLOC_HOST_PTR buffer, first one dropped",
                (0.7, 1.0),
            )
            pinned.base.release(queue).wait()
        except cl.Error as error:
            # What a device has no pinned memory for; its other numbers stand.
            return failure_of("pinned_write_mb_s", self.error(error), subject.library)

        return value

    def _timed(
        self,
        name: str,
        size: int,
        transfer: Callable[[], Any],
        method: str,
        share: tuple[float, float],
    ) -> Value:
        def sample() -> float:
            begin = time.perf_counter()
            transfer()
            return size / (time.perf_counter() - begin) / 1e6

        # The first one pays for page faults: 0.36 GB/s instead of 8 to 20 was measured.
        self.channel.expect(30)
        sample()
        first, last = share
        contention = Contention()
        samples = collect(
            sample,
            budget_s=self.options.budget_s / 3,
            minimum=5,
            maximum=21,
            tick=lambda done: self.channel.progress(first + (last - first) * done, method),
        )
        disturbed = contention.disturbed or drifted(samples)
        return value_of(name, samples, "MB/s", method, disturbed=disturbed)

    def _size(self, device: Any, notes: list[str]) -> int:
        wanted = QUICK_BYTES if self.options.quick else FULL_BYTES
        available = available_bytes()
        size = largest_size(wanted, _COPIES, available, LEAST_BYTES)
        largest = int(device.max_mem_alloc_size)
        while size > LEAST_BYTES and size > largest:
            size //= 2

        bound = self.options.max_transfer_bytes
        while bound and size > LEAST_BYTES and size > bound:
            size //= 2

        if size == FULL_BYTES:
            notes.append(f"{size // MIB} MiB: the full size")
        elif self.options.quick:
            notes.append(f"{size // MIB} MiB: a quick run")
        elif bound and size <= bound < 2 * size:
            notes.append(f"{size // MIB} MiB: the configured bound is {bound // MIB} MiB")
        else:
            notes.append(
                f"{size // MIB} MiB: {_COPIES} times as much is to fit into half of the "
                f"{available // MIB} MiB available, and the device takes {largest // MIB} MiB"
            )

        return size

    def _submit_overhead(self, context: Any, queue: Any, subject: Subject) -> Measured:
        cl = self.cl
        name = "submit_overhead_us"
        self.channel.progress(0.02, "compiling an empty kernel")
        self.channel.expect(30)
        try:
            kernel = _built(cl, context)

            def sample() -> float:
                begin = time.perf_counter()
                cl.enqueue_nd_range_kernel(queue, kernel, (1,), (1,)).wait()
                return (time.perf_counter() - begin) * 1e6

            collect(sample, budget_s=0.1, minimum=5, maximum=200)
            contention = Contention()
            samples = collect(sample, budget_s=0.1 if self.options.quick else 0.4, maximum=5000)
        except cl.Error as error:
            # A device without a compiler still moves bytes.
            return failure_of(name, self.error(error), subject.library)

        return value_of(
            name,
            samples,
            "us",
            "an empty kernel of one work item, enqueued and waited for",
            disturbed=contention.disturbed or drifted(samples),
        )


def _built(cl: Any, context: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        # pyopencl leaves the source of a failed build in the folder for temporary files.
        tempfile.tempdir = folder
        try:
            return cl.Program(context, _EMPTY_KERNEL).build(cache_dir=False).empty
        finally:
            tempfile.tempdir = None


def _subject(platform: Any, device: Any, index: int) -> Subject:
    known = Subject(
        api="opencl",
        name=device.name.strip(),
        index=index,
        vendor_id=int(device.vendor_id),
        driver_name=device.vendor.strip(),
        driver_version=device.driver_version.strip(),
        driver_info=device.version.strip(),
        device_type=_device_type(device),
        platform=platform.name.strip(),
        library=_library(platform),
    )
    extensions = device.extensions.split()
    if "cl_khr_device_uuid" in extensions:
        known = replace(
            known,
            device_uuid=_info(device, _DEVICE_UUID, 16).hex(),
            driver_uuid=_info(device, _DRIVER_UUID, 16).hex(),
        )

    if "cl_khr_pci_bus_info" in extensions:
        words = np.frombuffer(_info(device, _PCI_BUS_INFO, 16), np.uint32)
        if words.size == 4:
            domain, bus, slot, function = (int(word) for word in words)
            known = replace(
                known, pci_address=f"{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"
            )

    return known


def _device_type(device: Any) -> str:
    # CL_DEVICE_TYPE_CPU, _GPU, _ACCELERATOR of cl.h.
    kind = int(device.type)
    if kind & 4:
        return "integrated" if bool(device.host_unified_memory) else "discrete"

    return "accelerator" if kind & 8 else "cpu" if kind & 2 else "other"


def _dispatch(platform: Any, place: int) -> int:
    """Address of an entry of the platform's table of functions.

    An ICD's objects begin with a pointer to that table (cl_icd.h); the loader itself reads it.
    """
    table = ctypes.c_void_p.from_address(platform.int_ptr).value or 0
    step = ctypes.sizeof(ctypes.c_void_p)
    return ctypes.c_void_p.from_address(table + place * step).value or 0


def _library(platform: Any) -> str:
    """The driver's file: where its clGetPlatformInfo (entry 1) is."""
    return library_at(_dispatch(platform, 1))


def _info(device: Any, key: int, size: int) -> bytes:
    """Raw bytes of a device query that pyopencl has no name for, empty where it fails."""
    # clGetDeviceInfo is entry 3; the table is a device's too.
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_void_p,
    )
    query = prototype(_dispatch(device, 3))
    buffer = ctypes.create_string_buffer(size)
    if query(device.int_ptr, key, size, buffer, None) != 0:
        return b""

    return buffer.raw
