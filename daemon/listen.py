"""The daemon's listening socket: handed over by systemd or Android init, or its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import struct
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from switchgear.ipc.errors import AlreadyRunning, BadConfiguration

# A burst of clients that do not block would be turned away beyond it.
BACKLOG: Final = 1024
# A start holds the folder's lock for milliseconds.
LOCK_LIMIT_S: Final = 5.0
LOCK_STEP_S: Final = 0.02
_FIRST_HANDED_OVER: Final = 3
_CREDENTIALS: Final = struct.Struct("iII")
# Variables that name handed-over descriptors; no child may see them.
HAND_OVER_VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


class Listener:
    """A listening Unix stream socket and, when it is our own, its file."""

    def __init__(self, sock: socket.socket, path: Path, *, own: bool) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.path = path
        self._identity = _identity(path) if own else None

    def close(self) -> None:
        """Stops listening; removes the file when it is still the one that we made."""
        self.socket.close()
        if self._identity is not None and _identity(self.path) == self._identity:
            with contextlib.suppress(OSError):
                self.path.unlink()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None

    return status.st_dev, status.st_ino


def open_listener(path: Path) -> Listener:
    """The socket to serve on, in this order: systemd's, Android init's, our own at `path`.

    :raises AlreadyRunning: a daemon answers there; `pid` names it.
    :raises BadConfiguration: the folder is not private, or the path is not usable.
    """
    return from_systemd() or from_android() or own(path)


def from_systemd() -> Listener | None:
    """The socket of a socket unit; None when systemd handed none to this process."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None

    if os.environ.get("LISTEN_FDS") != "1":
        raise BadConfiguration("the socket unit must hand over exactly one socket")

    for variable in HAND_OVER_VARIABLES:
        os.environ.pop(variable, None)

    return _adopt(_FIRST_HANDED_OVER)


def from_android(name: str = "switchgear") -> Listener | None:
    """The socket of a `socket` line in an init file; None when init handed none over."""
    variable = "ANDROID_SOCKET_" + re.sub(r"[^0-9A-Za-z]", "_", name)
    value = os.environ.pop(variable, None)
    if value is None:
        return None

    try:
        number = int(value)
    except ValueError:
        raise BadConfiguration(f"{variable}={value} is no descriptor") from None

    return _adopt(number)


def _adopt(fd: int) -> Listener:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise BadConfiguration(f"descriptor {fd} is no socket: {error}") from None

    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
        sock.close()
        raise BadConfiguration(f"descriptor {fd} is no Unix stream socket")

    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        # An init line without "+listen".
        sock.listen(BACKLOG)

    # An abstract address comes as bytes and begins with a NUL: for messages only.
    return Listener(sock, Path(os.fsdecode(sock.getsockname())), own=False)


def own(path: Path) -> Listener:
    """Binds our own socket in a private folder.

    A lock beside it makes two daemons that start at once see each other. A stale file of a
    daemon that is gone is removed, after nobody answered on it.
    """
    folder = _private_folder(path.parent)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(lock, folder)
        _remove_stale(path)
        sock = _bind(path)
    finally:
        os.close(lock)

    return Listener(sock, path, own=True)


def _private_folder(folder: Path) -> Path:
    """The folder, made when it is missing; nobody else may rename or replace what is in it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(folder)
    except OSError as error:
        raise BadConfiguration(f"{folder}: {error.strerror}") from None

    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
        raise BadConfiguration(f"{folder} is not a folder of this user")

    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise BadConfiguration(f"{folder} can be written to by others")

    return folder


def _lock(fd: int, folder: Path) -> None:
    """Waits for a daemon that starts at the same moment; but whoever can read the folder could
    hold the lock for ever."""
    deadline = monotonic() + LOCK_LIMIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() > deadline:
                raise BadConfiguration(f"another process holds the lock of {folder}") from None

            sleep(LOCK_STEP_S)
        else:
            return


def _bind(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    # Who may enter the folder as the group may connect; a mode set after bind would be a race.
    mask = os.umask(0o117)
    try:
        sock.bind(str(path))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise BadConfiguration(f"cannot listen on {path}: {error}") from None
    finally:
        os.umask(mask)

    return sock


def _remove_stale(path: Path) -> None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return

    if not stat.S_ISSOCK(status.st_mode):
        raise BadConfiguration(f"{path} exists and is no socket")

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

            return
        except BlockingIOError:
            # Its backlog is full: somebody is there.
            raise AlreadyRunning(f"a busy daemon listens on {path}") from None

        pid, _, _ = peer_credentials(probe)

    raise AlreadyRunning(f"a daemon with pid {pid} serves {path}", pid=pid)


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """pid, uid and gid of the process at the other end, as the kernel recorded them."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(data)
    return pid, uid, gid
