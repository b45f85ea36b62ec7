"""Where drivers keep what they compiled: environment variables that point all of it here.

A driver that may not write its cache compiles at every start, and PoCL's device even
disappears; so the folders are made and tried first. Standard library only: the daemon calls
this for the processes that it starts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from switchgear.backends.cache_store import DRIVERS
from switchgear.ipc.errors import DriverError

# Per driver, where it takes a bound of its own.
DRIVER_LIMIT_MIB: Final = 256
# What a driver should find free at least; a compiled model takes some megabytes.
NEEDED_BYTES: Final = 16 << 20

_VULKAN: Final = ("mesa", "nvidia", "amdvlk", "comgr", "xdg")
_OPENCL: Final = ("mesa", "pocl", "nvidia", "cuda", "comgr", "intel", "clvk", "xdg")
_FOLDERS: Final = tuple(sorted({*_VULKAN, *_OPENCL}))


def environment(cache_root: Path) -> dict[str, str]:
    """The variables for every process that opens a driver. Touches nothing.

    Mesa has one cache for all its drivers, Vulkan and OpenCL (RADV, ANV, Turnip, lavapipe,
    rusticl). The folder `xdg` is for whatever follows XDG: pyopencl, tinygrad, older Mesas.
    """
    root = _absolute(cache_root) / DRIVERS
    limit_bytes = str(DRIVER_LIMIT_MIB << 20)
    return {
        "MESA_SHADER_CACHE_DIR": str(root / "mesa"),
        "MESA_SHADER_CACHE_MAX_SIZE": f"{DRIVER_LIMIT_MIB}M",
        "POCL_CACHE_DIR": str(root / "pocl"),
        "__GL_SHADER_DISK_CACHE": "1",
        "__GL_SHADER_DISK_CACHE_PATH": str(root / "nvidia"),
        "__GL_SHADER_DISK_CACHE_SIZE": limit_bytes,
        "CUDA_CACHE_PATH": str(root / "cuda"),
        "CUDA_CACHE_MAXSIZE": limit_bytes,
        "AMD_VK_PIPELINE_CACHE_PATH": str(root / "amdvlk"),
        "AMD_COMGR_CACHE": "1",
        "AMD_COMGR_CACHE_DIR": str(root / "comgr"),
        "NEO_CACHE_PERSISTENT": "1",
        "NEO_CACHE_DIR": str(root / "intel"),
        "NEO_CACHE_MAX_SIZE": limit_bytes,
        "CLVK_CACHE_DIR": str(root / "clvk"),
        "XDG_CACHE_HOME": str(root / "xdg"),
    }


def make_folders(cache_root: Path) -> None:
    """Makes the folders of `environment`, for the owner only, and tries to write there; blocks.

    :raises DriverError: domain errno, with the folder and the reason: not to be written, or
        less than `NEEDED_BYTES` free.
    """
    root = _absolute(cache_root) / DRIVERS
    for name in _FOLDERS:
        folder = root / name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # By writing: permission bits say nothing of read-only mounts and quotas.
            fd, name = tempfile.mkstemp(prefix=".try", dir=folder)
            try:
                os.write(fd, b"x" * 4096)
            finally:
                os.close(fd)
                os.unlink(name)
        except OSError as error:
            raise _unusable(folder, error.errno or errno.EIO, error.strerror or "") from None

    free = NEEDED_BYTES
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(root).free

    if free < NEEDED_BYTES:
        text = f"{free} bytes are free, {NEEDED_BYTES} are needed"
        raise _unusable(root, errno.ENOSPC, text)


def clear(cache_root: Path, backend: str) -> None:
    """Deletes what the drivers of a backend keep; blocks, never raises.

    For after a driver has ended its process: a cache that a power cut has damaged can be why.
    PoCL aborts on one at each start, for ever. Processes that use the caches go on.
    """
    names = {"vulkan": _VULKAN, "opencl": _OPENCL}.get(backend, _FOLDERS)
    for name in names:
        with contextlib.suppress(OSError):
            for entry in (_absolute(cache_root) / DRIVERS / name).iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)


def _unusable(folder: Path, number: int, reason: str) -> DriverError:
    name = errno.errorcode.get(number, "EIO")
    text = f"drivers cannot keep what they compile: {folder}: {reason}"
    return DriverError("errno", number, name, text)


def _absolute(path: Path) -> Path:
    # Not resolved: a link to another disk is the operator's choice.
    return Path(os.path.abspath(path))
