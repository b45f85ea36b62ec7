"""A scenario: one device and its surroundings, read from TOML with strict checks.

The files beside this module are the format's reference (`scenarios/phone.toml`). Names carry
their units: `_c` degrees Celsius, `_w` watts, `_s` seconds, `_ms` milliseconds.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from switchgear.ipc.errors import BadConfiguration

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SCENARIOS: Final = Path(__file__).parent / "scenarios"
AMBIENT: Final = "ambient"
# Backends whose name says which record number and precision they have.
BACKENDS: Final = ("vulkan", "opencl", "opencl_int4", "npu", "cpu")
FAULTS: Final = ("npu_unsupported", "vulkan_device_lost", "npu_hang", "sensor_lost")
# A camera's rate, and double buffering.
DEFAULT_FPS: Final = 30.0
DEFAULT_SLOTS: Final = 2
_COUPLING: Final = "r_to_"


@dataclass(frozen=True, slots=True)
class Node:
    """A thermal mass: `c_j_k` J/K, coupled to `to` by `r_k_w` K/W."""

    c_j_k: float
    to: str
    r_k_w: float


@dataclass(frozen=True, slots=True)
class Sensor:
    """What can be read of a node: lagging by `lag_s`, with noise, in steps of `quantum_c`."""

    node: str
    noise_c: float
    lag_s: float
    quantum_c: float


@dataclass(frozen=True, slots=True)
class Governor:
    """Firmware that steps the clock of a block down while its node or the skin is over a limit,
    and up again below the limit minus the hysteresis, once in `step_s`."""

    block_limit_c: float
    skin_limit_c: float
    hysteresis_c: float
    step_s: float
    clocks: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BackendModel:
    """One way to run the model: median time of a frame at full clock, standard deviation of its
    logarithm, power while it runs."""

    device: str
    frame_ms: float
    jitter: float
    busy_w: float


@dataclass(frozen=True, slots=True)
class Background:
    """Another app's load on a block: on for `on_s`, then off for `off_s`."""

    busy_w: float
    on_s: float
    off_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """The field report's numbers for this device and model."""

    trip_c: float
    recover_c: float
    slow_ms: float
    recover_ms: float


@dataclass(frozen=True, slots=True)
class Load:
    """What the app offers: `fps` frames a second, or with 0 the next one at each answer.

    `slots` is the most frames it has in flight; the newest replaces the oldest waiting one.
    """

    fps: float = DEFAULT_FPS
    slots: int = DEFAULT_SLOTS


@dataclass(frozen=True, slots=True)
class Scenario:
    """A device with its load. `start_c` is the temperature of all its nodes at the start."""

    name: str
    ambient_c: float
    start_c: float
    duration_s: float
    nodes: Mapping[str, Node]
    sensors: Mapping[str, Sensor]
    governor: Governor
    backends: Mapping[str, BackendModel]
    idle_w: Mapping[str, float]
    background: Mapping[str, Background]
    limits: Limits
    faults_per_h: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    load: Load = Load()


def read_scenario(name_or_path: str) -> Scenario:
    """The scenario of a file, or of a name among those that come with the program.

    :raises BadConfiguration: there is no such file, or what it says does not hold together.
    """
    path = find(name_or_path)
    return scenario_of(read_table(path), path.stem)


def known_scenarios() -> list[str]:
    return sorted(path.stem for path in SCENARIOS.glob("*.toml"))


def find(name_or_path: str) -> Path:
    """:raises BadConfiguration: no file and no scenario has this name."""
    known = known_scenarios()
    if name_or_path in known:
        return SCENARIOS / f"{name_or_path}.toml"

    path = Path(name_or_path)
    if not path.is_file():
        raise BadConfiguration(
            f"no scenario and no file {name_or_path!r}; there is {', '.join(known)}"
        )

    return path


