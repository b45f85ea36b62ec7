"""The service and its apps in the guest of `thermal_vm.py`, as the host sees them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from vm_machine import Guest

SERVICE: Final = "switchgear.service"
GROUP: Final = f"/sys/fs/cgroup/system.slice/{SERVICE}"
PYTHON: Final = "/opt/switchgear/bin/python"
PACE: Final = "/run/vm/pace"
# The tests' external delegate stands for an NPU: it computes, and takes as long as PACE says.
CONFIGURATION: Final = f"""
[[models]]
path = "/opt/models/net.tflite"
name = "net"
[fingerprint]
enabled = false
[prepare]
backends = ["npu"]
[npu]
delegate = "/opt/npu.so"
[npu.delegate_options]
latency_file = "{PACE}"
"""
# Between two backends that compute the same in floats.
TOLERANCE: Final = 1e-4
PLACES: Final = frozenset({"cpu", "npu"})


def until(condition: Callable[[], bool], guest: Guest, limit_s: float = 60.0) -> float:
    """Waits for a condition; the guest's seconds that it took, or infinity."""
    begin_s = guest.up_s
    while (took_s := guest.up_s - begin_s) < limit_s:
        if condition():
            return took_s

        time.sleep(0.2)

    return float("inf")


class Service:
    """The installed service."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest

    def install(self, pace_us: int) -> None:
        """As an integrator does: an environment in /opt, `install-service`, a configuration."""
        guest = self.guest
        guest.run("python3", "-m", "venv", "--without-pip", "/opt/switchgear")
        guest.ask(
            "write",
            path="/opt/switchgear/lib/python3.11/site-packages/paths.pth",
            text="/opt/tree/src\n/opt/packages\n",
        )
        guest.run("mkdir", "-p", "/run/vm", "/etc/switchgear")
        self.pace(pace_us)
        guest.ask("write", path="/etc/switchgear/switchgear.toml", text=CONFIGURATION)
        guest.run(PYTHON, "-m", "switchgear", "install-service")

    def pace(self, latency_us: int) -> None:
        """How long each run of the NPU takes, besides what it computes."""
        self.guest.ask("write", path=PACE, text=f"{latency_us}\n")

    def show(self, name: str) -> str:
        """A property of the unit."""
        return self.guest.run("systemctl", "show", "-P", name, SERVICE)

    def set(self, *settings: str) -> None:
        """Limits of the unit, by a drop-in that lasts until the guest ends."""
        self.guest.run("systemctl", "set-property", "--runtime", SERVICE, *settings)

    def group(self, name: str) -> str:
        """A file of the service's control group."""
        (text,) = self.guest.ask("read", pattern=f"{GROUP}/{name}")
        return str(text)

    def group_table(self, name: str) -> dict[str, int]:
        """A file of the group whose lines are a name and a number."""
        return {key: int(value) for key, value in map(str.split, self.group(name).splitlines())}

    def identity(self) -> tuple[str, str]:
        """Main process and number of restarts: the same while the service is."""
        return self.show("MainPID"), self.show("NRestarts")

    def device(self, name: str) -> dict[str, Any]:
        columns = [
            "name",
            "state",
            "temperature_c",
            "trip_c",
            "recover_c",
            "limit_source",
            "zones",
        ]
        rows = self.guest.ask("status", keys={"devices": columns})["devices"]
        (found,) = [row for row in rows if row["name"] == name]
        return dict(found)

    def workers(self, backend: str, lane: str) -> list[dict[str, Any]]:
        """The apps' workers on a lane, not the service's own."""
        return [
            row
            for row in self._workers()
            if (row["backend"], row["lane"], row["group"]) == (backend, lane, "0")
        ]

    def _workers(self) -> list[dict[str, Any]]:
        columns = ["backend", "lane", "group", "pid", "state", "last_end"]
        rows: list[dict[str, Any]] = self.guest.ask("status", keys={"workers": columns})[
            "workers"
        ]
        return rows

    def is_at_rest(self) -> bool:
        """Whether there are its main process, the sensor reader and workers, and nothing that
        was started for one job."""
        workers = sum(1 for row in self._workers() if row["pid"])
        return len(self.group("cgroup.procs").split()) == 2 + workers

    def transitions(self, device: str) -> list[dict[str, Any]]:
        """What a device went through since the start."""
        events = self.guest.ask("transitions", level="device")
        return [event for event in events if event["target"] == f"device {device}"]

    def phases_since_trip(self, device: str) -> list[str]:
        phases = [event["after"] for event in self.transitions(device)]
        return phases[phases.index("open") + 1 :] if "open" in phases else []


class App:
    """An app in the guest, and what became of its frames."""

    def __init__(self, guest: Guest, name: str, model: str = "net") -> None:
        self._guest = guest
        self._name = name
        self._model = model
        self.total = 0
        self.lost = 0
        self.worst = 0.0

    def open(self, **options: Any) -> None:
        self._guest.ask("open", name=self._name, model=self._model, options=options)

    def close(self) -> None:
        self._guest.ask("close", name=self._name)

    def frames(self, count: int, **options: Any) -> dict[str, Any]:
        """Runs frames; see `vm_guest.App.frames`."""
        seen: dict[str, Any] = self._guest.ask(
            "frames", name=self._name, count=count, **options
        )
        self.total += sum(number for _, number in seen["ran"])
        self.lost += sum(number for place, number in seen["ran"] if place not in PLACES)
        self.worst = max(self.worst, seen["wrong"])
        if seen["wrong"] > TOLERANCE:
            self.lost += 1

        return seen

    @staticmethod
    def only(seen: dict[str, Any], place: str) -> bool:
        """Whether every frame ran in one place, with the right numbers."""
        return [where for where, _ in seen["ran"]] == [place] and seen["wrong"] <= TOLERANCE
