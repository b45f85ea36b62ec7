"""Where the profile is kept: one checksummed JSON file that survives crashes and bad bytes.

The file is an envelope, `{"format", "schema", "sha256", "profile"}`; the checksum is over the
profile as compact JSON with sorted keys in ASCII. It is written to a temporary file beside it,
synced, renamed over the old one, and the folder is synced, so that a power cut leaves the old
or the new profile. What cannot be read is told, set aside and measured again: nothing here
raises for the sake of a bad file or a bad folder. Blocks on the disk.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pydantic import ValidationError

from switchgear.fingerprints.migrate import OLDEST_SCHEMA, migrate
from switchgear.fingerprints.profile import SCHEMA_VERSION, Profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FORMAT: Final = "switchgear-fingerprint"
FILE_NAME: Final = "fingerprint.json"
LOCK_NAME: Final = "fingerprint.lock"
MEASURING_NAME: Final = "fingerprint.measuring"
# A profile of 8 devices and 80 zones takes some 60 KB.
FILE_BYTES_AT_MOST: Final = 4 * 1024 * 1024
BAD_FILES_KEPT: Final = 3
LOCK_LIMIT_S: Final = 2.0
_LOCK_STEP_S: Final = 0.01

_TEMPORARY: Final = re.compile(rf"\.{re.escape(FILE_NAME)}\.\d+\.tmp")
_BAD: Final = re.compile(rf"{re.escape(FILE_NAME)}\.bad-(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class Problem:
    """What was wrong with the file or its folder.

    `kind` is one of `unreadable`, `not_a_file`, `too_large`, `empty`, `corrupt`,
    `checksum`, `future_schema`, `old_schema`; of `save`: `read_only`, `no_space`, `locked`,
    `not_stored`. `set_aside` is
    where the bad file went, empty where it stayed.
    """

    kind: str
    text: str
    errno: int = 0
    set_aside: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load` found: a profile, a problem, both (`migrated_from` an older schema), or
    neither, which is a first start."""

    profile: Profile | None
    problem: Problem | None = None
    migrated_from: int | None = None


class _BadFileError(Exception):
    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


def encode(profile: Profile) -> bytes:
    """The file's bytes."""
    content = profile.model_dump(mode="json")
    envelope = {
        "format": FORMAT,
        "schema": SCHEMA_VERSION,
        "sha256": _checksum(content),
        "profile": content,
    }
    return (json.dumps(envelope, indent=1, ensure_ascii=True) + "\n").encode()


def decode(data: bytes) -> tuple[Profile, int]:
    """The profile in a file's bytes and the schema it was stored in.

    Raises `ValueError` with the reason for anything that is no sound profile of this schema or
    of one that can be migrated.
    """
    try:
        return _decode(data)
    except _BadFileError as bad:
        raise ValueError(bad.text) from bad


