"""Sources of power in a fake sysfs: powercap and batteries as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

RANGE_UJ = 262_143_328_850


def add_powercap(root: Path, name: str, label: str, energy_uj: object) -> Path:
    """One zone (`intel-rapl:0`, its part `intel-rapl:0:1`); returns its counter."""
    folder = root / "class/powercap" / name
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{label}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    counter = folder / "energy_uj"
    counter.write_text(f"{energy_uj}\n")
    return counter


def add_battery(root: Path, name: str, status: str, **values: int | str) -> Path:
    """One battery with files of these names, in uA, uV and uW; returns its folder."""
    folder = root / "class/power_supply" / name
    folder.mkdir(parents=True)
    for file, value in {"type": "Battery", "status": status, **values}.items():
        (folder / file).write_text(f"{value}\n")

    return folder
