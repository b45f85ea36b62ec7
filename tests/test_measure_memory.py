"""How much memory a test may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from switchgear.fingerprints.measure.memory import MIB, available_bytes, largest_size

if TYPE_CHECKING:
    from pathlib import Path


def machine(root: Path, available_kib: int, group: str = "/") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_kib} kB\n")
    (root / "proc/self/cgroup").write_text(f"0::{group}\n")
    return root


def limit(root: Path, group: str, most: str, current: int) -> None:
    folder = root / "sys/fs/cgroup" / group.strip("/")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{current}\n")


def test_the_machine_itself() -> None:
    assert available_bytes() > 16 * MIB


def test_the_least_of_machine_and_control_groups(tmp_path: Path) -> None:
    root = machine(tmp_path, 8 * 1024 * 1024, "/system.slice/switchgear.service")
    assert available_bytes(root) == 8 * 1024 * MIB
    limit(root, "/system.slice", str(3000), 1000)
    limit(root, "/system.slice/switchgear.service", "max", 500)
    assert available_bytes(root) == 2000
    limit(root, "/system.slice/switchgear.service", "600", 500)
    assert available_bytes(root) == 100
    # Over its limit: nothing is left, not less than nothing.
    limit(root, "/system.slice/switchgear.service", "400", 500)
    assert available_bytes(root) == 0


def test_nothing_tells(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 0


@pytest.mark.parametrize(
    ("available", "size"),
    [(8192, 1024), (6144, 1024), (6143, 512), (2048, 256), (100, 16), (0, 16)],
)
def test_largest_size(available: int, size: int) -> None:
    found = largest_size(1024 * MIB, 3, available * MIB, 16 * MIB)
    assert found == size * MIB
