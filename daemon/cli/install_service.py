"""`switchgear install-service`: writes the systemd units for this machine, or removes them."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Final

from switchgear.daemon import paths
from switchgear.daemon.cli.command import (
    DONE,
    CommandError,
    Subparsers,
    UsageError,
    add_command,
    print_json,
    say,
)
from switchgear.daemon.cli.service_account import remove_account
from switchgear.daemon.cli.service_program import Program, of_image, of_this_machine

UNITS: Final = ("switchgear.socket", "switchgear.service")
# Where each file of the package `switchgear.systemd` goes on a system.
SYSTEM_FILES: Final = {
    "switchgear.service": "etc/systemd/system/switchgear.service",
    "switchgear.socket": "etc/systemd/system/switchgear.socket",
    "switchgear-sysusers.conf": "etc/sysusers.d/switchgear.conf",
    "switchgear-tmpfiles.conf": "etc/tmpfiles.d/switchgear.conf",
}
USER_FILES: Final = ("user/switchgear.service", "user/switchgear.socket")
# What the system's daemon keeps; all of it can be made again.
SYSTEM_FOLDERS: Final = ("run/switchgear", "var/cache/switchgear", "var/lib/switchgear")
CONFIGURATION: Final = "etc/switchgear"
_COMMAND_LIMIT_S: Final = 120.0


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "install-service",
        run,
        "write the systemd units for this machine, and enable them",
        "sudo switchgear install-service --now",
        "switchgear install-service --user --now",
        "switchgear install-service --print",
        "switchgear install-service --root /mnt/image",
    )
    parser.add_argument("--print", action="store_true", help="print the files, change nothing")
    parser.add_argument("--user", action="store_true", help="a service of your own, not root's")
    parser.add_argument(
        "--now", action="store_true", help="start the socket and the service too"
    )
    parser.add_argument(
        "--root",
        type=Path,
        metavar="DIR",
        help="write into an image; nothing is run or started",
    )
    parser.add_argument(
        "--program", type=Path, metavar="PATH", help="the switchgear program that is to run"
    )
    parser.add_argument(
        "--uninstall",
        action="store_true",
        help="stop and remove all of it: units, user, caches, stored models",
    )
    parser.add_argument(
        "--keep-data",
        action="store_true",
        help="with --uninstall: leave the user, the caches and the stored models",
    )


def run(options: argparse.Namespace) -> int:
    """:raises UsageError: options that do not go together.
    :raises CommandError: a file cannot be written, or systemd refuses.
    """
    if options.user and options.root:
        raise UsageError("--user is for this machine; an image has no user's folder")

    if options.uninstall and options.print:
        raise UsageError("--print shows what would be written; --uninstall writes nothing")

    needs_root = not (options.user or options.root or options.print)
    if needs_root and os.geteuid() != 0:
        raise CommandError(
            "this needs root: sudo switchgear install-service; --user makes one of your own"
        )

    if options.uninstall:
        report = uninstall(options)
    else:
        files = rendered(options)
        if options.print:
            return _print(files, as_json=options.json)

        report = install(options, files)

    if options.json:
        print_json(report)

    return DONE


def rendered(options: argparse.Namespace) -> dict[Path, str]:
    """The files and their contents, as this machine (or the image) needs them."""
    program = _program(options)
    if options.user:
        folder = user_folder()
        return {folder / Path(n).name: program.apply(_text(n)) for n in USER_FILES}

    root = (options.root or Path("/")).absolute()
    files = {root / place: program.apply(_text(name)) for name, place in SYSTEM_FILES.items()}
    accounts = root / SYSTEM_FILES["switchgear-sysusers.conf"]
    files[accounts] = with_known_groups(files[accounts], groups_of(root))
    return files


def _program(options: argparse.Namespace) -> Program:
    if options.root:
        return of_image(options.root, options.program)

    return of_this_machine(options.program, for_everybody=not options.user)


def _text(name: str) -> str:
    return resources.files("switchgear.systemd").joinpath(name).read_text(encoding="utf-8")


def groups_of(root: Path) -> frozenset[str]:
    """The names of the groups that a system has in its files."""
    try:
        lines = (root / "etc/group").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()

    return frozenset(line.partition(":")[0] for line in lines)


def with_known_groups(text: str, groups: frozenset[str]) -> str:
    """A sysusers file without memberships of other groups: it would make them, and where there
    is no such group, no device node belongs to it."""
    kept = [
        line
        for line in text.splitlines(keepends=True)
        if not line.startswith("m ") or line.split()[2] in groups
    ]
    return "".join(kept)


def user_folder() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "systemd/user"


def _print(files: dict[Path, str], *, as_json: bool) -> int:
    if as_json:
        print_json({str(path): text for path, text in files.items()})
    else:
        print("\n".join(f"# {path}\n{text}" for path, text in files.items()), end="")

    return DONE


def install(options: argparse.Namespace, files: dict[Path, str]) -> dict[str, object]:
    for path, text in files.items():
        _write(path, text)
        say(f"wrote {path}")

    done: list[str] = []
    if not options.root and not options.user:
        _do(done, "systemd-sysusers", f"/{SYSTEM_FILES['switchgear-sysusers.conf']}")
        _do(
            done, "systemd-tmpfiles", "--create", f"/{SYSTEM_FILES['switchgear-tmpfiles.conf']}"
        )

    manager = _manager(options)
    if manager.runs:
        _do(done, *manager.command, "daemon-reload")

    _do(done, *manager.command, "enable", *UNITS)
    if options.now and manager.runs:
        # Both at once: a socket cannot be started beside a service that is running without it.
        _do(done, *manager.command, "restart", *UNITS)
    elif manager.runs:
        say(f"start it: {' '.join(manager.command)} start switchgear")
    elif not options.root:
        say("systemd does not run here: the service starts at the next boot with it")

    return {"files": [str(path) for path in files], "commands": done}


def uninstall(options: argparse.Namespace) -> dict[str, object]:
    """Harmless where some or all of it is gone already."""
    done: list[str] = []
    removed: list[str] = []
    manager = _manager(options)
    root = (options.root or Path("/")).absolute()
    names = USER_FILES if options.user else tuple(SYSTEM_FILES.values())
    base = user_folder() if options.user else root
    files = [base / Path(name).name if options.user else base / name for name in names]
    there = any(path.exists() for path in files if path.suffix in (".service", ".socket"))
    if there and manager.runs:
        _do(done, *manager.command, "stop", *reversed(UNITS))

    if there:
        _do(done, *manager.command, "disable", *UNITS)

    for path in files:
        _remove(path, removed)
        if path.suffix == ".conf":
            # A folder that may be there only because of us.
            with contextlib.suppress(OSError):
                path.parent.rmdir()

    if there and manager.runs:
        _do(done, *manager.command, "daemon-reload")
        # Forgets that it failed, where it did; else systemd has nothing to forget and says so.
        subprocess.run([*manager.command, "reset-failed", *UNITS], capture_output=True)

    if not options.keep_data:
        folders = [root / place for place in SYSTEM_FOLDERS]
        own = [paths.runtime_dir(), paths.state_dir(), paths.cache_dir()]
        for folder in own if options.user else folders:
            _remove(folder, removed)

        if not options.user and not options.root and remove_account():
            removed.append("user switchgear")

    for path in [] if options.user else [root / CONFIGURATION]:
        _remove_empty(path, removed)

    for line in removed:
        say(f"removed {line}")

    return {"removed": removed, "commands": done}


class _Manager:
    """`command` is systemctl for the system, the user or an image; `runs`: it is up."""

    def __init__(self, command: tuple[str, ...], *, runs: bool) -> None:
        self.command = command
        self.runs = runs


def _manager(options: argparse.Namespace) -> _Manager:
    if options.root:
        return _Manager(("systemctl", f"--root={options.root.absolute()}"), runs=False)

    if options.user:
        runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
        return _Manager(("systemctl", "--user"), runs=Path(runtime, "systemd").is_dir())

    return _Manager(("systemctl",), runs=Path("/run/systemd/system").is_dir())


def _do(done: list[str], *command: str) -> None:
    """Runs one of systemd's commands.

    :raises CommandError: it is missing or fails; with what it said.
    """
    line = " ".join(command)
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S
        )
    except FileNotFoundError:
        raise CommandError(f"there is no {command[0]} here; it comes with systemd") from None
    except subprocess.TimeoutExpired:
        raise CommandError(f"{line} did not end in {_COMMAND_LIMIT_S:g} s") from None

    if result.returncode != 0:
        said = " ".join(result.stderr.split()) or f"exit status {result.returncode}"
        raise CommandError(f"{line}: {said}")

    say(line)
    done.append(line)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from None


def _remove(path: Path, removed: list[str]) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from None

    removed.append(str(path))


def _remove_empty(folder: Path, removed: list[str]) -> None:
    """The folder of the configuration, unless something that people wrote is in it."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return
    except OSError:
        print(f"left {folder}: it holds your configuration", file=sys.stderr)
        return

    removed.append(str(folder))
