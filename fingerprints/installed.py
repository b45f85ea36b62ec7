"""Which drivers a loader would open, and how to have it open one of them only.

When a driver kills the process that merely lists devices, the list is lost. Each driver is then
tried in a process of its own, so that the others are still measured and the culprit is named.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from switchgear.fingerprints.measurement import OPENCL_BANDWIDTH, VULKAN_MATMUL

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_VULKAN_ICD: Final = Path("vulkan", "icd.d")
_OPENCL_VENDORS: Final = "/etc/OpenCL/vendors"


@dataclass(frozen=True, slots=True)
class Driver:
    """An installed driver; `environment` holds the loader's variables that name it."""

    api: str
    name: str
    library: str
    environment: dict[str, str]

    def alone(self, environment: Mapping[str, str]) -> dict[str, str]:
        """That environment, changed so that the loader opens this driver only."""
        return {**environment, **self.environment}


def drivers(test: str, environment: Mapping[str, str]) -> list[Driver]:
    """The drivers that the test's loader would open, empty for a test without a loader."""
    if test == VULKAN_MATMUL:
        return [_vulkan(path) for path in _vulkan_manifests(environment)]

    if test == OPENCL_BANDWIDTH:
        return [_opencl(path) for path in _opencl_vendors(environment)]

    return []


def _vulkan(manifest: Path) -> Driver:
    try:
        library = str(json.loads(manifest.read_text())["ICD"]["library_path"])
    except (OSError, ValueError, KeyError, TypeError):
        library = ""

    if library.startswith("."):
        library = str((manifest.parent / library).resolve())

    # The older name beside the newer: a loader before 1.3.207 knows only VK_ICD_FILENAMES.
    environment = {"VK_DRIVER_FILES": str(manifest), "VK_ICD_FILENAMES": str(manifest)}
    return Driver("vulkan", manifest.stem, library, environment | {"VK_ADD_DRIVER_FILES": ""})


def _opencl(vendor: Path) -> Driver:
    try:
        library = vendor.read_text(errors="replace").strip()
    except OSError:
        library = ""

    return Driver("opencl", vendor.stem, library, {"OCL_ICD_VENDORS": str(vendor)})


def _vulkan_manifests(environment: Mapping[str, str]) -> list[Path]:
    """As the loader's documentation orders them."""
    named = environment.get("VK_DRIVER_FILES") or environment.get("VK_ICD_FILENAMES")
    if named:
        return list(_files(named.split(":"), "*.json"))

    home = environment.get("HOME", "/")
    folders = [
        environment.get("XDG_CONFIG_HOME") or f"{home}/.config",
        *(environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":"),
        "/etc",
        environment.get("XDG_DATA_HOME") or f"{home}/.local/share",
        *(environment.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share").split(":"),
    ]
    added = environment.get("VK_ADD_DRIVER_FILES", "").split(":")
    return list(_files([*added, *(Path(each) / _VULKAN_ICD for each in folders)], "*.json"))


def _opencl_vendors(environment: Mapping[str, str]) -> list[Path]:
    return list(_files([environment.get("OCL_ICD_VENDORS") or _OPENCL_VENDORS], "*.icd"))


def _files(places: Iterable[str | Path], pattern: str) -> Iterator[Path]:
    """The files named, and those of the folders named; what is not there is left out."""
    seen: set[Path] = set()
    for place in places:
        path = Path(place)
        if not str(place):
            continue

        for file in sorted(path.glob(pattern)) if path.is_dir() else [path]:
            if file.is_file() and file.resolve() not in seen:
                seen.add(file.resolve())
                yield file
