"""`./dev vm`: the service in a guest with real kernel thermal zones and enforced cgroup limits.

Only the guest boots; the host writes the zones' temperatures into its memory. It prints what
was seen, and ends with status 1 where something was not as it must be. Needs root for the
image's owners, and qemu-system-x86, acpica-tools, mmdebstrap, cpio.
"""

from __future__ import annotations

import json
import mmap
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import vm_image

if TYPE_CHECKING:
    from collections.abc import Callable

MEMORY_MIB: Final = 3072
# Where the table in data/thermal_guest.asl looks.
TEMPERATURES_AT: Final = 0x7000000
BOOT_LIMIT_S: Final = 600.0
ANSWER_LIMIT_S: Final = 900.0
PROGRAMS: Final = {
    "qemu-system-x86_64": "qemu-system-x86",
    "iasl": "acpica-tools",
    "mmdebstrap": "mmdebstrap",
    "cpio": "cpio",
}
PYTHON: Final = "/opt/switchgear/bin/python"
SWITCHGEAR: Final = (PYTHON, "-m", "switchgear")
SERVICE: Final = "switchgear.service"
# What is too short for an emulated processor.
DROP_IN: Final = """[Service]
TimeoutStartSec=900s
WatchdogSec=180s
Environment=SWITCHGEAR_WORKERS__START_S=600
Environment=SWITCHGEAR_VALIDATION__TIME_LIMIT_S=600
Environment=SWITCHGEAR_FINGERPRINT__ENABLED=false
"""


class Guest:
    """The running machine; use it with `with`."""

    def __init__(self, folder: Path, kernel: Path, initramfs: Path) -> None:
        self.folder = folder
        table = folder / "thermal.aml"
        source = Path(__file__).parent / "data" / "thermal_guest.asl"
        subprocess.run(
            ["iasl", "-p", str(table.with_suffix("")), str(source)],
            check=True,
            capture_output=True,
        )
        ram = folder / "ram"
        with ram.open("wb") as file:
            file.truncate(MEMORY_MIB << 20)

        self._file = ram.open("r+b")
        page = mmap.ALLOCATIONGRANULARITY
        self._memory = mmap.mmap(self._file.fileno(), page, offset=TEMPERATURES_AT)
        self.heat(cpu=40, gpu=40, npu=40)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / "serial"))
        listener.listen(1)
        backend = "memory-backend-file,id=ram"
        command = [
            # Emulated: the guest must not depend on what the host's processor lets through.
            *("qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-smp", "2", "-nodefaults"),
            *("-display", "none", "-machine", "q35,memory-backend=ram", "-m", f"{MEMORY_MIB}M"),
            *("-object", f"{backend},size={MEMORY_MIB}M,mem-path={ram},share=on"),
            *("-acpitable", f"file={table}", "-kernel", str(kernel), "-initrd", str(initramfs)),
            *("-append", "console=ttyS0 memmap=64K$0x7000000 "
              "systemd.mask=serial-getty@ttyS0.service"),
            *("-serial", f"file:{folder}/console", "-serial", f"unix:{folder}/serial"),
        ]  # fmt: skip
        self._process = subprocess.Popen(command)
        listener.settimeout(BOOT_LIMIT_S)
        self._serial, _ = listener.accept()
        listener.close()
        self._serial.settimeout(BOOT_LIMIT_S)
        self._text = b""

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self._serial.close()
        self._process.terminate()
        self._process.wait()
        self._memory.close()
        self._file.close()

    def heat(self, **degrees: float) -> None:
        """Sets zones to degrees Celsius."""
        for index, name in enumerate(("cpu", "gpu", "npu")):
            if name in degrees:
                tenths = round(degrees[name] * 10) + 2732
                struct.pack_into("<I", self._memory, 4 * index, tenths)

    @property
    def console(self) -> str:
        return (self.folder / "console").read_text(errors="replace")

    def line(self) -> dict[str, Any]:
        while b"\n" not in self._text:
            part = self._serial.recv(65536)
            if not part:
                raise SystemExit("the guest ended: see its console")

            self._text += part

        first, _, self._text = self._text.partition(b"\n")
        answer: dict[str, Any] = json.loads(first)
        return answer

    def await_boot(self) -> None:
        try:
            while not self.line().get("ready"):
                pass
        except TimeoutError:
            raise SystemExit(f"the guest did not boot: {self.console[-3000:]}") from None

        self._serial.settimeout(ANSWER_LIMIT_S)

    def run(self, *command: str, check: bool = True) -> str:
        self._serial.sendall(json.dumps(command).encode() + b"\n")
        answer = self.line()
        if check and answer["status"] != 0:
            raise SystemExit(f"{' '.join(command)}: {answer['stderr']}{answer['stdout']}")

        return str(answer["stdout"]).strip()

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            self.run(*SWITCHGEAR, "status", "--json", check=False)
        )
        return found


class Report:
    """What was seen, line by line."""

    def __init__(self) -> None:
        self.failed = False

    def check(self, holds: bool, text: str) -> None:
        self.failed = self.failed or not holds
        print(f"{'ok    ' if holds else 'FAILED'} {text}", flush=True)


def until(condition: Callable[[], bool], limit_s: float = 60.0) -> float:
    """Waits for a condition; the seconds that it took, or infinity."""
    begin = time.monotonic()
    while time.monotonic() - begin < limit_s:
        if condition():
            return time.monotonic() - begin

    return float("inf")


