"""How much memory a test may take."""

from __future__ import annotations

from pathlib import Path

MIB = 2**20


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that can be had without swapping: the machine's and the control groups' least.

    0 where nothing tells. `root` is where /proc and /sys stand, for tests.
    """
    limits = [_machine(root), *_control_groups(root)]
    return min((limit for limit in limits if limit is not None), default=0)


def largest_size(most_bytes: int, copies: int, available: int, least_bytes: int) -> int:
    """The largest halving of `most_bytes` of which `copies` take at most half of `available`.

    At least `least_bytes`, which is assumed to fit.
    """
    size = most_bytes
    while size > least_bytes and size * copies > available // 2:
        size //= 2

    return max(size, least_bytes)


def _machine(root: Path) -> int | None:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None

    return None


def _control_groups(root: Path) -> list[int]:
    """What each control group (version 2) above this process leaves."""
    mount = root / "sys/fs/cgroup"
    try:
        own = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []

    path = next((line[3:].strip("/") for line in own if line.startswith("0::")), None)
    if path is None:
        return []

    left = []
    group = mount / path
    while True:
        try:
            limit = int((group / "memory.max").read_text())
            left.append(max(0, limit - int((group / "memory.current").read_text())))
        except (OSError, ValueError):
            # No limit here ("max"), or no memory controller.
            pass

        if group == mount or mount not in group.parents:
            return left

        group = group.parent
