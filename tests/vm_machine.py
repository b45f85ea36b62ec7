"""The emulated machine of `thermal_vm.py`: starts it, heats its zones, asks what runs in it.

Its clock counts instructions (QEMU's icount, a nanosecond each) and follows ours while the
guest is idle. So the guest is a machine of 10^9 instructions a second, however slow the
emulation is: time limits within it hold as they are, and a busy host changes nothing.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import socket
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

MEMORY_MIB: Final = 1536
# Where the table in data/thermal_guest.asl looks.
TEMPERATURES_AT: Final = 0x7000000
ZONES: Final = ("cpu", "gpu", "npu")
START_LIMIT_S: Final = 60.0
BOOT_LIMIT_S: Final = 900.0
# Of our time; the guest's own limits are in its own.
ANSWER_LIMIT_S: Final = 1200.0
# What waits for devices, terminals or networks that are not there.
MASKED: Final = (
    *(
        "serial-getty@ttyS0.service",
        "getty.target",
        "e2scrub_reap.service",
        "dev-hugepages.mount",
    ),
    *("systemd-update-utmp.service", "systemd-networkd.service", "systemd-hwdb-update.service"),
    *(
        "systemd-random-seed.service",
        "systemd-pstore.service",
        "fstrim.timer",
        "apt-daily.timer",
    ),
)
KERNEL_OPTIONS: Final = (
    *("console=ttyS0", "quiet", "memmap=64K$0x7000000", "mitigations=off"),
    *("systemd.show_status=false", "systemd.unit=multi-user.target"),
    *(f"systemd.mask={unit}" for unit in MASKED),
)


class GuestError(RuntimeError):
    """The guest ended, or could not do what it was asked for."""


class Guest:
    """The running machine; use it with `with`."""

    def __init__(self, kernel: Path, initramfs: Path) -> None:
        # In memory: a file elsewhere would be written to the disk, all of it.
        shared = Path("/dev/shm")
        self._folder = Path(
            tempfile.mkdtemp(prefix="vm-", dir=shared if shared.is_dir() else None)
        )
        try:
            self._start(kernel, initramfs)
        except BaseException:
            shutil.rmtree(self._folder)
            raise

    def _start(self, kernel: Path, initramfs: Path) -> None:
        folder = self._folder
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

        with ram.open("r+b") as file:
            self._memory = mmap.mmap(
                file.fileno(), mmap.ALLOCATIONGRANULARITY, offset=TEMPERATURES_AT
            )

        self.heat(cpu=40, gpu=40, npu=40)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "serial"))
            listener.listen(1)
            listener.settimeout(START_LIMIT_S)
            self._process = subprocess.Popen(
                command(folder, kernel, initramfs), preexec_fn=_after_others
            )
            try:
                self._serial, _ = listener.accept()
            except TimeoutError:
                self._process.kill()
                self._process.wait()
                raise GuestError("QEMU did not start; it says why above") from None

        self._serial.settimeout(BOOT_LIMIT_S)
        self._text = b""

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self._serial.close()
        self._process.terminate()
        self._process.wait()
        self._memory.close()
        shutil.rmtree(self._folder)

    def heat(self, **degrees: float) -> None:
        """Sets zones to degrees Celsius."""
        for index, name in enumerate(ZONES):
            if name in degrees:
                tenths = round(degrees[name] * 10) + 2732
                struct.pack_into("<I", self._memory, 4 * index, tenths)

    @property
    def console(self) -> str:
        return (self._folder / "console").read_text(errors="replace")

    @property
    def computed_s(self) -> float:
        """What the emulation has computed, in seconds of this machine's processors."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _line(self) -> dict[str, Any]:
        while b"\n" not in self._text:
            part = self._serial.recv(65536)
            if not part:
                raise GuestError(f"the guest ended: {self.console[-3000:]}")

            self._text += part

        first, _, self._text = self._text.partition(b"\n")
        answer: dict[str, Any] = json.loads(first)
        return answer

    def await_boot(self) -> None:
        """:raises GuestError: it did not boot within BOOT_LIMIT_S."""
        try:
            while not self._line().get("ready"):
                pass
        except TimeoutError:
            raise GuestError(f"the guest did not boot: {self.console[-3000:]}") from None

        self._serial.settimeout(ANSWER_LIMIT_S)

    def ask(self, word: str, **arguments: Any) -> Any:
        """Has `vm_guest.py` do something; its result.

        :raises GuestError: it failed there.
        """
        self._serial.sendall(json.dumps({"do": word, **arguments}).encode() + b"\n")
        answer = self._line()
        if "error" in answer:
            raise GuestError(f"{word}: {answer['error']}")

        return answer["result"]

    def run(self, *words: str, check: bool = True) -> str:
        """Runs a command; what it wrote to stdout, stripped.

        :raises GuestError: with `check`, its status is not 0.
        """
        done = self.ask("run", command=words)
        if check and done["status"] != 0:
            raise GuestError(f"{' '.join(words)}: {done['stderr']}{done['stdout']}")

        return str(done["stdout"]).strip()

    @property
    def up_s(self) -> float:
        """The guest's own clock."""
        return float(self.ask("now"))


def command(folder: Path, kernel: Path, initramfs: Path) -> list[str]:
    """Emulated, so that the guest does not depend on what the host's processor lets through."""
    ram = f"memory-backend-file,id=ram,size={MEMORY_MIB}M,mem-path={folder}/ram,share=on"
    return [
        *("qemu-system-x86_64", "-accel", "tcg,thread=single,tb-size=512", "-cpu", "max"),
        *("-icount", "shift=0,sleep=on", "-smp", "1", "-nodefaults", "-display", "none"),
        *("-machine", "q35,memory-backend=ram", "-m", f"{MEMORY_MIB}M", "-object", ram),
        *("-acpitable", f"file={folder}/thermal.aml"),
        *("-kernel", str(kernel), "-initrd", str(initramfs)),
        *("-append", " ".join(KERNEL_OPTIONS)),
        *("-serial", f"file:{folder}/console", "-serial", f"unix:{folder}/serial"),
    ]


def _after_others() -> None:
    os.nice(10)
