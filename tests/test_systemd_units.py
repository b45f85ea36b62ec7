"""The unit files, held against systemd's own tools; and the command that writes them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from cli_command import switchgear, switchgear_json
from devices import require_program

from switchgear.daemon.cli import install_service, service_program
from switchgear.daemon.cli.command import CommandError

UNITS: Final = Path(__file__).resolve().parent.parent / "systemd"
NAMES: Final = ("switchgear.service", "switchgear.socket")
# The bar of the issue; systemd counts in tenths.
EXPOSURE_TENTHS: Final = 20


def analyze(*arguments: str | Path) -> str:
    """What systemd-analyze says, which is nothing where all is well; it has to succeed."""
    program = require_program("systemd-analyze", "systemd")
    done = subprocess.run(
        [program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": "/tmp"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The root of a system that is not running."""
    root = tmp_path / "image"
    program = root / "usr/bin/switchgear"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (root / "etc").mkdir()
    (root / "etc/group").write_text("root:x:0:\nrender:x:105:\n")
    return root


def copied(folder: Path, target: Path) -> list[Path]:
    """Both units of a folder, with a program that is here: verify looks for it."""
    target.mkdir()
    paths = []
    for name in NAMES:
        text = (folder / name).read_text().replace("/usr/bin/switchgear", sys.executable)
        (target / name).write_text(text)
        paths.append(target / name)

    return paths


def test_the_units_of_a_system_are_sound(tmp_path: Path) -> None:
    units = copied(UNITS, tmp_path / "units")
    assert analyze("verify", "--recursive-errors=no", "--man=no", *units) == ""


def test_the_units_of_a_user_are_sound(tmp_path: Path) -> None:
    units = copied(UNITS / "user", tmp_path / "units")
    said = analyze("--user", "verify", "--recursive-errors=no", "--man=no", *units)
    assert said == ""


def test_a_wrong_key_would_be_seen(tmp_path: Path) -> None:
    units = copied(UNITS, tmp_path / "units")
    units[0].write_text(units[0].read_text().replace("WatchdogSec=", "WatchDogSec="))
    program = require_program("systemd-analyze", "systemd")
    done = subprocess.run(
        [program, "verify", "--recursive-errors=no", "--man=no", *map(str, units)],
        capture_output=True,
        text=True,
    )
    assert "WatchDogSec" in done.stderr


def test_the_exposure_is_below_the_bar(tmp_path: Path) -> None:
    service, _ = copied(UNITS, tmp_path / "units")
    analyze("security", "--offline=true", f"--threshold={EXPOSURE_TENTHS}", service)


def test_every_file_of_the_package_is_written_somewhere() -> None:
    ours = {
        str(path.relative_to(UNITS))
        for path in UNITS.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert ours == {*install_service.SYSTEM_FILES, *install_service.USER_FILES}


def test_an_image_gets_all_of_it_and_loses_all_of_it(image: Path) -> None:
    require_program("systemctl", "systemd")
    before = sorted(image.rglob("*"))
    report = switchgear_json("install-service", "--root", image)
    written = [Path(path) for path in report["files"]]
    assert [path.is_file() for path in written] == [True] * 4
    service = image / "etc/systemd/system/switchgear.service"
    assert "\nExecStart=/usr/bin/switchgear serve\n" in service.read_text()
    wants = image / "etc/systemd/system/sockets.target.wants/switchgear.socket"
    assert wants.is_symlink()
    # Of the groups, the one that the image has.
    accounts = (image / "etc/sysusers.d/switchgear.conf").read_text()
    assert "m switchgear render" in accounts
    assert "video" not in accounts.partition("\n")[2]
    again = switchgear_json("install-service", "--root", image)
    assert again["files"] == report["files"]

    removed = switchgear_json("install-service", "--root", image, "--uninstall")["removed"]
    assert {str(path) for path in written} <= set(removed)
    # Folders of systemd's own may stay.
    left = [p for p in sorted(image.rglob("*")) if p not in before and not p.is_dir()]
    assert left == []


def test_an_image_without_the_program_is_refused(image: Path) -> None:
    (image / "usr/bin/switchgear").unlink()
    done = switchgear("install-service", "--root", image)
    assert done.returncode == 1
    assert "--program" in done.stderr
    assert not (image / "etc/systemd").exists()


def test_the_configuration_of_people_stays(image: Path) -> None:
    require_program("systemctl", "systemd")
    switchgear_json("install-service", "--root", image)
    own = image / "etc/switchgear/switchgear.toml"
    own.parent.mkdir()
    own.write_text("[daemon]\n")
    done = switchgear("install-service", "--root", image, "--uninstall")
    assert done.returncode == 0
    assert "it holds your configuration" in done.stderr
    assert own.exists()


def test_the_user_units_are_printed_for_this_machine(tmp_path: Path) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    files = switchgear_json("install-service", "--user", "--print", env=env)
    folder = tmp_path / "systemd/user"
    assert set(files) == {str(folder / name) for name in NAMES}
    assert not folder.exists()
    (line,) = [
        line
        for line in files[str(folder / "switchgear.service")].splitlines()
        if line.startswith("ExecStart=")
    ]
    words = shlex.split(line.removeprefix("ExecStart="))
    done = subprocess.run([*words[:-1], "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("switchgear ")


@pytest.mark.parametrize("arguments", [("--user", "--root", "/x"), ("--uninstall", "--print")])
def test_options_that_do_not_go_together(arguments: tuple[str, ...]) -> None:
    assert switchgear("install-service", *arguments).returncode == 2


def test_a_program_that_the_user_of_the_service_cannot_read(tmp_path: Path) -> None:
    program = tmp_path / "closed" / "switchgear"
    program.parent.mkdir()
    shutil.copy("/bin/true", program)
    program.parent.chmod(0o700)
    with pytest.raises(CommandError, match="which the service does not see"):
        service_program.of_this_machine(program, for_everybody=True)

    assert service_program.of_this_machine(program, for_everybody=False).words[0] == str(
        program
    )


def test_a_program_at_home_is_not_hidden() -> None:
    program = service_program.Program(("/home/me/bin/switchgear", "serve"), in_home=True)
    text = program.apply((UNITS / "switchgear.service").read_text())
    assert "\nProtectHome=read-only\n" in text
    assert "\nExecStart=/home/me/bin/switchgear serve\n" in text


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("/usr/bin/switchgear", "/usr/bin/switchgear"),
        ("/opt/my tools/switchgear", '"/opt/my tools/switchgear"'),
        ("/opt/100%/$x", '"/opt/100%%/$$x"'),
        ('/opt/"q"\\', '"/opt/\\"q\\"\\\\"'),
    ],
)
def test_words_are_quoted_as_systemd_reads_them(word: str, wanted: str) -> None:
    assert service_program.quoted(word) == wanted
