"""A small machine for the protocol's tests: a GPU with two APIs, an NPU, the CPU, and time."""

from __future__ import annotations

from collections.abc import Iterable

from switchgear.daemon.protocol.answers import Event, Probe
from switchgear.daemon.protocol.constants import Constants
from switchgear.daemon.protocol.machine import Protocol
from switchgear.daemon.protocol.reading import Reading
from switchgear.daemon.protocol.topology import Device, PairKey, SessionLimits, Target, Topology

BACKENDS = {"vulkan": "gpu", "opencl": "gpu", "npu": "npu", "cpu": "cpu"}
GPU = Target("device", "gpu")
NPU = Target("device", "npu")
VULKAN = Target("backend", "vulkan")


def topology(backends: Iterable[str] = BACKENDS, **limits: int) -> Topology:
    """Devices `gpu`, `npu` and `cpu`, those that a backend of `backends` is on."""
    chosen = {backend: BACKENDS[backend] for backend in backends}
    devices = {
        name: Device(name, is_cpu=name == "cpu", **limits)
        for name in dict.fromkeys(chosen.values())
    }
    return Topology(devices, chosen)


def pair(backend: str, model: str = "m", precision: str = "fp16") -> PairKey:
    return PairKey(model, backend, precision)


def int4(model: str = "m") -> PairKey:
    return PairKey(model, "opencl", "int4")


class Bench:
    """A protocol and its clock. While `run` lets time pass, probes end as `good_probes` says.

    Temperatures are degrees Celsius, set by device and told at every step.
    """

    def __init__(
        self,
        *,
        mode: str = "default",
        constants: Constants | None = None,
        backends: Iterable[str] = BACKENDS,
        models: Iterable[str] = ("m",),
        seed: int = 1,
        dry_run: bool = False,
    ) -> None:
        names = tuple(backends)
        self.protocol = Protocol(
            constants,
            topology(names),
            seed,
            mode="report" if mode == "report" else "default",
            dry_run=dry_run,
        )
        self.now_s = 1000.0
        self.temperatures_c: dict[str, float | None] = {}
        self.good_probes: bool | None = True
        self.answers = True
        self.probes: list[Probe] = []
        self.told: list[Event] = []
        for model in models:
            for backend in names:
                self.protocol.add_pair(pair(backend, model))

    def heat(self, **temperatures_c: float | None) -> None:
        """Sets temperatures and tells them; None is a failed read."""
        self.temperatures_c.update(temperatures_c)
        for device in temperatures_c:
            self._read(device)

    def _read(self, device: str) -> None:
        celsius = self.temperatures_c[device]
        reading = Reading(None, "lost") if celsius is None else Reading(round(celsius * 1000))
        self.protocol.reading(device, reading, self.now_s)

    def run(self, seconds: float, step_s: float = 0.5) -> None:
        """Lets time pass with readings and ticks; probes are answered at once."""
        steps = round(seconds / step_s)
        for _ in range(steps):
            self.now_s += step_s
            for device in self.temperatures_c:
                self._read(device)

            for probe in self.protocol.tick(self.now_s):
                self.probes.append(probe)
                if self.answers:
                    self.protocol.probe_result(
                        probe.target, probe.lease, self.good_probes, self.now_s
                    )

    def frames(
        self,
        key: PairKey,
        run_ms: float,
        count: int = 1,
        *,
        period_s: float = 0.2,
        first_use: bool = False,
        limits: SessionLimits | None = None,
    ) -> None:
        """Frames that end one after another, with a reading before each."""
        for _ in range(count):
            self.now_s += period_s
            for device in self.temperatures_c:
                self._read(device)

            self.protocol.frame(
                key, run_ms, self.now_s, first_use=first_use, session_limits=limits
            )

    def learn(self, key: PairKey, run_ms: float) -> None:
        """As many cool frames as a pair's own limits take."""
        self.frames(key, run_ms, 100, period_s=0.05)

    def allowed(self, key: PairKey, session: int = 0) -> bool:
        return self.protocol.admit(key, self.now_s, session=session).allowed

    def phase(self, device: str) -> str:
        return self.protocol.device_state(device).breaker.phase

    def run_until(self, phase: str, limit_s: float = 4000.0) -> None:
        """Lets time pass until the GPU is in a phase."""
        end_s = self.now_s + limit_s
        while self.phase("gpu") != phase:
            assert self.now_s < end_s, f"the GPU is {self.phase('gpu')} for ever"
            self.run(0.5)

    def events(self) -> list[Event]:
        """The events since the last call; all of them are in `told`."""
        found = self.protocol.events()
        self.told += found
        return found

    def trip(self, key: PairKey | None = None, celsius: float = 70.0, ms: float = 500) -> None:
        """Three slow frames on a hot GPU."""
        self.heat(gpu=celsius)
        self.frames(key or pair("vulkan"), ms, 3)
