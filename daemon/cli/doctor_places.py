"""Checks of `switchgear doctor` that open no driver: nodes, folders, files, the daemon."""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from switchgear.daemon import config, paths
from switchgear.daemon.cli.doctor_fixes import as_root
from switchgear.ipc.errors import BadConfiguration, NotRunning, SwitchgearError

OK: Final = "ok"
MISSING: Final = "missing"
# The machine does not have the device: nothing to fix.
ABSENT: Final = "absent"

# Nodes of the kernel's accelerator class, and of drivers from before it or beside it.
_NPU_NODES: Final = ("accel/accel*", "apex_*", "ethosu*", "apusys*", "rknpu*", "galcore")
_UNITS: Final = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `state` is ok, missing or absent; `fix` is a command.

    `required`: without it no daemon serves here.
    """

    name: str
    state: str
    text: str
    fix: str = ""
    required: bool = False


def npu(dev: Path = Path("/dev")) -> Check:
    nodes = sorted(str(path) for pattern in _NPU_NODES for path in dev.glob(pattern))
    if not nodes:
        return Check("npu", ABSENT, "the kernel presents no NPU")

    closed = [node for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if closed:
        return Check(
            "npu",
            MISSING,
            f"this user may not open {closed[0]}",
            opening(closed[0], os.stat(closed[0])),
        )

    return Check("npu", OK, ", ".join(nodes))


def render_nodes(dev: Path = Path("/dev")) -> Check:
    """Without them a GPU's drivers see only software devices."""
    name = "render nodes"
    nodes = sorted(str(path) for path in dev.glob("dri/renderD*"))
    if not nodes:
        return Check(name, ABSENT, f"no {dev}/dri/renderD*: the kernel drives no GPU here")

    closed = [node for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if closed:
        return Check(
            name,
            MISSING,
            f"this user may not open {closed[0]}",
            opening(closed[0], os.stat(closed[0])),
        )

    return Check(name, OK, ", ".join(nodes))


def opening(node: str, status: os.stat_result) -> str:
    """What lets this user open a device node: its group where that may, else a rule for it."""
    user = user_name(os.geteuid())
    if status.st_mode & stat.S_IRGRP and status.st_mode & stat.S_IWGRP and status.st_gid:
        return (
            as_root(f"usermod -aG {_group_name(status.st_gid)} {user}") + ", then log in again"
        )

    return as_root(f"setfacl -m u:{user}:rw {shlex.quote(node)}")


def configuration(named: Path | None) -> Check:
    name = "configuration"
    path = named or paths.config_path()
    if named is None and not path.exists():
        try:
            config.load(None)
        except BadConfiguration as error:
            fix = "unset " + " ".join(_bad_variables())
            return Check(name, MISSING, error.text, fix, required=True)

        return Check(name, OK, f"no {path}: the defaults hold", required=True)

    try:
        found = config.load(path)
    except BadConfiguration as error:
        fix = f"${{EDITOR:-vi}} {shlex.quote(str(path))}"
        return Check(name, MISSING, error.text, fix, required=True)

    lost = [entry.path for entry in found.models if not os.access(entry.path, os.R_OK)]
    if lost:
        fix = f"${{EDITOR:-vi}} {shlex.quote(str(path))}"
        text = f"{path}: the resident model {lost[0]} cannot be read"
        return Check(name, MISSING, text, fix, required=True)

    return Check(name, OK, str(path), required=True)


def _bad_variables() -> list[str]:
    """The variables of the environment that are no configuration by themselves."""
    found = []
    for variable, value in os.environ.items():
        try:
            config.load(None, {variable: value})
        except BadConfiguration:
            found.append(variable)

    return found


def socket_folder(named: str | None) -> Check:
    """Whether a daemon of this user can listen there, and nobody else in its place."""
    name = "socket folder"
    folder = _socket(named).parent.absolute()
    quoted = shlex.quote(str(folder))
    if not folder.exists():
        parent = next(path for path in folder.parents if path.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return Check(name, OK, f"{folder} is made by `switchgear serve`", required=True)

        fix = as_root(f"install -d -m 700 -o {user_name(os.geteuid())} {quoted}")
        text = f"{folder} is not there, and this user may not make it"
        return Check(name, MISSING, text, fix, required=True)

    status = folder.stat()
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        fix = f"chmod go-w {quoted}"
        if status.st_mode & stat.S_ISVTX:
            # A folder that is meant for everybody, such as /tmp.
            fix = f"switchgear serve --socket {quoted}/switchgear/switchgear.sock"
        elif status.st_uid != os.geteuid():
            fix = as_root(fix)

        text = f"others may write to {folder} ({stat.filemode(status.st_mode)})"
        return Check(name, MISSING, text, fix, required=True)

    mode = f"{stat.filemode(status.st_mode)} {user_name(status.st_uid)}"
    return Check(name, OK, f"{folder} ({mode})", required=True)


def daemon(named: str | None) -> Check:
    from switchgear.client import connect

    path = _socket(named)
    try:
        with connect(path, reconnect=False) as client:
            info = client.info()
            backends = client.status()["backends"]
    except NotRunning as error:
        return Check("daemon", MISSING, error.text.partition(";")[0], _start(named))
    except SwitchgearError as error:
        return Check("daemon", MISSING, f"{error.name}: {error.text}", "")

    state = "ready" if info["ready"] else info["state"]
    text = f"{info['version']}, pid {info['pid']}, {state}, on {path}"
    # What is there for the tests above may not have been there when it started.
    for row in backends:
        if row["state"] == "absent":
            again = f" ({row['again']})" if "again" in row else ""
            text += f"; {row['name']} is absent for it: {row['reason']}{again}"

    return Check("daemon", OK, text)


def _start(named: str | None) -> str:
    if named:
        return f"switchgear serve --socket {shlex.quote(named)}"

    has_unit = any(Path(folder, "switchgear.service").exists() for folder in _UNITS)
    return as_root("systemctl start switchgear") if has_unit else "switchgear serve"


def _socket(named: str | None) -> Path:
    from switchgear.client import default_socket

    return Path(named or default_socket())


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
