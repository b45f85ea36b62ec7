"""A compute pipeline with its buffers bound, from SPIR-V, and the cache that it comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from switchgear.backends.vulkan_compute.compute import Buffer, Device

# Values of the Vulkan specification (vulkan_core.h).
_STORAGE_BUFFER: Final = 7
_STAGE_COMPUTE: Final = 0x20
_WHOLE: Final = 2**64 - 1


def pipeline_cache(device: Device, data: bytes) -> Any:
    """A VkPipelineCache of the device, which `close` destroys; `data` may be empty.

    The driver trusts `data`: it has to be what `pipeline_cache_data` gave under the same
    driver, unchanged. Raises `DriverError`.
    """
    ffi = device.api.ffi
    initial = ffi.from_buffer(data) if data else ffi.NULL
    info = device.api.struct(
        "VkPipelineCacheCreateInfo",
        "PIPELINE_CACHE_CREATE_INFO",
        initialDataSize=len(data),
        pInitialData=initial,
    )
    return device.created("VkPipelineCache", "vkCreatePipelineCache", info)


def pipeline_cache_data(device: Device, cache: Any, limit_bytes: int) -> bytes:
    """What the cache holds now; empty where that is more than `limit_bytes`.

    Raises `DriverError`.
    """
    api, ffi = device.api, device.api.ffi
    size = ffi.new("size_t*")
    get = api.lib.vkGetPipelineCacheData
    api.check(get(device.handle, cache, size, ffi.NULL), "vkGetPipelineCacheData")
    if not 0 < size[0] <= limit_bytes:
        return b""

    data = ffi.new("char[]", size[0])
    api.check(get(device.handle, cache, size, data), "vkGetPipelineCacheData")
    return bytes(ffi.buffer(data, size[0]))


def bound_pipeline(
    device: Device, spirv: bytes, buffers: Sequence[Buffer], cache: Any = None
) -> tuple[Any, Any, Any]:
    """Layout, pipeline and descriptor set of the entry point `main`.

    `buffers` are its storage buffers from binding 0 on; it has one 32-bit push constant. All of
    it lives until the device is closed. `cache` is a `pipeline_cache`. Raises `DriverError`.
    """
    api, ffi, lib = device.api, device.api.ffi, device.api.lib
    code = ffi.from_buffer("uint32_t[]", spirv)
    module_info = api.struct(
        "VkShaderModuleCreateInfo",
        "SHADER_MODULE_CREATE_INFO",
        codeSize=len(spirv),
        pCode=code,
    )
    module = device.created("VkShaderModule", "vkCreateShaderModule", module_info)
    bindings = ffi.new(
        "VkDescriptorSetLayoutBinding[]",
        [
            {
                "binding": i,
                "descriptorType": _STORAGE_BUFFER,
                "descriptorCount": 1,
                "stageFlags": _STAGE_COMPUTE,
            }
            for i in range(len(buffers))
        ],
    )
    set_info = api.struct(
        "VkDescriptorSetLayoutCreateInfo",
        "DESCRIPTOR_SET_LAYOUT_CREATE_INFO",
        bindingCount=len(buffers),
        pBindings=bindings,
    )
    set_layout = ffi.new(
        "VkDescriptorSetLayout[1]",
        [device.created("VkDescriptorSetLayout", "vkCreateDescriptorSetLayout", set_info)],
    )
    constant = ffi.new("VkPushConstantRange*", {"stageFlags": _STAGE_COMPUTE, "size": 4})
    layout_info = api.struct(
        "VkPipelineLayoutCreateInfo",
        "PIPELINE_LAYOUT_CREATE_INFO",
        setLayoutCount=1,
        pSetLayouts=set_layout,
        pushConstantRangeCount=1,
        pPushConstantRanges=constant,
    )
    layout = device.created("VkPipelineLayout", "vkCreatePipelineLayout", layout_info)
    info = api.struct("VkComputePipelineCreateInfo", "COMPUTE_PIPELINE_CREATE_INFO")
    entry = ffi.new("char[]", b"main")
    stage_type = "VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO"
    info.stage.sType = getattr(api.constants, stage_type)
    info.stage.stage = _STAGE_COMPUTE
    info.stage.module = module
    info.stage.pName = entry
    info.layout = layout
    made = ffi.new("VkPipeline*")
    api.check(
        lib.vkCreateComputePipelines(
            device.handle, ffi.NULL if cache is None else cache, 1, info, ffi.NULL, made
        ),
        "vkCreateComputePipelines",
    )
    device.keep(
        lambda pipeline: lib.vkDestroyPipeline(device.handle, pipeline, ffi.NULL), made[0]
    )
    return layout, made[0], _descriptors(device, set_layout, buffers)


def _descriptors(device: Device, set_layout: Any, buffers: Sequence[Buffer]) -> Any:
    api, ffi, lib = device.api, device.api.ffi, device.api.lib
    size = ffi.new(
        "VkDescriptorPoolSize*", {"type": _STORAGE_BUFFER, "descriptorCount": len(buffers)}
    )
    pool_info = api.struct(
        "VkDescriptorPoolCreateInfo",
        "DESCRIPTOR_POOL_CREATE_INFO",
        maxSets=1,
        poolSizeCount=1,
        pPoolSizes=size,
    )
    pool = device.created("VkDescriptorPool", "vkCreateDescriptorPool", pool_info)
    info = api.struct(
        "VkDescriptorSetAllocateInfo",
        "DESCRIPTOR_SET_ALLOCATE_INFO",
        descriptorPool=pool,
        descriptorSetCount=1,
        pSetLayouts=set_layout,
    )
    made = ffi.new("VkDescriptorSet[1]")
    api.check(
        lib.vkAllocateDescriptorSets(device.handle, info, made), "vkAllocateDescriptorSets"
    )
    ranges = ffi.new(
        "VkDescriptorBufferInfo[]",
        [{"buffer": each.handle, "offset": 0, "range": _WHOLE} for each in buffers],
    )
    writes = ffi.new("VkWriteDescriptorSet[]", len(buffers))
    for i, write in enumerate(writes):
        write.sType = api.constants.VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET
        write.dstSet = made[0]
        write.dstBinding = i
        write.descriptorCount = 1
        write.descriptorType = _STORAGE_BUFFER
        write.pBufferInfo = ranges + i

    lib.vkUpdateDescriptorSets(device.handle, len(buffers), writes, 0, ffi.NULL)
    return made
