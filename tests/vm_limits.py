"""Steps of `thermal_vm.py`: limits of the service's unit that the kernel enforces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vm_service import GROUP, App, until

if TYPE_CHECKING:
    from vm_report import Report
    from vm_service import Service

QUOTA: Final = 0.1
WIDE: Final = "/opt/models/wide.tflite"
# Half of what the wide model needs: its worker has to go, and all others have room.
SHORT_BYTES: Final = 64 << 20
# A device that no NPU needs, that root may read, and that is always there.
OTHER_DEVICE: Final = "/dev/kmsg"


def devices(service: Service, report: Report) -> None:
    """A node that the unit does not name cannot be opened within the service's group."""
    guest = service.guest
    open_it = f"exec 3<{OTHER_DEVICE}"
    free = guest.ask("run", command=["sh", "-c", open_it])
    enter = f"echo 0 >{GROUP}/cgroup.procs"
    closed = guest.ask("run", command=["sh", "-c", f"{enter} && echo in && {open_it}"])
    report.check(
        free["status"] == 0 and closed["stdout"] == "in\n" and closed["status"] != 0,
        f"DevicePolicy=closed: {OTHER_DEVICE} opens outside of the service's group;"
        f" in it: {closed['stderr'].strip()}",
    )


def quota(service: Service, report: Report) -> None:
    """With a tenth of a processor it serves on, slower; the watchdog does not end it."""
    before = service.identity()
    busy = App(service.guest, "busy")
    busy.open(backends=["cpu"], strict=True)

    def share(limit_s: float) -> tuple[float, float]:
        used = service.group_table("cpu.stat")["usage_usec"]
        seen = busy.frames(1_000_000, limit_s=limit_s, deadline_ms=None)
        used = service.group_table("cpu.stat")["usage_usec"] - used
        report.check(busy.only(seen, "cpu"), f"{seen['ran'][0][1]} frames in {limit_s:g} s")
        return used / 1e6 / seen["took_s"], seen["ran"][0][1] / seen["took_s"]

    free, free_rate = share(1.0)
    service.set(f"CPUQuota={QUOTA:.0%}")
    held, held_rate = share(5.0)
    throttled = service.group_table("cpu.stat")["nr_throttled"]
    service.set("CPUQuota=")
    report.check(
        free > 1.5 * QUOTA and held < 1.15 * QUOTA and throttled > 0,
        f"CPUQuota={QUOTA:.0%}: {free:.0%} of a processor before, {held:.1%} with it,"
        f" {throttled} periods throttled; {free_rate:.0f} and {held_rate:.0f} frames a second",
    )
    report.check(service.identity() == before, "the service is the same process as before")
    busy.close()


def tasks(service: Service, app: App, report: Report) -> None:
    """A worker that ended cannot be started again: its requests run elsewhere meanwhile."""
    before = service.identity()
    (worker,) = service.workers("npu", "device")
    service.set(f"TasksMax={int(service.group('pids.current')) - 1}")
    refused = service.group_table("pids.events")["max"]
    service.guest.run("sh", "-c", f"kill -9 {worker['pid']}")
    seen = app.frames(30, pause_s=0.1)
    (worker,) = service.workers("npu", "device")
    refused = service.group_table("pids.events")["max"] - refused
    report.check(
        refused > 0 and not worker["pid"],
        f"TasksMax=: refused {refused} times; the NPU's worker: {worker['last_end']}",
    )
    report.check(app.only(seen, "cpu"), f"the app's frames meanwhile: {seen['ran']}")
    service.set("TasksMax=infinity")
    begin_s = service.guest.up_s
    app.frames(600, pause_s=0.2, until="npu", limit_s=120)
    seen = app.frames(10, pause_s=0.02)
    report.check(
        app.only(seen, "npu"),
        f"without the limit the NPU is back after {service.guest.up_s - begin_s:.1f} s",
    )
    report.check(service.identity() == before, "the service is the same process as before")


def memory(service: Service, app: App, report: Report) -> None:
    """The kernel kills a worker that outgrows the service's memory, and nothing else."""
    guest = service.guest
    before = service.identity()
    guest.ask("load", path=WIDE, name="wide")
    # What tries it on the NPU needs as much memory, and has to be through.
    refused_s = until(
        lambda: guest.ask("pair", model="wide")[0]["state"] == "unsupported", guest, 120.0
    )
    rest_s = until(service.is_at_rest, guest, 120.0)
    report.check(max(refused_s, rest_s) < 120, f"at rest after {refused_s + rest_s:.1f} s")
    wide = App(guest, "wide", "wide")
    wide.open(backends=["cpu"])
    seen = wide.frames(2, deadline_ms=None)
    report.check(wide.only(seen, "cpu"), f"a model of 128 MiB runs: {seen['ran']}")
    used = int(service.group("memory.current"))
    limit = used - SHORT_BYTES
    service.set(f"MemoryMax={limit}", "MemorySwapMax=0")
    seen = wide.frames(1, deadline_ms=None)
    killed = service.group_table("memory.events")["oom_kill"]
    report.check(
        killed > 0 and wide.lost == 1,
        f"MemoryMax={limit >> 20}M, {used >> 20}M used: the kernel killed {killed} workers;"
        f" the app was told {seen['ran'][0][0]}: {seen['told']}",
    )
    others = app.frames(10, pause_s=0.1)
    report.check(app.only(others, "npu"), f"the other app's frames: {others['ran']}")
    report.check(service.identity() == before, "the service is the same process as before")
    service.set("MemoryMax=infinity")
    seen = wide.frames(3, pause_s=0.5, deadline_ms=None)
    report.check(wide.only(seen, "cpu"), f"with its memory back the model runs: {seen['ran']}")
    wide.close()