def install(guest: Guest, report: Report) -> None:
    guest.run("python3", "-m", "venv", "--without-pip", "/opt/switchgear")
    paths = "/opt/switchgear/lib/python3.11/site-packages/paths.pth"
    guest.run("sh", "-c", f"printf '/opt/tree/src\\n/opt/packages\\n' >{paths}")
    guest.run(*SWITCHGEAR, "install-service")
    folder = f"/run/systemd/system/{SERVICE}.d"
    guest.run("mkdir", "-p", folder)
    guest.run("sh", "-c", f"printf '{DROP_IN}' >{folder}/vm.conf; systemctl daemon-reload")
    begin = time.monotonic()
    guest.run("systemctl", "start", SERVICE)
    ready = guest.status().get("ready") is True
    report.check(
        ready, f"installed, and ready {time.monotonic() - begin:.1f} s after its start"
    )


def zones(guest: Guest) -> dict[str, int]:
    """The kernel's own reading of each zone, in millidegrees."""
    text = guest.run("@read", "/sys/class/thermal/thermal_zone*/temp")
    values = [int(line) for line in text.split()]
    return dict(zip(("cpu", "gpu", "npu"), values, strict=True))


def heat(guest: Guest, report: Report) -> None:
    found = zones(guest)
    report.check(
        all(abs(value - 40_000) < 200 for value in found.values()),
        f"three zones of the kernel at 40 C: {found}",
    )
    for degrees in (55.0, 80.0, 45.0):
        guest.heat(cpu=degrees)
        took = until(lambda wanted=degrees: abs(zones(guest)["cpu"] - wanted * 1000) < 200)  # type: ignore[misc]
        report.check(took < 10, f"the kernel's CPU zone follows to {degrees} C in {took:.1f} s")
        seen: list[dict[str, Any]] = []

        def told(wanted: float = degrees, seen: list[dict[str, Any]] = seen) -> bool:
            seen[:] = guest.status().get("devices", [])
            return any(
                device.get("temperature_c") is not None
                and abs(device["temperature_c"] - wanted) < 1
                for device in seen
            )

        took = until(told)
        states = [
            (device["name"], device["state"], device["reading"], device.get("temperature_c"))
            for device in seen
        ]
        report.check(took < 30, f"the daemon tells {degrees} C after {took:.1f} s: {states}")


def limits(guest: Guest, report: Report) -> None:
    """The kernel kills a worker that outgrows the service's memory; the service goes on."""
    restarts = guest.run("systemctl", "show", "-P", "NRestarts", SERVICE)
    pid = guest.run("systemctl", "show", "-P", "MainPID", SERVICE)
    guest.run(
        "systemctl", "set-property", "--runtime", SERVICE, "MemoryMax=160M", "MemorySwapMax=0"
    )
    said = guest.run(
        *(*SWITCHGEAR, "infer", "generated:mobilenet_v1", "--zeros", "--json"), check=False
    )
    group = "/sys/fs/cgroup/system.slice/switchgear.service/memory.events"
    events = dict(line.split() for line in guest.run("cat", group).splitlines())
    report.check(
        int(events["oom_kill"]) > 0, f"killed for memory: {events['oom_kill']} processes"
    )
    report.check(bool(said), f"the app was told: {said[:160]}")
    same = guest.run("systemctl", "show", "-P", "MainPID", SERVICE) == pid
    report.check(
        same and guest.run("systemctl", "show", "-P", "NRestarts", SERVICE) == restarts,
        "the service is the same process as before",
    )
    guest.run("systemctl", "set-property", "--runtime", SERVICE, "MemoryMax=infinity")
    took = until(lambda: infers(guest))
    report.check(took < 60, f"with its memory back it serves the model after {took:.1f} s")


def infers(guest: Guest) -> bool:
    said = guest.run(
        *(*SWITCHGEAR, "infer", "generated:mobilenet_v1", "--zeros", "--json"), check=False
    )
    return '"backend": "cpu"' in said


def devices(guest: Guest, report: Report) -> None:
    """A node that the unit does not name cannot be opened by a process of the service."""
    script = "import os; os.open('/dev/mem', os.O_RDONLY)"
    policy = ("-p", "DevicePolicy=closed", "-p", "DeviceAllow=char-drm rw")
    run = ("systemd-run", "--wait", "--quiet", "--pipe")
    free = guest.run(*run, "python3", "-c", script + "; print('open')", check=False)
    closed = guest.run(*run, *policy, "python3", "-c", script + "; print('open')", check=False)
    report.check(free == "open" and closed == "", "DevicePolicy=closed is enforced")


def main() -> int:
    lacking = [package for program, package in PROGRAMS.items() if not shutil.which(program)]
    if lacking:
        print(f"missing: apt-get install --no-install-recommends {' '.join(lacking)}")
        return 2

    debian = vm_image.debian_root()
    report = Report()
    with tempfile.TemporaryDirectory(prefix="vm-") as name:
        folder = Path(name)
        initramfs = folder / "root.cpio"
        vm_image.initramfs(debian, initramfs)
        begin = time.monotonic()
        with Guest(folder, vm_image.kernel(debian), initramfs) as guest:
            guest.await_boot()
            print(f"booted {guest.run('uname', '-r')} in {time.monotonic() - begin:.1f} s")
            install(guest, report)
            heat(guest, report)
            devices(guest, report)
            limits(guest, report)

    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
