"""The simulated device: heat, the firmware's governor, sensors, background load and faults.

Everything random comes from the seed, from a stream of its own for each cause, so that every
policy meets the same noise, the same faults and the same background.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Final

from switchgear.daemon.simulation.thermal import Network

if TYPE_CHECKING:
    from collections.abc import Mapping

    from switchgear.daemon.simulation.scenario import Scenario, Sensor

# Heat, governor and sensors go in steps of this; the fastest thermal time constant of the
# scenarios is seconds.
TICK_S: Final = 0.1
# Of the scenario format: power falls by this power of the clock.
POWER_EXPONENT: Final = 2.4
SKIN: Final = "skin"
# How long a sensor is gone at one `sensor_lost`. Ours: long enough for every stage of the
# protocol's answer to it.
SENSOR_LOST_S: Final = 600.0


class Device:
    """The hardware. `tick` moves it on; `clocks`, `readings`, `temperatures_c` tell its state.

    A reading is None while its sensor is lost.
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario = scenario
        self._network = Network(
            scenario.nodes, scenario.ambient_c, TICK_S, start_c=scenario.start_c
        )
        self.names: Final = self._network.names
        self._index = {name: at for at, name in enumerate(self.names)}
        self.blocks: Final = tuple(
            dict.fromkeys(backend.device for backend in scenario.backends.values())
        )
        governed = dict.fromkeys((*self.blocks, *scenario.background))
        self._steps = dict.fromkeys(governed, 0)
        self.clocks: dict[str, float] = dict.fromkeys(governed, 1.0)
        self._govern_at_s = scenario.governor.step_s
        self._sensors = [
            _SimulatedSensor(name, sensor, self._index[sensor.node], scenario.start_c, seed)
            for name, sensor in scenario.sensors.items()
        ]
        self.readings: dict[str, float | None] = {}
        self._read(0.0)
        self._jitter = {
            name: random.Random(f"{seed}:jitter:{name}")  # noqa: S311
            for name in scenario.backends
        }
        self._energy_j = 0.0

    @property
    def temperatures_c(self) -> Mapping[str, float]:
        return dict(zip(self.names, self._network.temperatures_c, strict=True))

    @property
    def energy_j(self) -> float:
        """What the blocks have drawn so far, the background's share left out."""
        return self._energy_j

    def frame_ms(self, backend: str) -> float:
        """Draws the time of one run at the present clock."""
        model = self._scenario.backends[backend]
        factor = math.exp(self._jitter[backend].gauss(0.0, model.jitter))
        return model.frame_ms * factor / self.clocks[model.device]

    def busy_w(self, backend: str) -> float:
        """The power of a run at the present clock."""
        model = self._scenario.backends[backend]
        return float(model.busy_w * self.clocks[model.device] ** POWER_EXPONENT)

    def tick(
        self, now_s: float, busy_j: Mapping[str, float], busy_s: Mapping[str, float]
    ) -> None:
        """The step that ends at `now_s`: energy and busy time of each block in it."""
        powers = [0.0] * len(self.names)
        for name, idle_w in self._scenario.idle_w.items():
            own_j = busy_j.get(name, 0.0) + idle_w * (TICK_S - busy_s.get(name, 0.0))
            self._energy_j += own_j
            powers[self._index[name]] += own_j / TICK_S

        for name, load in self._scenario.background.items():
            if (now_s - TICK_S / 2) % (load.on_s + load.off_s) < load.on_s:
                watts = load.busy_w * self.clocks[name] ** POWER_EXPONENT
                powers[self._index[name]] += watts

        self._network.step(powers)
        if now_s + TICK_S / 2 >= self._govern_at_s:
            self._govern_at_s += self._scenario.governor.step_s
            self._govern()

        self._read(now_s)

    def lose_sensor(self, name: str, now_s: float) -> None:
        for sensor in self._sensors:
            if sensor.name == name:
                sensor.lost_until_s = now_s + SENSOR_LOST_S

    def _govern(self) -> None:
        governor = self._scenario.governor
        temperatures = self._network.temperatures_c
        skin_c = temperatures[self._index[SKIN]] if SKIN in self._index else -math.inf
        for name, step in self._steps.items():
            own_c = temperatures[self._index[name]]
            if own_c > governor.block_limit_c or skin_c > governor.skin_limit_c:
                step = min(step + 1, len(governor.clocks) - 1)
            elif (
                own_c < governor.block_limit_c - governor.hysteresis_c
                and skin_c < governor.skin_limit_c - governor.hysteresis_c
            ):
                step = max(step - 1, 0)

            self._steps[name] = step
            self.clocks[name] = governor.clocks[step]

    def _read(self, now_s: float) -> None:
        temperatures = self._network.temperatures_c
        for sensor in self._sensors:
            self.readings[sensor.name] = sensor.read(temperatures, now_s)


class _SimulatedSensor:
    """A first-order lag, then noise, then steps."""

    def __init__(self, name: str, sensor: Sensor, node: int, start_c: float, seed: int) -> None:
        self.name = name
        self.lost_until_s = -math.inf
        self._node = node
        self._sensor = sensor
        self._lagged_c = start_c
        self._follow = 1.0 - math.exp(-TICK_S / sensor.lag_s) if sensor.lag_s else 1.0
        self._noise = random.Random(f"{seed}:noise:{name}")  # noqa: S311

    def read(self, temperatures_c: list[float], now_s: float) -> float | None:
        self._lagged_c += (temperatures_c[self._node] - self._lagged_c) * self._follow
        noisy_c = self._lagged_c + self._noise.gauss(0.0, self._sensor.noise_c)
        if now_s < self.lost_until_s:
            return None

        quantum_c = self._sensor.quantum_c
        return round(noisy_c / quantum_c) * quantum_c if quantum_c else noisy_c
