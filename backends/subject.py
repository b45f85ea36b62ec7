"""A device as its driver names it. Standard library only: the daemon reads these too."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Subject:
    """A device or what else is measured, as its driver names it; what is not told is empty.

    `api` is `vulkan`, `opencl`, `npu` or `cpu`; `index` is the place in that API's listing.
    `vendor_id` and `device_id` are the PCI numbers (OpenCL tells the vendor's only), 0 where
    unknown. UUIDs are 32 hexadecimal digits, `pci_address` is `dddd:bb:dd.f`. `device_type` is
    `discrete`, `integrated`, `virtual`, `cpu`, `gpu`, `accelerator`, `npu`, `cluster` or
    `other`. `platform` is the OpenCL platform's name, `library` the path of the driver or
    delegate.
    """

    api: str
    name: str
    index: int = 0
    vendor_id: int = 0
    device_id: int = 0
    driver_name: str = ""
    driver_version: str = ""
    driver_info: str = ""
    device_uuid: str = ""
    driver_uuid: str = ""
    pci_address: str = ""
    device_type: str = "other"
    platform: str = ""
    library: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
