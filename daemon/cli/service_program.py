"""Which program the service runs, and what a unit file must say so that it may."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import switchgear
from switchgear.daemon.cli.command import CommandError

# The line of the unit files as they ship.
_EXEC: Final = "ExecStart=/usr/bin/switchgear serve"
_HIDES_HOMES: Final = "ProtectHome=yes"
_HOMES: Final = (Path("/home"), Path("/root"), Path("/run/user"))
_TEMPORARY: Final = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108
# Of the words of systemd.service(5): what is special within double quotes, and what needs them.
_ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "%": "%%", "$": "$$"})


@dataclass(frozen=True, slots=True)
class Program:
    """`words` is the command line. `in_home`: it lies where ProtectHome=yes hides it."""

    words: tuple[str, ...]
    in_home: bool = False

    def apply(self, text: str) -> str:
        """A unit file that runs this program; other files come back as they are."""
        text = text.replace(_EXEC, "ExecStart=" + " ".join(quoted(word) for word in self.words))
        return text.replace(_HIDES_HOMES, "ProtectHome=read-only") if self.in_home else text


def quoted(word: str) -> str:
    escaped = word.translate(_ESCAPES)
    plain = escaped == word and not any(mark in word for mark in " \t';")
    return escaped if plain else f'"{escaped}"'


def of_this_machine(program: Path | None, *, for_everybody: bool) -> Program:
    """The given program, else this Python with this package.

    :raises CommandError: it is not there, or the service's user could not read it.
    """
    if program is not None:
        words: tuple[str, ...] = (str(program.absolute()), "serve")
        needed = [program.absolute()]
        if not os.access(program, os.X_OK):
            raise CommandError(f"{program} is no program")
    else:
        # -P: what lies in the working folder is not imported.
        words = (sys.executable, "-P", "-m", "switchgear", "serve")
        package = Path(switchgear.__file__).parent
        needed = [Path(sys.executable), Path(sys.executable).resolve(), package]
        needed += [package.joinpath("daemon").resolve()]

    if not for_everybody:
        return Program(words)

    for path in needed:
        _check_readable(path)

    inside = any(path.is_relative_to(home) for path in needed for home in _HOMES)
    return Program(words, in_home=inside)


def _check_readable(path: Path) -> None:
    for folder in _TEMPORARY:
        if path.is_relative_to(folder):
            raise CommandError(f"{path} lies in {folder}, which the service does not see")

    for part in (*reversed(path.parents), path):
        # A folder has to be entered, a file to be read.
        wanted = stat.S_IXOTH if part.is_dir() else stat.S_IROTH
        if not part.stat().st_mode & wanted:
            raise CommandError(
                f"the service's user may not read {path} (see {part}); install Switchgear "
                "where every user may, for example: python3 -m venv /opt/switchgear && "
                "/opt/switchgear/bin/pip install switchgear"
            )


def of_image(root: Path, program: Path | None) -> Program:
    """The program of an image; `program` is its path within the image.

    :raises CommandError: the image has none.
    """
    if not root.is_dir():
        raise CommandError(f"{root} is no folder")

    places = (
        [program]
        if program
        else [Path("/usr/bin/switchgear"), Path("/usr/local/bin/switchgear")]
    )
    for place in places:
        inside = root / str(place).lstrip("/")
        if inside.exists() or inside.is_symlink():
            return Program((str(place), "serve"))

    names = " or ".join(str(place) for place in places)
    raise CommandError(f"{root} has no {names}; name it with --program PATH")
