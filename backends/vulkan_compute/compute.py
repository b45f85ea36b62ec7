"""A Vulkan device with one compute queue: buffers, one kernel at a time, submit and wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from switchgear.backends.mapped import library_at
from switchgear.backends.vulkan_compute.pipeline import bound_pipeline
from switchgear.ipc.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from switchgear.backends.vulkan_compute.api import PhysicalDevice, Vulkan

HOST_POINTER: Final = "VK_EXT_external_memory_host"
WAIT_TIMEOUT_NS: Final = 8_000_000_000

# Values of the Vulkan specification (vulkan_core.h).
_DEVICE_LOCAL, _HOST_VISIBLE, _HOST_COHERENT = 0x1, 0x2, 0x4
_USAGE: Final = 0x1 | 0x2 | 0x20  # transfer source, transfer destination, storage
_STAGE_COMPUTE: Final = 0x20
_AT_TOP, _AT_COMPUTE, _AT_TRANSFER, _AT_BOTTOM = 0x1, 0x800, 0x1000, 0x2000
_AT_HOST: Final = 0x4000
_SHADER_READ, _SHADER_WRITE = 0x20, 0x40
_TRANSFER_READ, _TRANSFER_WRITE = 0x800, 0x1000
_HOST_READ, _HOST_WRITE = 0x2000, 0x4000
_HANDLE_HOST_ALLOCATION: Final = 0x80
_VK_TIMEOUT: Final = 2


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer with memory of its own; `view` is its mapping, None where it has none."""

    handle: Any
    memory: Any
    size: int
    view: Any


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A kernel with its buffers: the three parts of `bound_pipeline`, the push constant and the
    number of groups."""

    layout: Any
    pipeline: Any
    descriptors: Any
    push: int
    groups: tuple[int, int, int]


class Device:
    """A logical device. `close` waits for the queue; do not call it after a driver error.

    Every method raises `DriverError` with the driver's own code.
    """

    def __init__(self, api: Vulkan, physical: PhysicalDevice) -> None:
        if physical.queue_family is None:
            raise api.error(-8, "the device has no compute queue")

        self.api = api
        self.physical = physical
        self._kept: list[tuple[Callable[[Any], object], Any]] = []
        ffi = api.ffi
        priority = ffi.new("float*", 1.0)
        queue_info = api.struct(
            "VkDeviceQueueCreateInfo",
            "DEVICE_QUEUE_CREATE_INFO",
            queueFamilyIndex=physical.queue_family,
            queueCount=1,
            pQueuePriorities=priority,
        )
        names = [ffi.new("char[]", HOST_POINTER.encode())] if self.imports_host_pointers else []
        enabled = ffi.new("const char*[]", names) if names else ffi.NULL
        info = api.struct(
            "VkDeviceCreateInfo",
            "DEVICE_CREATE_INFO",
            queueCreateInfoCount=1,
            pQueueCreateInfos=queue_info,
            enabledExtensionCount=len(names),
            ppEnabledExtensionNames=enabled,
        )
        self.handle = self.created("VkDevice", "vkCreateDevice", info, physical.handle)
        queue = ffi.new("VkQueue*")
        api.lib.vkGetDeviceQueue(self.handle, physical.queue_family, 0, queue)
        self.queue = queue[0]
        pool = api.struct(
            "VkCommandPoolCreateInfo",
            "COMMAND_POOL_CREATE_INFO",
            queueFamilyIndex=physical.queue_family,
        )
        self._pool = self.created("VkCommandPool", "vkCreateCommandPool", pool)
        fence = api.struct("VkFenceCreateInfo", "FENCE_CREATE_INFO")
        self._fence = ffi.new("VkFence[1]", [self.created("VkFence", "vkCreateFence", fence)])
        self._queries = ffi.NULL
        if physical.timestamp_bits:
            queries = api.struct(
                "VkQueryPoolCreateInfo",
                "QUERY_POOL_CREATE_INFO",
                queryType=api.constants.VK_QUERY_TYPE_TIMESTAMP,
                queryCount=2,
            )
            self._queries = self.created("VkQueryPool", "vkCreateQueryPool", queries)

    @property
    def imports_host_pointers(self) -> bool:
        return HOST_POINTER in self.physical.extensions

    def library(self) -> str:
        """The driver's file: where `vkCmdDispatch` of this device is.

        Layers that stand before a driver seldom take that one.
        """
        found = self._procedure("vkCmdDispatch")
        return library_at(int(self.api.ffi.cast("uintptr_t", found)))

    def close(self) -> None:
        """Waits until the queue is idle and destroys the device with all that it made."""
        api = self.api
        api.check(api.lib.vkDeviceWaitIdle(self.handle), "vkDeviceWaitIdle")
        for destroy, handle in reversed(self._kept):
            destroy(handle)

        api.lib.vkDestroyDevice(self.handle, api.ffi.NULL)

    # Memory

    def device_buffer(self, size: int) -> Buffer:
        """Memory that the device reaches fastest, not mapped."""
        return self._buffer(size, (_DEVICE_LOCAL, 0))

    def host_buffer(self, size: int) -> Buffer:
        """Memory that both reach, mapped; no flush is needed."""
        buffer = self._buffer(size, (_HOST_VISIBLE | _HOST_COHERENT,))
        pointer = self.api.ffi.new("void**")
        self.api.check(
            self.api.lib.vkMapMemory(self.handle, buffer.memory, 0, size, 0, pointer),
            "vkMapMemory",
        )
        view = self.api.ffi.buffer(pointer[0], size)
        return Buffer(buffer.handle, buffer.memory, size, view)

    def import_host(self, pointer: Any, size: int) -> Buffer:
        """A buffer over memory of this process, which the caller keeps until `free`.

        `pointer` and `size` must be multiples of the device's import alignment: drivers have
        been seen to take a misaligned pointer without a word.
        """
        api, ffi = self.api, self.api.ffi
        properties = api.struct(
            "VkMemoryHostPointerPropertiesEXT", "MEMORY_HOST_POINTER_PROPERTIES_EXT"
        )
        query = ffi.cast(
            "PFN_vkGetMemoryHostPointerPropertiesEXT",
            self._procedure("vkGetMemoryHostPointerPropertiesEXT"),
        )
        api.check(
            query(self.handle, _HANDLE_HOST_ALLOCATION, pointer, properties),
            "vkGetMemoryHostPointerPropertiesEXT",
        )
        external = api.struct(
            "VkExternalMemoryBufferCreateInfo",
            "EXTERNAL_MEMORY_BUFFER_CREATE_INFO",
            handleTypes=_HANDLE_HOST_ALLOCATION,
        )
        handle, needs = self._bare_buffer(size, external)
        imported = api.struct(
            "VkImportMemoryHostPointerInfoEXT",
            "IMPORT_MEMORY_HOST_POINTER_INFO_EXT",
            handleType=_HANDLE_HOST_ALLOCATION,
            pHostPointer=pointer,
        )
        kinds = needs.memoryTypeBits & properties.memoryTypeBits
        memory = self._allocate(size, kinds, (0,), imported)
        api.check(
            api.lib.vkBindBufferMemory(self.handle, handle, memory, 0), "vkBindBufferMemory"
        )
        return Buffer(handle, memory, size, None)

    def host_pointer_alignment(self) -> int:
        """`minImportedHostPointerAlignment`, in bytes."""
        api = self.api
        external = api.struct(
            "VkPhysicalDeviceExternalMemoryHostPropertiesEXT",
            "PHYSICAL_DEVICE_EXTERNAL_MEMORY_HOST_PROPERTIES_EXT",
        )
        head = api.struct(
            "VkPhysicalDeviceProperties2", "PHYSICAL_DEVICE_PROPERTIES_2", pNext=external
        )
        api.lib.vkGetPhysicalDeviceProperties2(self.physical.handle, head)
        return int(external.minImportedHostPointerAlignment)

    def free(self, buffer: Buffer) -> None:
        """Destroys a buffer that no work in flight uses."""
        self.api.lib.vkDestroyBuffer(self.handle, buffer.handle, self.api.ffi.NULL)
        self.api.lib.vkFreeMemory(self.handle, buffer.memory, self.api.ffi.NULL)

    # Work

    def copy_commands(self, source: Buffer, target: Buffer, *, to_host: bool = False) -> Any:
        """A recorded copy; its writes are visible to later commands, or to the host."""
        api = self.api
        commands = self._begin()
        region = api.ffi.new("VkBufferCopy*", {"size": min(source.size, target.size)})
        self._barrier(
            commands,
            (_AT_HOST | _AT_COMPUTE, _HOST_WRITE | _SHADER_WRITE),
            (_AT_TRANSFER, _TRANSFER_READ | _TRANSFER_WRITE),
        )
        api.lib.vkCmdCopyBuffer(commands[0], source.handle, target.handle, 1, region)
        after = (_AT_HOST, _HOST_READ) if to_host else (_AT_COMPUTE, _SHADER_READ)
        self._barrier(commands, (_AT_TRANSFER, _TRANSFER_WRITE), after)
        return self._end(commands)

    def kernel_commands(
        self, spirv: bytes, buffers: Sequence[Buffer], push: int, groups: tuple[int, int, int]
    ) -> Any:
        """A recorded dispatch of `main`, between two timestamps where the queue has them.

        `buffers` are bound in order, `push` is the one 32-bit push constant.
        """
        api, lib = self.api, self.api.lib
        layout, pipeline, descriptors = bound_pipeline(self, spirv, buffers)
        commands = self._begin()
        if self._queries != api.ffi.NULL:
            lib.vkCmdResetQueryPool(commands[0], self._queries, 0, 2)

        self._bind(commands, layout, pipeline, descriptors, push)
        if self._queries != api.ffi.NULL:
            lib.vkCmdWriteTimestamp(commands[0], _AT_TOP, self._queries, 0)

        lib.vkCmdDispatch(commands[0], *groups)
        if self._queries != api.ffi.NULL:
            lib.vkCmdWriteTimestamp(commands[0], _AT_BOTTOM, self._queries, 1)

        self._barrier(
            commands,
            (_AT_COMPUTE, _SHADER_WRITE),
            (_AT_TRANSFER | _AT_COMPUTE, _TRANSFER_READ | _SHADER_READ | _SHADER_WRITE),
        )
        return self._end(commands)

    def dispatch_commands(self, dispatches: Sequence[Dispatch]) -> Any:
        """Recorded dispatches, with a memory barrier behind each.

        What one writes is visible to the next, and what the last writes to the host.
        """
        commands = self._begin()
        for each in dispatches:
            self._bind(commands, each.layout, each.pipeline, each.descriptors, each.push)
            self.api.lib.vkCmdDispatch(commands[0], *each.groups)
            self._barrier(
                commands,
                (_AT_COMPUTE, _SHADER_WRITE),
                (_AT_COMPUTE | _AT_HOST, _SHADER_READ | _SHADER_WRITE | _HOST_READ),
            )

        return self._end(commands)

    def _bind(
        self, commands: Any, layout: Any, pipeline: Any, descriptors: Any, push: int
    ) -> None:
        lib, ffi = self.api.lib, self.api.ffi
        lib.vkCmdBindPipeline(commands[0], 1, pipeline)
        lib.vkCmdBindDescriptorSets(commands[0], 1, layout, 0, 1, descriptors, 0, ffi.NULL)
        constant = ffi.new("uint32_t*", push)
        lib.vkCmdPushConstants(commands[0], layout, _STAGE_COMPUTE, 0, 4, constant)

    def empty_commands(self) -> Any:
        """A recorded command buffer without a command: what a submit costs by itself."""
        return self._end(self._begin())

    def run(self, commands: Any, limit_ns: int = WAIT_TIMEOUT_NS) -> None:
        """Submits and blocks until it is done; `VK_TIMEOUT` after `limit_ns`."""
        api, lib = self.api, self.api.lib
        api.check(lib.vkQueueSubmit(self.queue, 1, commands, self._fence[0]), "vkQueueSubmit")
        waited = lib.vkWaitForFences(self.handle, 1, self._fence, 1, limit_ns)
        if api.check(waited, "vkWaitForFences") == _VK_TIMEOUT:
            limit_s = limit_ns / 1e9
            raise DriverError(
                "vulkan",
                _VK_TIMEOUT,
                "VK_TIMEOUT",
                f"the fence was not signalled in {limit_s:g} s",
            )

        api.check(lib.vkResetFences(self.handle, 1, self._fence), "vkResetFences")

    def device_time_ms(self) -> float:
        """Time between the timestamps of the last dispatch; only where the queue has them."""
        api = self.api
        ticks = api.ffi.new("uint64_t[2]")
        wait_64_bit = 0x2 | 0x1
        api.check(
            api.lib.vkGetQueryPoolResults(
                self.handle, self._queries, 0, 2, 16, ticks, 8, wait_64_bit
            ),
            "vkGetQueryPoolResults",
        )
        mask = (1 << self.physical.timestamp_bits) - 1
        return float(((ticks[1] - ticks[0]) & mask) * self.physical.timestamp_period_ns / 1e6)

    # Parts

    def created(self, kind: str, call: str, info: Any, parent: Any = None) -> Any:
        """The object that `call` makes; `close` destroys it (the device itself apart)."""
        api = self.api
        made = api.ffi.new(f"{kind}*")
        result = getattr(api.lib, call)(
            self.handle if parent is None else parent, info, api.ffi.NULL, made
        )
        api.check(result, call)
        if parent is None:
            destroy = getattr(api.lib, call.replace("vkCreate", "vkDestroy"))
            self.keep(lambda handle: destroy(self.handle, handle, api.ffi.NULL), made[0])

        return made[0]

    def keep(self, destroy: Callable[[Any], object], thing: Any) -> None:
        """Has `close` call `destroy(thing)`, in the reverse order; `thing` lives until then."""
        self._kept.append((destroy, thing))

    def _procedure(self, name: str) -> Any:
        found = self.api.lib.vkGetDeviceProcAddr(self.handle, name.encode())
        if found == self.api.ffi.NULL:
            raise self.api.error(-7, f"{name} is missing")

        return found

    def _bare_buffer(self, size: int, chain: Any = None) -> tuple[Any, Any]:
        api = self.api
        info = api.struct(
            "VkBufferCreateInfo",
            "BUFFER_CREATE_INFO",
            pNext=api.ffi.NULL if chain is None else chain,
            size=size,
            usage=_USAGE,
        )
        made = api.ffi.new("VkBuffer*")
        api.check(
            api.lib.vkCreateBuffer(self.handle, info, api.ffi.NULL, made), "vkCreateBuffer"
        )
        needs = api.ffi.new("VkMemoryRequirements*")
        api.lib.vkGetBufferMemoryRequirements(self.handle, made[0], needs)
        return made[0], needs

    def _buffer(self, size: int, wanted: tuple[int, ...]) -> Buffer:
        handle, needs = self._bare_buffer(size)
        memory = self._allocate(needs.size, needs.memoryTypeBits, wanted)
        self.api.check(
            self.api.lib.vkBindBufferMemory(self.handle, handle, memory, 0),
            "vkBindBufferMemory",
        )
        buffer = Buffer(handle, memory, size, None)
        self.keep(self.free, buffer)
        return buffer

    def _allocate(
        self, size: int, kinds: int, wanted: tuple[int, ...], chain: Any = None
    ) -> Any:
        """Memory of the first kind that has the first of the `wanted` flags that any has."""
        api = self.api
        types = self.physical.memory
        index = next(
            (
                i
                for flags in wanted
                for i in range(types.memoryTypeCount)
                if kinds >> i & 1 and types.memoryTypes[i].propertyFlags & flags == flags
            ),
            None,
        )
        if index is None:
            raise api.error(-8, f"no memory type has the flags {wanted}")

        info = api.struct(
            "VkMemoryAllocateInfo",
            "MEMORY_ALLOCATE_INFO",
            pNext=api.ffi.NULL if chain is None else chain,
            allocationSize=size,
            memoryTypeIndex=index,
        )
        made = api.ffi.new("VkDeviceMemory*")
        api.check(
            api.lib.vkAllocateMemory(self.handle, info, api.ffi.NULL, made), "vkAllocateMemory"
        )
        return made[0]

    def _begin(self) -> Any:
        api = self.api
        info = api.struct(
            "VkCommandBufferAllocateInfo",
            "COMMAND_BUFFER_ALLOCATE_INFO",
            commandPool=self._pool,
            commandBufferCount=1,
        )
        made = api.ffi.new("VkCommandBuffer[1]")
        api.check(
            api.lib.vkAllocateCommandBuffers(self.handle, info, made),
            "vkAllocateCommandBuffers",
        )
        begin = api.struct("VkCommandBufferBeginInfo", "COMMAND_BUFFER_BEGIN_INFO")
        api.check(api.lib.vkBeginCommandBuffer(made[0], begin), "vkBeginCommandBuffer")
        return made

    def _barrier(self, commands: Any, before: tuple[int, int], after: tuple[int, int]) -> None:
        barrier = self.api.struct(
            "VkMemoryBarrier", "MEMORY_BARRIER", srcAccessMask=before[1], dstAccessMask=after[1]
        )
        null = self.api.ffi.NULL
        self.api.lib.vkCmdPipelineBarrier(
            commands[0], before[0], after[0], 0, 1, barrier, 0, null, 0, null
        )

    def _end(self, commands: Any) -> Any:
        self.api.check(self.api.lib.vkEndCommandBuffer(commands[0]), "vkEndCommandBuffer")
        submit = self.api.struct(
            "VkSubmitInfo", "SUBMIT_INFO", commandBufferCount=1, pCommandBuffers=commands
        )
        # The struct points to the array, so both live as long as the device.
        self.keep(lambda _: None, (submit, commands))
        return submit
