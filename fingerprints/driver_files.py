"""Which drivers are installed and whether one changed, told from files alone.

No driver is opened: a loader's manifests are read, the libraries they name are found, and each
is known by its size and its build id. Times of files say nothing (packages and images set them
at will) and are never looked at. Reads a few kilobytes per library; blocks on the disk.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

from switchgear.fingerprints.installed import drivers
from switchgear.fingerprints.measurement import OPENCL_BANDWIDTH, VULKAN_MATMUL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MANIFEST_BYTES: Final = 64 * 1024
_DRIVERS_AT_MOST: Final = 256
_SAMPLE_BYTES: Final = 64 * 1024
# Where loaders look besides /etc/ld.so.conf.d; Android's own last.
_LIBRARY_FOLDERS: Final = (
    "/usr/local/lib",
    "/usr/lib64",
    "/lib64",
    "/usr/lib",
    "/lib",
    "/vendor/lib64",
    "/system/vendor/lib64",
    "/system/lib64",
)


def vulkan_files(environment: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """Identity of the Vulkan loader, of every driver's manifest and of its library, by path.

    `root` is where libraries are looked for; manifests come from where the loader looks under
    this environment. Android has no manifests: there the driver is `vulkan.*.so` itself.
    """
    found: dict[str, str] = {}
    _add_library(found, "libvulkan.so.1", environment, root)
    for driver in drivers(VULKAN_MATMUL, environment)[:_DRIVERS_AT_MOST]:
        manifest = Path(driver.environment["VK_DRIVER_FILES"])
        _add_manifest(found, manifest)
        library = driver.library
        if "/" in library and not library.startswith("/"):
            library = str(manifest.parent / library)

        _add_library(found, library, environment, root)

    for library_path in _files(root / "vendor/lib64/hw", ".so"):
        if library_path.name.startswith("vulkan."):
            found[str(library_path)] = file_identity(library_path)

    return found


def opencl_files(environment: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """Identity of every OpenCL driver entry and library, by path.

    A `.icd` file holds one library name. Android has no such entries: there the vendor's
    `libOpenCL.so` is the driver itself.
    """
    found: dict[str, str] = {}
    for driver in drivers(OPENCL_BANDWIDTH, environment)[:_DRIVERS_AT_MOST]:
        _add_manifest(found, Path(driver.environment["OCL_ICD_VENDORS"]))
        _add_library(found, driver.library, environment, root)

    for library in environment.get("OCL_ICD_FILENAMES", "").split(":"):
        _add_library(found, library, environment, root)

    for name in ("vendor/lib64/libOpenCL.so", "system/vendor/lib64/libOpenCL.so"):
        if (root / name).exists():
            found[str(root / name)] = file_identity(root / name)

    return found


def file_identity(path: Path) -> str:
    """`SIZE bytes, build id HEX`; where the file has no build id, a digest of both its ends.

    Never raises: a file that cannot be read is its error in words, which is equal while it
    stays unreadable.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        return f"unreadable: {error.strerror}"

    try:
        size = os.fstat(descriptor).st_size
        build_id = _build_id(descriptor, size)
        if build_id:
            return f"{size} bytes, build id {build_id}"

        digest = hashlib.sha256(os.pread(descriptor, _SAMPLE_BYTES, 0))
        digest.update(os.pread(descriptor, _SAMPLE_BYTES, max(0, size - _SAMPLE_BYTES)))
        return f"{size} bytes, sha256 of both ends {digest.hexdigest()[:32]}"
    except OSError as error:
        return f"unreadable: {error.strerror}"
    finally:
        os.close(descriptor)


def find_library(
    name: str, environment: Mapping[str, str], root: Path = Path("/")
) -> Path | None:
    """The file that a loader would open for a library's name or path, or None."""
    if "/" in name:
        path = root / name.lstrip("/") if name.startswith("/") else Path(name)
        return path if path.exists() else None

    folders = [
        Path(entry) for entry in environment.get("LD_LIBRARY_PATH", "").split(":") if entry
    ]
    folders += [root / folder.lstrip("/") for folder in _configured_folders(root)]
    folders += [root / folder.lstrip("/") for folder in _LIBRARY_FOLDERS]
    return next((folder / name for folder in folders if (folder / name).exists()), None)


def _add_manifest(found: dict[str, str], manifest: Path) -> None:
    data = _small_file(manifest)
    if data is not None:
        found[str(manifest)] = f"sha256 {hashlib.sha256(data).hexdigest()[:32]}"


def _add_library(
    found: dict[str, str], name: str, environment: Mapping[str, str], root: Path
) -> None:
    if not name:
        return

    path = find_library(name, environment, root)
    if path is None:
        found[name] = "not found"
    else:
        found[str(path)] = file_identity(path)


def _configured_folders(root: Path) -> Iterator[str]:
    files = [root / "etc/ld.so.conf", *_files(root / "etc/ld.so.conf.d", ".conf")]
    for file in files:
        for line in (_small_file(file) or b"").decode("utf-8", "replace").splitlines():
            if line.startswith("/"):
                yield line.strip()


def _files(folder: Path, suffix: str) -> list[Path]:
    try:
        return sorted(folder / name for name in os.listdir(folder) if name.endswith(suffix))
    except OSError:
        return []


def _small_file(path: Path) -> bytes | None:
    """The first 64 KiB of a file, or None when it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None

    try:
        return os.read(descriptor, _MANIFEST_BYTES)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _build_id(descriptor: int, size: int) -> str:
    """The GNU build id of an ELF file in this machine's byte order, empty where it has none.

    The layout is that of elf(5): the file's header, its program headers, notes of
    (name size, content size, type), each padded to four bytes.
    """
    header = os.pread(descriptor, 64, 0)
    if len(header) < 64 or header[:4] != b"\x7fELF" or header[5] != 1:
        return ""

    wide = header[4] == 2
    if wide:
        start, entry_size, count = struct.unpack_from("<32xQ14xHH", header)
    else:
        start, entry_size, count = struct.unpack_from("<28xI10xHH", header)

    shape = "<I4xQ16xQ" if wide else "<II8xI"
    if entry_size < struct.calcsize(shape) or entry_size > 256:
        return ""

    table = os.pread(descriptor, entry_size * min(count, 128), start) if start < size else b""
    for at in range(0, len(table) - entry_size + 1, entry_size):
        kind, offset, length = struct.unpack_from(shape, table, at)
        if kind == 4 and offset < size:
            found = _build_id_note(os.pread(descriptor, min(length, _SAMPLE_BYTES), offset))
            if found:
                return found

    return ""


def _build_id_note(notes: bytes) -> str:
    at = 0
    while at + 12 <= len(notes):
        name_size, content_size, kind = struct.unpack_from("<III", notes, at)
        name_at = at + 12
        content_at = name_at + -(-name_size // 4) * 4
        if kind == 3 and notes[name_at : name_at + 4] == b"GNU\0":
            return notes[content_at : content_at + min(content_size, 64)].hex()

        at = content_at + -(-content_size // 4) * 4

    return ""
