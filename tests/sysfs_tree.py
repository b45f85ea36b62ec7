"""Builds a sysfs tree with thermal zones and hwmon, from a device's JSON or zone by zone.

The layout is the kernel's: real folders under `devices`, links to them under `class`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "thermal"


def device_files() -> list[Path]:
    """The dumps of real devices, one JSON each."""
    return sorted(DATA.glob("*.json"))


def build_device(file: Path, root: Path) -> dict[str, Any]:
    """Builds the tree of one dump under `root`; returns the dump."""
    device: dict[str, Any] = json.loads(file.read_text())
    cooling = {
        entry["type"]: _add_cooling(root, entry["index"], entry)
        for entry in reversed(device["cooling_devices"])
    }
    for zone in device["zones"]:
        add_zone(
            root,
            zone["index"],
            zone["type"],
            zone["temp"],
            trips=[(trip["type"], trip["temp"], trip["hyst"]) for trip in zone["trips"]],
            cooling=[cooling[bound["cdev"]] for bound in zone.get("cdevs", [])],
        )

    for number, entry in enumerate(device.get("hwmon", [])):
        add_hwmon(root, number, entry)

    return device


def add_zone(
    root: Path,
    number: int,
    kind: str,
    temperature: object,
    *,
    trips: list[tuple[str, int, int]] | None = None,
    cooling: list[Path] | None = None,
) -> Path:
    """One zone; a `temperature` of None leaves the file out, a Path becomes a link to it."""
    folder = root / "devices/virtual/thermal" / f"thermal_zone{number}"
    folder.mkdir(parents=True)
    _write(folder / "type", kind)
    _write(folder / "mode", "enabled")
    _write(folder / "policy", "step_wise")
    if isinstance(temperature, Path):
        (folder / "temp").symlink_to(temperature)
    elif temperature is not None:
        _write(folder / "temp", temperature)

    for index, (trip_kind, trip_mc, hysteresis_mc) in enumerate(trips or []):
        _write(folder / f"trip_point_{index}_type", trip_kind)
        _write(folder / f"trip_point_{index}_temp", trip_mc)
        _write(folder / f"trip_point_{index}_hyst", hysteresis_mc)

    for index, device in enumerate(cooling or []):
        (folder / f"cdev{index}").symlink_to(f"../{device.name}")

    _link(root / "class/thermal", folder)
    return folder


def set_temperature(zone: Path, temperature: object) -> None:
    """Gives a zone that is being read another temperature; no reader finds an empty file."""
    aside = zone / "temp.new"
    _write(aside, temperature)
    aside.replace(zone / "temp")


def add_hwmon(root: Path, number: int, files: dict[str, Any], pci_address: str = "") -> Path:
    """One entry of hwmon with the given files, on a PCI function where one is named."""
    parent = (
        root / "devices" / (f"pci0000:00/{pci_address}" if pci_address else "platform/chip")
    )
    folder = parent / "hwmon" / f"hwmon{number}"
    folder.mkdir(parents=True)
    for name, value in files.items():
        _write(folder / name, value)

    (folder / "device").symlink_to("../..")
    _link(root / "class/hwmon", folder)
    return folder


def _add_cooling(root: Path, number: int, entry: dict[str, Any]) -> Path:
    folder = root / "devices/virtual/thermal" / f"cooling_device{number}"
    folder.mkdir(parents=True)
    for name in ("type", "max_state", "cur_state"):
        _write(folder / name, entry[name])

    _link(root / "class/thermal", folder)
    return folder


def _link(folder: Path, target: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / target.name).symlink_to(os.path.relpath(target, folder))


def _write(path: Path, value: object) -> None:
    path.write_text(f"{value}\n")
