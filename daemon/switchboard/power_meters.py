"""What of this machine tells the energy it takes: powercap, hwmon's power, the battery.

Reading may block, as any sensor's file may: it belongs in a thread that nobody waits for.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from switchgear.daemon.switchboard.topology import Part

Method: TypeAlias = Literal["powercap", "hwmon", "battery"]
# What a meter's energy is that of: the chip with its CPU and integrated GPU, or all of the
# machine; a card's meter has the card's PCI address instead.
PACKAGE: Final = "package"
SYSTEM: Final = "system"
# More than any such chip or board draws: a counter that was reset meanwhile.
MAX_POWER_UW: Final = 1e9
# hwmon's labels of the rail that all others hang on (Jetson's and NXP's boards among them).
_TOTAL: Final = re.compile(r"vdd_in|pom_5v_in|\bvin\b|total|sys", re.I)
_PCI: Final = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_POWER_FILE: Final = re.compile(r"power(\d+)_(average|input)")


class Taken(NamedTuple):
    """One reading at monotonic `at_s`: counters in uJ, or the power in uW."""

    at_s: float
    counters_uj: tuple[int, ...]
    power_uw: float


@dataclass(frozen=True, slots=True)
class Meter:
    """One source. `files` are counters of energy with `wraps_uj` each, or files of power; those
    of a battery are its folders."""

    method: Method
    scope: str
    files: tuple[Path, ...]
    wraps_uj: tuple[int, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether it counts energy, so that two readings are enough; else it tells power."""
        return self.method == "powercap"

    def covers(self, part: Part) -> bool:
        """Whether what this part takes is within what is measured.

        An NPU may sit on any bus: only the whole machine, or its own function, covers it.
        """
        if self.scope == SYSTEM or any(self.scope == api.pci_address for api in part.apis):
            return True

        on_chip = part.kind != "npu" and all(api.device_type != "discrete" for api in part.apis)
        return self.scope == PACKAGE and on_chip

    def take(self) -> Taken | None:
        """Reads it; None while a battery does not discharge. Blocks.

        :raises OSError: a file cannot be read.
        :raises ValueError: it holds no number.
        """
        if self.counts:
            return Taken(monotonic(), tuple(_number(file) for file in self.files), 0.0)

        if self.method == "hwmon":
            return Taken(monotonic(), (), float(sum(_number(file) for file in self.files)))

        if any(_text(folder / "status") != "Discharging" for folder in self.files):
            return None

        return Taken(monotonic(), (), sum(_battery_uw(folder) for folder in self.files))

    def energy_uj(self, before: Taken, after: Taken) -> float | None:
        """The energy between two readings; None where it is beyond what can be."""
        passed_s = after.at_s - before.at_s
        if self.counts:
            # A counter starts again at 0 after its range.
            energy_uj = float(
                sum(
                    late - early if late >= early else late - early + wraps
                    for early, late, wraps in zip(
                        before.counters_uj, after.counters_uj, self.wraps_uj, strict=True
                    )
                )
            )
        else:
            energy_uj = (before.power_uw + after.power_uw) / 2 * passed_s

        return energy_uj if 0.0 <= energy_uj <= MAX_POWER_UW * passed_s else None


def find_meters(root: Path) -> tuple[list[Meter], list[str]]:
    """The meters below the sysfs `root` that can be read, the best of each scope first; and why
    others cannot. Blocks; raises nothing."""
    problems: list[str] = []
    found: list[Meter] = []
    for meter in (*_cards(root), *_powercap(root), *_rails(root), *_battery(root)):
        try:
            meter.take()
        except (OSError, ValueError) as error:
            reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else error
            problems.append(f"{meter.method} {meter.files[0].parent.name}: {reason}")
        else:
            found.append(meter)

    return found, problems


def choose_meter(meters: Sequence[Meter], part: Part) -> Meter | None:
    """The meter for a part's energy: its card's own, else the first that covers it."""
    own = [meter for meter in meters if any(meter.scope == a.pci_address for a in part.apis)]
    return next((meter for meter in (*own, *meters) if meter.covers(part)), None)


def _powercap(root: Path) -> Iterator[Meter]:
    """The packages together, then the whole platform's counter."""
    packages: dict[str, tuple[Path, int]] = {}
    platform: list[tuple[Path, int]] = []
    for folder in _folders(root / "class/powercap"):
        # `intel-rapl:0:1` is a part of `intel-rapl:0`; a second driver repeats the packages.
        if folder.name.count(":") != 1:
            continue

        with contextlib.suppress(OSError, ValueError):
            name = _text(folder / "name")
            counter = (folder / "energy_uj", _number(folder / "max_energy_range_uj"))
            if name == "psys":
                platform.append(counter)
            else:
                packages.setdefault(name, counter)

    for scope, counters in ((PACKAGE, list(packages.values())), (SYSTEM, platform)):
        if counters:
            files, wraps = zip(*counters, strict=True)
            yield Meter("powercap", scope, tuple(files), tuple(wraps))


def _power_files(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Each sensor of power: its file, its label, and the PCI function that it sits on."""
    for folder in _folders(root / "class/hwmon"):
        device = os.path.realpath(folder)
        # The kernel mirrors each battery and charger there.
        if "/power_supply/" in device:
            continue

        address = _PCI.findall(device)
        files: dict[str, Path] = {}
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(folder)):
                known = _POWER_FILE.fullmatch(name)
                if known is not None:
                    # `average` sorts first: it holds what happened between two readings.
                    files.setdefault(known[1], folder / name)

        for number, file in files.items():
            label = ""
            with contextlib.suppress(OSError):
                label = _text(folder / f"power{number}_label")

            yield file, label, address[-1] if address else ""


def _cards(root: Path) -> Iterator[Meter]:
    of_card: dict[str, Path] = {}
    for file, _, address in _power_files(root):
        if address:
            of_card.setdefault(address, file)

    for address, file in of_card.items():
        yield Meter("hwmon", address, (file,))


def _rails(root: Path) -> Iterator[Meter]:
    rails = [(file, label) for file, label, address in _power_files(root) if not address]
    total = [file for file, label in rails if _TOTAL.search(label)]
    if total:
        yield Meter("hwmon", SYSTEM, (total[0],))
    elif rails:
        # Rails beside each other, what idles subtracted: their sum is the chip's.
        yield Meter("hwmon", PACKAGE, tuple(file for file, _ in rails))


def _battery(root: Path) -> Iterator[Meter]:
    folders = []
    for folder in _folders(root / "class/power_supply"):
        with contextlib.suppress(OSError):
            # A mouse has one too; its scope says so.
            scope = folder / "scope"
            foreign = scope.exists() and _text(scope) == "Device"
            if _text(folder / "type") == "Battery" and not foreign:
                folders.append(folder)

    if folders:
        yield Meter("battery", SYSTEM, tuple(folders))


def _battery_uw(folder: Path) -> float:
    """Some drivers sign the current of a battery that discharges."""
    try:
        return float(abs(_number(folder / "power_now")))
    except FileNotFoundError:
        current_ua = abs(_number(folder / "current_now"))
        return current_ua * _number(folder / "voltage_now") / 1e6


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(parent / name for name in os.listdir(parent))
    except OSError:
        return []


def _text(file: Path) -> str:
    return file.read_text(errors="replace").strip()


def _number(file: Path) -> int:
    return int(_text(file))
