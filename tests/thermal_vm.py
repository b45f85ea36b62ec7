"""`./dev vm`: the service in a guest with real kernel thermal zones and enforced cgroup limits.

The host writes the zones' temperatures into the guest's memory. It prints what was seen, and
ends with status 1 where something was not as it must be: a step that could not be taken to its
end counts as that. Needs root for the image's owners, and the PROGRAMS below.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import vm_image
import vm_limits
from vm_machine import Guest, GuestError
from vm_report import Report
from vm_service import SERVICE, App, Service, until

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAMS: Final = {
    "qemu-system-x86_64": "qemu-system-x86",
    "iasl": "acpica-tools",
    "mmdebstrap": "mmdebstrap",
    "cpio": "cpio",
    "cc": "gcc libc6-dev",
}
# A run of the tests' NPU while it is cool, and 1.8 times that: throttled phones are 1.6 to 2.3
# times slower.
COOL_PACE_US: Final = 20_000
HOT_PACE_US: Final = 36_000
LEARNED_FRAMES: Final = 130
# Of the hold of 120 s, its jitter is 10 %.
HOLD_S: Final = (108.0, 140.0)
RECOVERY_LIMIT_S: Final = 400.0


def zones(guest: Guest, report: Report) -> None:
    names = guest.ask("read", pattern="/sys/class/thermal/thermal_zone*/type")
    report.check(names == ["CPUZ", "GPUZ", "NPUZ"], f"zones of the kernel: {', '.join(names)}")
    trips = guest.ask("read", pattern="/sys/class/thermal/thermal_zone2/trip_point_*_temp")
    kinds = guest.ask("read", pattern="/sys/class/thermal/thermal_zone2/trip_point_*_type")
    passive_c = dict(zip(kinds, (int(trip) / 1000 for trip in trips), strict=True))["passive"]
    report.check(abs(passive_c - 65) < 0.2, f"the NPU's own trip point: {passive_c:g} C")
    for cpu, gpu, npu in ((40, 40, 40), (55, 50, 45), (40, 40, 40)):
        guest.heat(cpu=cpu, gpu=gpu, npu=npu)
        texts = guest.ask("read", pattern="/sys/class/thermal/thermal_zone*/temp")
        told = [int(text) / 1000 for text in texts]
        follows = all(abs(a - b) < 0.2 for a, b in zip(told, (cpu, gpu, npu), strict=True))
        report.check(follows, f"heated to {cpu}, {gpu}, {npu} C, they read {told}")


def install(service: Service, report: Report) -> None:
    guest = service.guest
    service.install(COOL_PACE_US)
    changed = service.show("DropInPaths")
    report.check(not changed, f"the unit as it ships, nothing overrides it {changed}")
    begin_s = guest.up_s
    guest.run("systemctl", "start", SERVICE)
    took_s = guest.up_s - begin_s
    told = service.show("StatusText")
    report.check(took_s < 60, f"started and ready in {took_s:.1f} s: {told}")
    report.check(service.show("NRestarts") == "0", "at the first try")


def takes_over(service: Service, app: App, report: Report) -> None:
    """The CPU serves from the first frame, the NPU once it has been prepared behind it."""
    begin_s = service.guest.up_s
    app.open(backends=["npu", "cpu"], policy="min_power")
    first = app.frames(1, deadline_ms=None)
    report.check(app.only(first, "cpu"), f"the first frame: {first['ran']}")
    app.frames(600, pause_s=0.2, until="npu", limit_s=120)
    took_s = service.guest.up_s - begin_s
    learned = app.frames(LEARNED_FRAMES, pause_s=0.02)
    report.check(
        app.only(learned, "npu"),
        f"the NPU took over {took_s:.1f} s after the first client came: {learned['ran']},"
        f" {learned['run_ms']:.1f} ms a frame",
    )
    npu = service.device("npu")
    report.check(
        npu["zones"] == ["NPUZ"]
        and npu["limit_source"] == "kernel_passive_trip"
        and abs(npu["trip_c"] - 65) < 0.2,
        f"the daemon's NPU: zone {npu['zones']}, trips at {npu['trip_c']} C by"
        f" {npu['limit_source']}, recovers at {npu['recover_c']} C",
    )


def sheds(service: Service, app: App, report: Report) -> None:
    """A temperature that rises towards the trip: load moves before a frame is slow."""
    for degrees in (46, 50, 54, 58, 61, 63):
        service.guest.heat(npu=degrees)
        app.frames(15, pause_s=0.1)

    begun = [event for event in service.transitions("npu") if event["after"] == "shedding"]
    report.check(
        len(begun) == 1 and begun[0]["temperature_c"] < 65,
        f"sheds: {[(event['reason'], event['temperature_c']) for event in begun]}",
    )
    seen = app.frames(10, pause_s=0.1)
    report.check(
        app.only(seen, "cpu"), f"below the trip, at 63 C, the app has moved: {seen['ran']}"
    )


def trips(service: Service, app: App, report: Report) -> None:
    """Three slow frames above the trip. An app that takes nothing but the NPU sends them: it is
    the last place for it, and stays one."""
    guest = service.guest
    service.pace(HOT_PACE_US)
    guest.heat(npu=70)
    hot = until(lambda: (service.device("npu").get("temperature_c") or 0) > 69, guest)
    report.check(hot < 20, f"the daemon tells 70 C after {hot:.1f} s")
    only = App(guest, "only")
    only.open(backends=["npu"], strict=True)
    slow = only.frames(15, pause_s=0.1)
    report.check(
        only.only(slow, "npu"),
        f"a strict app stays on the hot NPU: {slow['ran']}, {slow['run_ms']:.1f} ms a frame",
    )
    opened = [event for event in service.transitions("npu") if event["after"] == "open"]
    report.check(
        len(opened) == 1 and opened[0]["temperature_c"] > 65,
        f"tripped: {[(event['reason'], event['temperature_c']) for event in opened]}",
    )
    state = service.device("npu")["state"]
    report.check(state == "tripped", f"for people it is {state}")
    seen = app.frames(20, pause_s=0.1)
    report.check(app.only(seen, "cpu"), f"the other app is served elsewhere: {seen['ran']}")
    only.close()


def recovers(service: Service, app: App, report: Report) -> None:
    """Cool again: the hold, probes, a ramp, and all frames."""
    guest = service.guest
    service.pace(COOL_PACE_US)
    for degrees in (64, 58, 50, 44, 40):
        guest.heat(npu=degrees)
        app.frames(5, pause_s=0.3)

    begin_s = guest.up_s
    ramp: list[str] = []
    phases: list[str] = []
    while "closed" not in phases and guest.up_s - begin_s < RECOVERY_LIMIT_S:
        seen = app.frames(15, pause_s=0.3)
        phases = service.phases_since_trip("npu")
        if phases[-1:] == ["ramping"]:
            npu = sum(count for place, count in seen["ran"] if place == "npu")
            ramp.append(f"{npu}/15")

    wanted = ["half_open", "ramping", "closed"]
    report.check(phases == wanted, f"from tripped to normal: {', '.join(phases)}")
    at = {event["after"]: event["at"] for event in service.transitions("npu")}
    held_s = at.get("half_open", 0.0) - at.get("open", 0.0)
    report.check(HOLD_S[0] <= held_s <= HOLD_S[1], f"probed {held_s:.0f} s after the trip")
    report.check(
        len(set(ramp)) > 1, f"the NPU's share of the frames meanwhile: {', '.join(ramp)}"
    )
    seen = app.frames(30, pause_s=0.02)
    report.check(app.only(seen, "npu"), f"all frames are on the NPU again: {seen['ran']}")


def hot_cpu(service: Service, report: Report) -> None:
    """At the CPU's own trip lower priorities wait, and nobody else."""
    guest = service.guest
    batch, normal = App(guest, "batch"), App(guest, "cpu")
    batch.open(backends=["cpu"], strict=True, priority="batch")
    normal.open(backends=["cpu"], strict=True)
    cool = batch.frames(5, deadline_ms=None)
    report.check(batch.only(cool, "cpu"), f"cool, a batch app is served: {cool['ran']}")
    guest.heat(cpu=90)
    until(lambda: service.device("cpu")["state"] == "shedding", guest)
    seen, others = batch.frames(10, pause_s=0.1), normal.frames(10, pause_s=0.1)
    report.check(
        [place for place, _ in seen["ran"]] == ["NoBackend"],
        f"at 90 C it is told to wait: {seen['ran']} {seen['told']}",
    )
    report.check(
        normal.only(others, "cpu"), f"one of normal priority is served: {others['ran']}"
    )
    guest.heat(cpu=40)
    took_s = until(lambda: service.device("cpu")["state"] == "normal", guest)
    seen = batch.frames(10, pause_s=0.1)
    report.check(
        batch.only(seen, "cpu"), f"cool again after {took_s:.1f} s, batch too: {seen['ran']}"
    )
    batch.close()
    normal.close()