class ProfileStore:
    """The profile's place in one folder. Several processes may use it at once.

    Holds no descriptor between calls, except a `measuring` lease while it is open.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.path = folder / FILE_NAME
        self._clock = clock

    def load(self) -> Loaded:
        """The stored profile. A bad file is set aside, at most three of them are kept."""
        try:
            profile, schema = _decode(self._read())
        except FileNotFoundError:
            return Loaded(None)
        except OSError as error:
            text = f"{self.path}: {error.strerror or error}"
            return Loaded(None, Problem("unreadable", text, error.errno or 0))
        except _BadFileError as bad:
            return self._judge_again(bad)

        return Loaded(profile, migrated_from=schema if schema != SCHEMA_VERSION else None)

    def save(self, profile: Profile) -> Problem | None:
        """Stores a profile; returns why it could not, and then the old one is still there."""
        data = encode(profile)
        try:
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            with self._lock():
                self._remove_leftovers()
                self._replace(data)
        except TimeoutError:
            return Problem("locked", f"another process holds {self.folder / LOCK_NAME}")
        except OSError as error:
            return _unstored(self.folder, error)

        return None

    @contextmanager
    def measuring(self) -> Iterator[bool]:
        """A lease for measuring: False when another process is measuring this machine now.

        In a folder that cannot be written there is nothing to guard, and it is True.
        """
        descriptor = -1
        try:
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            descriptor = _open_lock(self.folder / MEASURING_NAME)
        except OSError:
            pass

        try:
            yield descriptor < 0 or _try_lock(descriptor)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _read(self) -> bytes:
        # Not blocking and not following: a pipe or a link in the file's place is refused below.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        try:
            descriptor = os.open(self.path, flags)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise _BadFileError(
                    "not_a_file", f"{self.path} is not a regular file"
                ) from error

            raise

        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _not_a_file(self.path)

            if status.st_size > FILE_BYTES_AT_MOST:
                raise _BadFileError("too_large", f"{self.path} has {status.st_size} bytes")

            # The file may grow while it is read; one byte too many is enough to know.
            chunks: list[bytes] = []
            left = FILE_BYTES_AT_MOST + 1
            while left and (chunk := os.read(descriptor, left)):
                chunks.append(chunk)
                left -= len(chunk)
        finally:
            os.close(descriptor)

        return b"".join(chunks)

    def _judge_again(self, bad: _BadFileError) -> Loaded:
        """Sets the bad file aside, unless another process put a good one there meanwhile."""
        problem = Problem(bad.kind, bad.text)
        try:
            with self._lock():
                try:
                    profile, schema = _decode(self._read())
                except _BadFileError as still_bad:
                    place = self._set_aside()
                    return Loaded(None, Problem(still_bad.kind, still_bad.text, 0, place))

                migrated = schema if schema != SCHEMA_VERSION else None
                return Loaded(profile, migrated_from=migrated)
        except (OSError, TimeoutError):
            # Read-only, full or locked: the file stays where it is, and is measured past.
            return Loaded(None, problem)

    def _set_aside(self) -> str:
        """Renames the file to `.bad-SECONDS`; the oldest beyond three are removed."""
        kept = sorted(
            (int(match[1]), int(match[2] or 0), match[0])
            for name in os.listdir(self.folder)
            if (match := _BAD.fullmatch(name))
        )
        base = f"{FILE_NAME}.bad-{int(self._clock())}"
        taken = {name for _, _, name in kept}
        name = next(
            candidate
            for number in range(len(taken) + 1)
            if (candidate := f"{base}-{number}" if number else base) not in taken
        )
        for _, _, old in kept[: max(0, len(kept) - BAD_FILES_KEPT + 1)]:
            _remove(self.folder / old)

        os.rename(self.path, self.folder / name)
        _sync_folder(self.folder)
        return str(self.folder / name)

    def _replace(self, data: bytes) -> None:
        temporary = self.folder / f".{FILE_NAME}.{os.getpid()}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(temporary, flags, 0o644)
        try:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]

                os.fsync(descriptor)
            finally:
                os.close(descriptor)

            os.rename(temporary, self.path)
        except BaseException:
            _remove(temporary)
            raise

        _sync_folder(self.folder)

    def _remove_leftovers(self) -> None:
        """Temporary files of writers that were killed; the lock says that none is at work."""
        for name in os.listdir(self.folder):
            if _TEMPORARY.fullmatch(name):
                _remove(self.folder / name)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Excludes other processes; raises `TimeoutError` after 2 s."""
        descriptor = _open_lock(self.folder / LOCK_NAME)
        try:
            end = time.monotonic() + LOCK_LIMIT_S
            while not _try_lock(descriptor):
                if time.monotonic() >= end:
                    raise TimeoutError

                time.sleep(_LOCK_STEP_S)

            yield
        finally:
            os.close(descriptor)


def _decode(data: bytes) -> tuple[Profile, int]:
    if len(data) > FILE_BYTES_AT_MOST:
        raise _BadFileError("too_large", f"more than {FILE_BYTES_AT_MOST} bytes")

    if not data:
        raise _BadFileError("empty", "the file is empty")

    if not data.strip(b"\0"):
        raise _BadFileError("corrupt", "the file holds nothing but NUL bytes")

    try:
        envelope = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _BadFileError("corrupt", f"not JSON: {_first_line(error)}") from error

    if not isinstance(envelope, dict) or envelope.get("format") != FORMAT:
        raise _BadFileError("corrupt", "not a fingerprint")

    schema = envelope.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise _BadFileError("corrupt", "the schema is not a number")

    if schema > SCHEMA_VERSION:
        raise _BadFileError("future_schema", f"schema {schema} is newer than {SCHEMA_VERSION}")

    if schema < OLDEST_SCHEMA:
        raise _BadFileError("old_schema", f"schema {schema} is older than {OLDEST_SCHEMA}")

    content = envelope.get("profile")
    try:
        checksum = _checksum(content)
    except (ValueError, RecursionError) as error:
        raise _BadFileError("corrupt", f"not a profile: {_first_line(error)}") from error

    if envelope.get("sha256") != checksum:
        raise _BadFileError("checksum", "the checksum does not match the profile")

    try:
        if schema == SCHEMA_VERSION:
            return Profile.model_validate_json(json.dumps(content)), schema

        return migrate(schema, content), schema
    except (ValidationError, ValueError, OverflowError) as error:
        raise _BadFileError("corrupt", f"not a profile: {_first_line(error)}") from error


def _not_a_file(path: Path) -> _BadFileError:
    return _BadFileError("not_a_file", f"{path} is not a regular file")


def _checksum(content: Any) -> str:
    compact = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(compact.encode()).hexdigest()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _unstored(folder: Path, error: OSError) -> Problem:
    kinds = {
        errno.EROFS: "read_only",
        errno.EACCES: "read_only",
        errno.EPERM: "read_only",
        errno.ENOSPC: "no_space",
        errno.EDQUOT: "no_space",
    }
    code = error.errno or 0
    text = f"{folder}: {error.strerror or error}"
    return Problem(kinds.get(code, "not_stored"), text, code)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False

    return True


def _remove(path: Path) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except (IsADirectoryError, PermissionError):
        # A folder once stood in the file's place and was set aside with the bad files.
        shutil.rmtree(path, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
