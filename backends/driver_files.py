"""What drivers consist of on this machine, cheap to look at: has anything changed?

Only `stat` and small manifests: no library is opened. Standard library only, for the daemon.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

# The registries of the Vulkan and the OpenCL loader, below each of their folders.
_VULKAN: Final = "vulkan/icd.d"
_OPENCL: Final = "/etc/OpenCL/vendors"
# Render nodes, NPUs and what vendors' own drivers call theirs.
NODES: Final = (
    *("/dev/dri/*", "/dev/accel/*", "/dev/accel*", "/dev/kfd", "/dev/dxg", "/dev/nvidia*"),
    *("/dev/mali*", "/dev/kgsl*", "/dev/pvr*", "/dev/galcore", "/dev/rknpu*", "/dev/apex_*"),
    *("/dev/ethosu*", "/dev/vha*", "/dev/adsprpc-smd", "/dev/fastrpc-*", "/dev/mtk_mdla*"),
)
_LIBRARIES: Final = (
    *("/usr/lib", "/usr/lib64", "/usr/local/lib", "/vendor/lib64", "/system/lib64"),
    *("/system/vendor/lib64", "/lib64"),
)
_MAX_FILES: Final = 4096
_MAX_DEPTH: Final = 8


def signature(options: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> str:
    """A hash of what a backend with these options may find; another one means: ask it again.

    It covers the loaders' registries with the libraries that they name, folders of libraries
    and of Python's packages, device nodes, and the paths in `options`. Blocks for some hundred
    `stat`; raises nothing.
    """
    variables = os.environ if environment is None else environment
    paths = [*_registered(variables), *_folders(variables), *_paths_in(options)]
    for pattern in NODES:
        paths += glob.glob(pattern)

    digest = hashlib.sha256()
    for path in sorted(dict.fromkeys(paths))[:_MAX_FILES]:
        digest.update(repr(_mark(path)).encode())

    return digest.hexdigest()


def _mark(path: str) -> tuple[object, ...]:
    """What changes when a file, folder or node is another; links are followed."""
    try:
        state = os.stat(path)
    except OSError as error:
        return path, error.errno
    except ValueError:  # a NUL in it
        return (path,)

    who = (state.st_mode, state.st_uid, state.st_gid, state.st_ino)
    if stat.S_ISCHR(state.st_mode):
        # Its times are those of its use.
        return path, *who, state.st_rdev

    return path, *who, state.st_size, state.st_mtime_ns


def _registered(variables: Mapping[str, str]) -> Iterator[str]:
    """Manifests of drivers, their folders, and the libraries that they name by a path."""
    for place in (*_vulkan_places(variables), *_opencl_places(variables)):
        yield place
        files = [place]
        with contextlib.suppress(OSError):
            files = [os.path.join(place, name) for name in os.listdir(place)]

        for file in files:
            yield file
            yield from _named_in(file)


def _vulkan_places(variables: Mapping[str, str]) -> Iterator[str]:
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES", "VK_ADD_DRIVER_FILES"):
        yield from _split(variables.get(name, ""))

    home = variables.get("HOME", "")
    data = variables.get("XDG_DATA_HOME") or (f"{home}/.local/share" if home else "")
    shared = variables.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    for folder in (data, *_split(shared), "/etc", "/usr/local/etc", "/vendor/etc"):
        if folder:
            yield f"{folder}/{_VULKAN}"


def _opencl_places(variables: Mapping[str, str]) -> Iterator[str]:
    yield _OPENCL
    for name in ("OCL_ICD_VENDORS", "OCL_ICD_FILENAMES", "OPENCL_VENDOR_PATH"):
        yield from _split(variables.get(name, ""))


def _named_in(manifest: str) -> Iterator[str]:
    """The absolute paths in a manifest: an OpenCL one is a path, a Vulkan one JSON."""
    try:
        with open(manifest, encoding="utf-8", errors="replace") as file:
            text = file.read(65536)
    except OSError:
        return

    for word in text.replace('"', "\n").splitlines():
        if word.strip().startswith("/"):
            yield word.strip()


def _folders(variables: Mapping[str, str]) -> Iterator[str]:
    """Where libraries and Python's packages come and go."""
    yield from _LIBRARIES
    yield from _split(variables.get("LD_LIBRARY_PATH", ""))
    if multiarch := sysconfig.get_config_var("MULTIARCH"):
        yield f"/usr/lib/{multiarch}"
        yield f"/usr/local/lib/{multiarch}"

    for name in ("purelib", "platlib"):
        if path := sysconfig.get_path(name):
            yield path


def _split(paths: str) -> Iterable[str]:
    return (path for path in paths.split(os.pathsep) if path)


def _paths_in(value: object, depth: int = 0) -> Iterator[str]:
    """The absolute paths among a backend's options, and the folders that they are in."""
    if isinstance(value, str) and value.startswith("/"):
        yield value
        yield os.path.dirname(value)
    elif depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            value = list(value.values())

        if isinstance(value, list | tuple):
            for each in value:
                yield from _paths_in(each, depth + 1)
