"""The Vulkan loader, an instance and the identity of its devices, by the raw cffi layer.

The wrappers of the `vulkan` package cost microseconds a call and split its errors over two
exception trees, so only `vulkan.lib` and `vulkan.ffi` are used. A pointer in a struct does not
keep its target alive: whoever fills a struct holds the parts until the call is over.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

from switchgear.backends.mapped import library_named
from switchgear.backends.subject import Subject
from switchgear.ipc.errors import DriverError, NoBackend

API_1_1: Final = (1 << 22) | (1 << 12)
_COMPUTE_BIT: Final = 2
_DEVICE_TYPES: Final = ("other", "integrated", "discrete", "virtual", "cpu")
_NVIDIA: Final = 0x10DE


class Vulkan:
    """The loader, opened late: the import of the package is what opens it.

    Raises `NoBackend` where the package or the loader is missing.
    """

    def __init__(self) -> None:
        try:
            import vulkan
        except ImportError as error:
            raise NoBackend(f"the Python package vulkan is not installed: {error}") from None
        except OSError:
            raise NoBackend(f"the Vulkan loader cannot be opened: {_why()}") from None

        self.constants: Any = vulkan
        self.ffi: Any = vulkan.ffi
        self.lib: Any = vulkan.lib
        self.loader_path = library_named("libvulkan.so")

    def check(self, result: int, call: str) -> int:
        """Raises `DriverError` with the driver's own code and name on a negative result."""
        if result < 0:
            raise self.error(result, call)

        return result

    def error(self, result: int, call: str) -> DriverError:
        return DriverError("vulkan", result, self._result_name(result), call)

    def struct(self, kind: str, structure_type: str, **members: Any) -> Any:
        """A new struct with `sType` set; `structure_type` without its common prefix."""
        s_type = getattr(self.constants, f"VK_STRUCTURE_TYPE_{structure_type}")
        return self.ffi.new(f"{kind}*", {"sType": s_type, **members})

    def listed(self, kind: str, name: str, *arguments: Any) -> Any:
        """An array from the call `name`, one of those that count first and fill then.

        Its elements live as long as the array is held: a slice of it would not hold it.
        """
        call = getattr(self.lib, name)
        count = self.ffi.new("uint32_t*")
        self.check(call(*arguments, count, self.ffi.NULL) or 0, name)
        items = self.ffi.new(f"{kind}[]", count[0])
        self.check(call(*arguments, count, items) or 0, name)
        if count[0] == len(items):
            return items

        fewer = self.ffi.new(f"{kind}[]", count[0])
        self.ffi.memmove(fewer, items, self.ffi.sizeof(fewer))
        return fewer

    def _result_name(self, result: int) -> str:
        names: dict[int, str] = self.ffi.typeof("VkResult").elements
        return names.get(result, f"VkResult {result}")


@dataclass(frozen=True, slots=True)
class PhysicalDevice:
    """A device of an instance, with what choosing a queue and a kernel needs."""

    handle: Any
    subject: Subject
    api_version: int
    extensions: frozenset[str]
    queue_family: int | None
    timestamp_bits: int
    timestamp_period_ns: float
    max_invocations: int
    memory: Any
    pipeline_cache_uuid: str