def stop(service: Service, app: App, report: Report) -> None:
    guest = service.guest
    report.check(
        app.lost == 0 and app.total > 0,
        f"of {app.total} frames of the app none was lost, late or wrong"
        f" (outputs differ by {app.worst:.1e} at most)",
    )
    begin_s = guest.up_s
    guest.run("systemctl", "stop", SERVICE)
    took_s = guest.up_s - begin_s
    result, restarts = service.show("Result"), service.show("NRestarts")
    report.check(
        result == "success" and restarts == "0",
        f"stopped in {took_s:.1f} s with the app connected: {result}, {restarts} restarts",
    )


def run(guest: Guest, report: Report) -> None:
    """Every step in its order; each needs those before it."""
    service, app = Service(guest), App(guest, "app")
    steps: dict[str, Callable[[], None]] = {
        "thermal zones": lambda: zones(guest, report),
        "install and start": lambda: install(service, report),
        "an app, the CPU first": lambda: takes_over(service, app, report),
        "devices": lambda: vm_limits.devices(service, report),
        "MemoryMax": lambda: vm_limits.memory(service, app, report),
        "TasksMax": lambda: vm_limits.tasks(service, app, report),
        "CPUQuota": lambda: vm_limits.quota(service, report),
        "the NPU warms": lambda: sheds(service, app, report),
        "the NPU is hot and slow": lambda: trips(service, app, report),
        "the NPU cools": lambda: recovers(service, app, report),
        "the CPU is hot": lambda: hot_cpu(service, report),
        "stop": lambda: stop(service, app, report),
    }
    for name, step in steps.items():
        report.begin(name, guest.up_s)
        step()


def main() -> int:
    lacking = [package for program, package in PROGRAMS.items() if not shutil.which(program)]
    if lacking:
        print(f"missing: apt-get install --no-install-recommends {' '.join(lacking)}")
        return 2

    begin = time.monotonic()
    debian = vm_image.debian_root()
    report = Report()
    with tempfile.TemporaryDirectory(prefix="vm-") as name:
        initramfs = Path(name) / "root.cpio"
        vm_image.initramfs(debian, initramfs)
        with Guest(vm_image.kernel(debian), initramfs) as guest:
            try:
                guest.await_boot()
                release = guest.run("uname", "-r")
                version = guest.run("systemctl", "--version").split("\n")[0]
                report.begin("boot", 0.0)
                state = guest.run("systemctl", "is-system-running", "--wait", check=False)
                report.check(state == "running", f"{release}, {version}: {state}")
                run(guest, report)
            except (GuestError, TimeoutError) as error:
                report.check(False, f"not to its end: {error}")

            report.end(guest, time.monotonic() - begin)

    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