def read_table(path: Path) -> dict[str, Any]:
    """:raises BadConfiguration: the file cannot be read or is no TOML."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadConfiguration(f"{path}: {error}") from None


def scenario_of(table: Mapping[str, Any], name: str) -> Scenario:
    """Checks a scenario's table.

    :raises BadConfiguration: a key is unknown or missing, a value out of its range, or a name
        leads nowhere.
    """
    top = _Table(table, name)
    nodes = {key: _node(part) for key, part in top.tables("nodes")}
    ambient_c = top.number("ambient_c", -60.0, 90.0)
    scenario = Scenario(
        name=name,
        ambient_c=ambient_c,
        start_c=top.number("start_c", -60.0, 120.0, default=ambient_c),
        duration_s=top.number("duration_s", 1.0, 1e6),
        nodes=nodes,
        sensors={key: _sensor(part) for key, part in top.tables("sensors")},
        governor=_governor(top.table("governor")),
        backends={key: _backend(part) for key, part in top.tables("backends")},
        idle_w=top.table("idle_w").numbers(0.0, 1e3),
        background={
            key: _background(part) for key, part in top.tables("background", missing=True)
        },
        limits=_limits(top.table("limits")),
        faults_per_h=top.table("faults", missing=True).numbers(0.0, 3600.0),
        load=_load(top.table("load", missing=True)),
    )
    top.close()
    _check(scenario)
    return scenario


class _Table:
    """A TOML table that is asked for each of its keys; `close` refuses the others."""

    def __init__(self, table: object, where: str) -> None:
        if not isinstance(table, dict):
            raise BadConfiguration(f"{where}: not a table")

        self._left: dict[str, Any] = dict(table)
        self.where: Final = where

    def number(
        self, key: str, least: float, most: float, default: float | None = None
    ) -> float:
        value = self._left.pop(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or not least <= value <= most
        ):
            raise BadConfiguration(
                f"{self.where}.{key}: a number from {least:g} to {most:g}, not {value!r}"
            )

        return float(value)

    def text(self, key: str) -> str:
        value = self._left.pop(key, None)
        if not isinstance(value, str):
            raise BadConfiguration(f"{self.where}.{key}: a name, not {value!r}")

        return value

    def list_of_numbers(self, key: str, least: float, most: float) -> tuple[float, ...]:
        values = self._left.pop(key, None)
        if not isinstance(values, list) or not values:
            raise BadConfiguration(f"{self.where}.{key}: a list of numbers")

        part = _Table(
            {str(at): value for at, value in enumerate(values)}, f"{self.where}.{key}"
        )
        return tuple(part.number(str(at), least, most) for at in range(len(values)))

    def numbers(self, least: float, most: float) -> dict[str, float]:
        return {key: self.number(key, least, most) for key in tuple(self._left)}

    def table(self, key: str, *, missing: bool = False) -> _Table:
        value = self._left.pop(key, {} if missing else None)
        return _Table(value, f"{self.where}.{key}")

    def tables(self, key: str, *, missing: bool = False) -> list[tuple[str, _Table]]:
        part = self.table(key, missing=missing)
        return [(name, part.table(name)) for name in tuple(part._left)]

    def names(self) -> Iterable[str]:
        return tuple(self._left)

    def close(self) -> None:
        if self._left:
            raise BadConfiguration(f"{self.where}: unknown key {min(self._left)!r}")


def _node(part: _Table) -> Node:
    couplings = [key for key in part.names() if key.startswith(_COUPLING)]
    if len(couplings) != 1:
        raise BadConfiguration(f"{part.where}: one {_COUPLING}NODE, not {len(couplings)}")

    node = Node(
        part.number("c", 1e-3, 1e6),
        couplings[0].removeprefix(_COUPLING),
        part.number(couplings[0], 1e-3, 1e4),
    )
    part.close()
    return node


def _sensor(part: _Table) -> Sensor:
    sensor = Sensor(
        part.text("node"),
        part.number("noise_c", 0.0, 20.0),
        part.number("lag_s", 0.0, 600.0),
        part.number("quantum_c", 0.0, 10.0),
    )
    part.close()
    return sensor


def _governor(part: _Table) -> Governor:
    governor = Governor(
        part.number("block_limit_c", 0.0, 150.0),
        part.number("skin_limit_c", 0.0, 150.0),
        part.number("hysteresis_c", 0.0, 50.0),
        part.number("step_s", 0.1, 600.0),
        part.list_of_numbers("clocks", 0.01, 1.0),
    )
    part.close()
    if governor.clocks[0] != 1.0 or any(
        low >= high for high, low in zip(governor.clocks, governor.clocks[1:], strict=False)
    ):
        raise BadConfiguration(f"{part.where}.clocks: from 1.0 downward")

    return governor


def _backend(part: _Table) -> BackendModel:
    backend = BackendModel(
        part.text("device"),
        part.number("frame_ms", 0.01, 1e5),
        part.number("jitter", 0.0, 2.0),
        part.number("busy_w", 0.0, 1e3),
    )
    part.close()
    return backend


def _background(part: _Table) -> Background:
    background = Background(
        part.number("busy_w", 0.0, 1e3),
        part.number("on_s", 0.0, 1e6),
        part.number("off_s", 0.0, 1e6),
    )
    part.close()
    return background


def _limits(part: _Table) -> Limits:
    limits = Limits(
        part.number("trip_c", 0.0, 150.0),
        part.number("recover_c", 0.0, 150.0),
        part.number("slow_ms", 0.01, 1e5),
        part.number("recover_ms", 0.01, 1e5),
    )
    part.close()
    return limits


def _load(part: _Table) -> Load:
    fps = part.number("fps", 0.0, 1e4, default=DEFAULT_FPS)
    slots = part.number("slots", 1, 64, default=DEFAULT_SLOTS)
    part.close()
    return Load(fps, int(slots))


def _check(scenario: Scenario) -> None:
    where = scenario.name
    for name, node in scenario.nodes.items():
        seen = {name}
        to = node.to
        while to != AMBIENT:
            if to in seen or to not in scenario.nodes:
                raise BadConfiguration(
                    f"{where}.nodes.{name}: the way to {AMBIENT} ends at {to!r}"
                )

            seen.add(to)
            to = scenario.nodes[to].to

    blocks = {backend.device for backend in scenario.backends.values()}
    for part, names in (
        ("sensors", {sensor.node for sensor in scenario.sensors.values()}),
        ("backends", blocks),
        ("idle_w", set(scenario.idle_w)),
        ("background", set(scenario.background)),
    ):
        unknown = names - set(scenario.nodes)
        if unknown:
            raise BadConfiguration(f"{where}.{part}: no node {min(unknown)!r}")

    if "cpu" not in scenario.backends:
        raise BadConfiguration(f"{where}.backends: a device has a cpu backend")

    for part, wrong in (
        ("backends", set(scenario.backends) - set(BACKENDS)),
        ("faults", set(scenario.faults_per_h) - set(FAULTS)),
    ):
        if wrong:
            raise BadConfiguration(f"{where}.{part}: unknown name {min(wrong)!r}")

    if scenario.limits.recover_c >= scenario.limits.trip_c:
        raise BadConfiguration(f"{where}.limits: recover_c is below trip_c")