class Instance:
    """A Vulkan 1.1 instance. `close` destroys it; its devices must be closed first."""

    def __init__(self, api: Vulkan) -> None:
        self.api = api
        application = api.struct("VkApplicationInfo", "APPLICATION_INFO", apiVersion=API_1_1)
        info = api.struct(
            "VkInstanceCreateInfo", "INSTANCE_CREATE_INFO", pApplicationInfo=application
        )
        instance = api.ffi.new("VkInstance*")
        api.check(api.lib.vkCreateInstance(info, api.ffi.NULL, instance), "vkCreateInstance")
        self.handle = instance[0]

    def devices(self) -> list[PhysicalDevice]:
        """All physical devices in the order of the loader; raises `DriverError`.

        The driver's file is not told here: `Device.library` knows it.
        """
        api = self.api
        handles = api.listed("VkPhysicalDevice", "vkEnumeratePhysicalDevices", self.handle)
        return [self._describe(index, handle) for index, handle in enumerate(handles)]

    def close(self) -> None:
        self.api.lib.vkDestroyInstance(self.handle, self.api.ffi.NULL)

    def _describe(self, index: int, handle: Any) -> PhysicalDevice:
        api, ffi, lib = self.api, self.api.ffi, self.api.lib
        properties = ffi.new("VkPhysicalDeviceProperties*")
        lib.vkGetPhysicalDeviceProperties(handle, properties)
        extensions = frozenset(
            ffi.string(extension.extensionName).decode()
            for extension in api.listed(
                "VkExtensionProperties",
                "vkEnumerateDeviceExtensionProperties",
                handle,
                ffi.NULL,
            )
        )
        families = api.listed(
            "VkQueueFamilyProperties", "vkGetPhysicalDeviceQueueFamilyProperties", handle
        )
        family = next(
            (i for i, each in enumerate(families) if each.queueFlags & _COMPUTE_BIT), None
        )
        memory = ffi.new("VkPhysicalDeviceMemoryProperties*")
        lib.vkGetPhysicalDeviceMemoryProperties(handle, memory)
        return PhysicalDevice(
            handle=handle,
            subject=self._subject(index, handle, properties, extensions),
            api_version=properties.apiVersion,
            extensions=extensions,
            queue_family=family,
            timestamp_bits=0 if family is None else families[family].timestampValidBits,
            timestamp_period_ns=properties.limits.timestampPeriod,
            max_invocations=properties.limits.maxComputeWorkGroupInvocations,
            memory=memory,
            pipeline_cache_uuid=bytes(ffi.buffer(properties.pipelineCacheUUID)).hex(),
        )

    def _subject(
        self, index: int, handle: Any, properties: Any, extensions: frozenset[str]
    ) -> Subject:
        api, ffi = self.api, self.api.ffi
        kind = properties.deviceType
        known: dict[str, Any] = {
            "api": "vulkan",
            "name": ffi.string(properties.deviceName).decode(errors="replace"),
            "index": index,
            "vendor_id": properties.vendorID,
            "device_id": properties.deviceID,
            "driver_version": driver_version(properties.vendorID, properties.driverVersion),
            "device_type": _DEVICE_TYPES[kind] if kind < len(_DEVICE_TYPES) else "other",
        }
        if properties.apiVersion < API_1_1:
            return Subject(**known)

        # Each chained struct only where the driver knows it: others would stay unfilled.
        identity = api.struct("VkPhysicalDeviceIDProperties", "PHYSICAL_DEVICE_ID_PROPERTIES")
        chain, driver, pci = identity, None, None
        if "VK_KHR_driver_properties" in extensions or properties.apiVersion >= API_1_1 + 4096:
            driver = api.struct(
                "VkPhysicalDeviceDriverProperties",
                "PHYSICAL_DEVICE_DRIVER_PROPERTIES",
                pNext=chain,
            )
            chain = driver

        if "VK_EXT_pci_bus_info" in extensions:
            pci = api.struct(
                "VkPhysicalDevicePCIBusInfoPropertiesEXT",
                "PHYSICAL_DEVICE_PCI_BUS_INFO_PROPERTIES_EXT",
                pNext=chain,
            )
            chain = pci

        head = api.struct(
            "VkPhysicalDeviceProperties2", "PHYSICAL_DEVICE_PROPERTIES_2", pNext=chain
        )
        api.lib.vkGetPhysicalDeviceProperties2(handle, head)
        known["device_uuid"] = bytes(ffi.buffer(identity.deviceUUID)).hex()
        known["driver_uuid"] = bytes(ffi.buffer(identity.driverUUID)).hex()
        if driver is not None:
            known["driver_name"] = ffi.string(driver.driverName).decode(errors="replace")
            known["driver_info"] = ffi.string(driver.driverInfo).decode(errors="replace")

        if pci is not None:
            known["pci_address"] = (
                f"{pci.pciDomain:04x}:{pci.pciBus:02x}:{pci.pciDevice:02x}.{pci.pciFunction:x}"
            )

        return Subject(**known)


def driver_version(vendor_id: int, packed: int) -> str:
    """The driver's version as text: NVIDIA packs it as 10.8.8.6 bits, others as 10.10.12."""
    if vendor_id == _NVIDIA:
        return f"{packed >> 22}.{packed >> 14 & 0xFF}.{packed >> 6 & 0xFF}.{packed & 0x3F}"

    return f"{packed >> 22}.{packed >> 12 & 0x3FF}.{packed & 0xFFF}"


def _why() -> str:
    """The dynamic linker's own reason: the package's text speaks of an SDK instead."""
    try:
        ctypes.CDLL("libvulkan.so.1")
    except OSError as error:
        return str(error)

    return "the Python package vulkan does not find it"
