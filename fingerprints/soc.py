"""The name of the chip and of the system image, from what the platform says in files."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Final

_PROPERTY_FILES: Final = (
    "system/build.prop",
    "vendor/build.prop",
    "odm/etc/build.prop",
    "system/system/build.prop",
)
_READ_BYTES: Final = 256 * 1024
_GETPROP_LIMIT_S: Final = 2.0


def read_soc(root: Path = Path("/")) -> tuple[str, str]:
    """The chip's name and where it was read.

    In this order: Android's properties, the device tree, `soc0` of sysfs, the processor's name
    of a PC with its board, the part numbers of an Arm processor. (`unknown`, ``) where none
    says.
    """
    for source in (_android, _device_tree, _soc_bus, _pc, _arm_part):
        name, where = source(root)
        if name:
            return name, where

    return "unknown", ""


def system_image(root: Path = Path("/")) -> str:
    """Android's build fingerprints, for drivers change with them; empty elsewhere."""
    properties = android_properties(root)
    names = ("ro.build.fingerprint", "ro.vendor.build.fingerprint")
    return " ".join(properties[name] for name in names if name in properties)


def android_properties(root: Path = Path("/")) -> dict[str, str]:
    """The properties of an Android system; empty elsewhere.

    Apps may not read the files on newer versions, so that `getprop` is asked too where the
    files gave nothing (one short child process, ended after 2 s).
    """
    properties: dict[str, str] = {}
    for name in _PROPERTY_FILES:
        for line in _text(root / name).splitlines():
            key, separator, value = line.partition("=")
            if separator and key.startswith("ro."):
                properties.setdefault(key.strip(), value.strip())

    command = root / "system/bin/getprop"
    if not properties and os.access(command, os.X_OK):
        properties = _getprop(command)

    return properties


def _getprop(command: Path) -> dict[str, str]:
    try:
        done = subprocess.run(
            [str(command)],
            capture_output=True,
            timeout=_GETPROP_LIMIT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}

    text = done.stdout[:_READ_BYTES].decode("utf-8", "replace")
    return dict(re.findall(r"^\[(ro\.[^\]]+)\]: \[(.*)\]$", text, re.M))


def _android(root: Path) -> tuple[str, str]:
    properties = android_properties(root)
    model = properties.get("ro.soc.model", "")
    maker = properties.get("ro.soc.manufacturer", "")
    if model:
        return f"{maker} {model}".strip(), "ro.soc.model"

    board = properties.get("ro.board.platform", "")
    return board, "ro.board.platform"


def _device_tree(root: Path) -> tuple[str, str]:
    """The last `compatible` entry names the chip, those before it the board."""
    for folder in ("proc/device-tree", "sys/firmware/devicetree/base"):
        entries = [part for part in _text(root / folder / "compatible").split("\0") if part]
        if entries:
            return entries[-1], "device tree"

    return "", ""


def _soc_bus(root: Path) -> tuple[str, str]:
    folder = root / "sys/devices/soc0"
    words = [_line(folder / name) for name in ("vendor", "family", "machine", "soc_id")]
    return " ".join(dict.fromkeys(word for word in words if word)), "soc bus"


def _pc(root: Path) -> tuple[str, str]:
    name = _cpuinfo(root, "model name")
    board = root / "sys/class/dmi/id"
    product = " ".join(
        word for word in (_line(board / "sys_vendor"), _line(board / "product_name")) if word
    )
    if not name:
        return "", ""

    return (f"{name} in {product}" if product else name), "cpuinfo"


def _arm_part(root: Path) -> tuple[str, str]:
    text = _text(root / "proc/cpuinfo")
    hardware = _cpuinfo(root, "Hardware")
    parts = sorted(set(re.findall(r"^CPU part\s*:\s*(\w+)", text, re.M)))
    if hardware:
        return hardware, "cpuinfo"

    return (f"arm parts {' '.join(parts)}", "cpuinfo") if parts else ("", "")


def _cpuinfo(root: Path, field: str) -> str:
    match = re.search(rf"^{field}\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.M)
    return match[1].strip() if match else ""


def _line(path: Path) -> str:
    return _text(path).strip("\0 \n")


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_READ_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
