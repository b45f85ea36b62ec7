"""Many devices drawn around one: the values of a scenario times random factors.

The file says which values (`scenarios/random.toml`), relative to `phone.toml` beside it.
"""

from __future__ import annotations

import fnmatch
import math
import random
from typing import TYPE_CHECKING, Any, Final

from switchgear.daemon.simulation.scenario import (
    SCENARIOS,
    Scenario,
    read_table,
    scenario_of,
)
from switchgear.ipc.errors import BadConfiguration

if TYPE_CHECKING:
    from pathlib import Path

# A device without this backend lacks these too: they are one driver.
_TOGETHER: Final = {"opencl": ("opencl", "opencl_int4")}
_KEYS: Final = frozenset({"seed", "count", "factor", "uniform", "absent", "faults"})


def is_random(table: dict[str, Any]) -> bool:
    """Whether a file describes random devices and not one device."""
    return "factor" in table or "count" in table


def random_devices(
    path: Path, seed: int | None = None, count: int | None = None
) -> list[Scenario]:
    """The devices of a file; the first ones of more stay the same for the same seed.

    :raises BadConfiguration: the file does not hold together.
    """
    table = read_table(path)
    unknown = set(table) - _KEYS
    if unknown:
        raise BadConfiguration(f"{path.stem}: unknown key {min(unknown)!r}")

    try:
        draw = random.Random(int(table["seed"]) if seed is None else seed)  # noqa: S311
        number = int(table["count"]) if count is None else count
        base = read_table(SCENARIOS / "phone.toml")
        return [
            scenario_of(_one(base, table, draw), f"{path.stem}-{at:03d}")
            for at in range(number)
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadConfiguration(f"{path.stem}: {error!r}") from None


def _one(base: dict[str, Any], table: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    flat = _flat(base, "")
    for key, value in flat.items():
        for pattern, (low, high) in table["factor"].items():
            if _matches(key, pattern):
                flat[key] = value * math.exp(draw.uniform(math.log(low), math.log(high)))

    for key, (low, high) in table["uniform"].items():
        if key not in flat:
            raise ValueError(f"no value {key}")

        flat[key] = draw.uniform(low, high)

    for name, probability in table["absent"].items():
        missing = draw.random() < probability
        gone = _gone(name)
        if missing:
            flat = {key: value for key, value in flat.items() if not key.startswith(gone)}

    for name, per_hour in table["faults"].items():
        flat[f"faults.{name}"] = per_hour

    return _nested(flat)


def _matches(key: str, pattern: str) -> bool:
    """`nodes.*.c` fits `nodes.gpu.c`: a star stands for one part, or for a part's end."""
    parts = key.split(".")
    wanted = pattern.split(".")
    return len(parts) == len(wanted) and all(
        fnmatch.fnmatchcase(part, want) for part, want in zip(parts, wanted, strict=True)
    )


def _gone(name: str) -> tuple[str, ...]:
    if "." in name:
        return (f"{name}.",)

    return tuple(f"backends.{one}." for one in _TOGETHER.get(name, (name,)))


def _flat(table: dict[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value

    return found


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in flat.items():
        *above, last = key.split(".")
        part = table
        for name in above:
            part = part.setdefault(name, {})

        part[last] = value

    return table
