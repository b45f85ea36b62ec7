"""A real systemd, booted from this machine's own root in a container that forgets everything.

    with Guest(binds={"/opt/tree": ROOT}) as guest:
        guest.run("systemctl", "is-system-running")

Root only. The lower layer is a bind mount of `/`, the upper one a memory file system: what the
guest writes is gone with it. systemd-nspawn's own options keep it away from this machine's
systemd, which is needed for nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

BOOT_LIMIT_S: Final = 30.0
RUN_LIMIT_S: Final = 60.0
POLL_S: Final = 0.05
_HIERARCHIES: Final = ("unified", "systemd", "")
# What would wait for a terminal, a clock or a network.
_MASKED: Final = ("console-getty.service", "getty.target", "systemd-timesyncd.service")
# In one shell: into cgroups of its own, then the container. With --keep-unit nspawn makes its
# groups below the caller's; from the root group two containers would collide.
_ENTER: Final = 'for group in $CGROUPS; do echo $$ >"$group/cgroup.procs"; done; exec "$@"'


class GuestCommandError(AssertionError):
    """A command in the guest failed; the text has what it wrote."""


class Guest:
    """The booted container; use it with `with`. `binds`, read-only: place there, path here."""

    def __init__(self, binds: Mapping[str, Path]) -> None:
        self._name = f"switchgear-test-{os.getpid()}"
        self._folder = Path(tempfile.mkdtemp(prefix="boot-"))
        self._lower = self._folder / "lower"
        self._binds = dict(binds)
        self._process: subprocess.Popen[bytes] | None = None
        self._init = 0
        base = Path("/sys/fs/cgroup")
        self._groups = [
            base / hierarchy / self._name
            for hierarchy in _HIERARCHIES
            if (base / hierarchy / "cgroup.procs").exists()
        ]

    def __enter__(self) -> Guest:
        try:
            self._boot()
        except BaseException:
            self._clean()
            raise

        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self.power_off()
        finally:
            self._clean()

    @property
    def console(self) -> str:
        return (self._folder / "console.log").read_text(errors="replace")

    def _boot(self) -> None:
        self._lower.mkdir()
        # nspawn refuses `-D /`, but not a bind mount of it.
        subprocess.run(["mount", "--bind", "/", str(self._lower)], check=True)
        for group in self._groups:
            group.mkdir()

        command = [
            *("systemd-nspawn", "--quiet", f"--directory={self._lower}", "--volatile=overlay"),
            *(f"--machine={self._name}", "--register=no", "--keep-unit", "--private-network"),
            *("--boot", "--console=read-only"),
            *(f"--bind-ro={path}:{place}" for place, path in self._binds.items()),
            # Without what this machine starts besides.
            "systemd.unit=basic.target",
            *(f"systemd.mask={unit}" for unit in _MASKED),
        ]
        with (self._folder / "console.log").open("wb") as console:
            self._process = subprocess.Popen(
                ["sh", "-c", _ENTER, "sh", *command],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={**os.environ, "CGROUPS": " ".join(map(str, self._groups))},
                start_new_session=True,
            )

        deadline = time.monotonic() + BOOT_LIMIT_S
        while self._state() not in ("running", "degraded"):
            assert self._process.poll() is None, f"the container ended: {self.console}"
            assert time.monotonic() < deadline, f"it did not boot: {self.console}"
            # Until its manager listens there is nobody who would tell.
            time.sleep(POLL_S)

    def _state(self) -> str:
        assert self._process is not None
        self._init = _child_of(self._process.pid)
        if not self._init:
            return ""

        result = self._enter("systemctl", "is-system-running")
        return result.stdout.strip()

    def _prefix(self) -> list[str]:
        return ["nsenter", f"--target={self._init}", "-m", "-u", "-i", "-n", "-p", "-C", "--"]

    def _enter(self, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._prefix(), *command],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=RUN_LIMIT_S,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
        )

    def run(self, *command: str, stdin: str = "") -> str:
        """Runs a command in the guest as its root; what it wrote to stdout, stripped.

        Raises GuestCommandError when its exit status is not 0.
        """
        result = self._enter(*command, stdin=stdin)
        if result.returncode != 0:
            # Of a unit, systemctl says only that its journal says more.
            log = self.journal(command[-1]) if command[0] == "systemctl" else ""
            raise GuestCommandError(
                f"{' '.join(command)}: status {result.returncode}\n"
                f"{result.stdout}\n{result.stderr}\n{log}"
            )

        return result.stdout.strip()

    def fails(self, *command: str, stdin: str = "") -> str:
        """Runs a command that has to fail; what it wrote to stderr."""
        result = self._enter(*command, stdin=stdin)
        assert result.returncode != 0, f"{' '.join(command)} did not fail: {result.stdout}"
        return result.stderr

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Starts a command in the guest; the caller reads its pipes and waits for it."""
        return subprocess.Popen(
            [*self._prefix(), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def write(self, path: str, text: str) -> None:
        self.run("mkdir", "-p", str(Path(path).parent))
        self.run("tee", path, stdin=text)

    def property_of(self, unit: str, name: str) -> str:
        return self.run("systemctl", "show", "-P", name, unit)

    def await_property(self, unit: str, name: str, wanted: str) -> None:
        """Waits until a unit's property has this value."""
        deadline = time.monotonic() + RUN_LIMIT_S / 2
        while (found := self.property_of(unit, name)) != wanted:
            if time.monotonic() > deadline:
                raise GuestCommandError(
                    f"{unit}: {name} is {found!r}, not {wanted!r}\n{self.journal(unit)}"
                )

            # systemctl waits for the end of a job, not for a property.
            time.sleep(POLL_S)

    def journal(self, unit: str) -> str:
        self.run("journalctl", "--sync")
        return self.run("journalctl", "--unit", unit, "--output=cat", "--no-pager")

    def power_off(self) -> None:
        self._enter("systemctl", "--no-block", "poweroff")
        assert self._process is not None
        self._process.wait(RUN_LIMIT_S)

    def _clean(self) -> None:
        if self._process is not None and self._process.poll() is None:
            # Its own signal for an end at once; then whatever is left.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._init or self._process.pid, signal.SIGKILL)

            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

        subprocess.run(["umount", "-l", str(self._lower)], capture_output=True)
        for group in self._groups:
            for folder in sorted(group.glob("**/"), reverse=True):
                with contextlib.suppress(OSError):
                    folder.rmdir()

        for folder in (self._lower, Path("/run/systemd/nspawn/propagate", self._name)):
            with contextlib.suppress(OSError):
                folder.rmdir()

        # Never more than our own two: the lower layer is this machine's root.
        if not self._lower.exists():
            (self._folder / "console.log").unlink(missing_ok=True)
            self._folder.rmdir()


def _child_of(pid: int) -> int:
    """The one child of a process, 0 for none yet."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) == pid:
                    return int(entry.name)

    return 0
