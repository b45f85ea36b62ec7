"""A configuration whose NPU is the test delegate, with a zone and a pace that a test sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import native_build
from replaced_file import replace_file

if TYPE_CHECKING:
    from pathlib import Path

    from switchgear.client import Client


class Rig:
    """Files in `folder`; `config` is for a daemon, which needs SWITCHGEAR_PREPARE__ENABLED."""

    def __init__(self, folder: Path) -> None:
        zone = folder / "sys" / "class" / "thermal" / "thermal_zone0"
        zone.mkdir(parents=True)
        (zone / "type").write_text("npu-thermal\n")
        self._zone = zone / "temp"
        self._latency = folder / "latency"
        self.temperature(40.0)
        self.pace(0)
        self.config = f"""
[fingerprint]
thresholds_c = {{ npu = 65.0 }}
[thermal]
sysfs_root = "{folder / "sys"}"
[prepare]
backends = ["npu"]
[routing]
policy = "prefer_npu"
[npu]
delegate = "{native_build.delegate()}"
[npu.delegate_options]
latency_file = "{self._latency}"
"""

    def temperature(self, celsius: float) -> None:
        replace_file(self._zone, b"%.0f\n" % (celsius * 1000))

    def pace(self, latency_us: int) -> None:
        replace_file(self._latency, b"%d\n" % latency_us)


def wait_for_device(client: Client, name: str) -> dict[str, Any]:
    """The device's row of the status, once it has one."""
    while True:
        for device in client.status()["devices"]:
            if device["name"] == name:
                return device


def wait_for_reading(client: Client, name: str, kind: str) -> dict[str, Any]:
    """The device's row, once its reading is of this kind: one that comes late is held."""
    while (device := wait_for_device(client, name))["reading"] != kind:
        pass

    return device


def wait_for_temperature(client: Client, celsius: float, *, falling: bool = False) -> None:
    """Until the daemon's filtered reading is past this. It may be past already: from which side
    it comes is the caller's to know."""
    while (wait_for_device(client, "npu").get("temperature_c", 0.0) < celsius) is not falling:
        pass
