"""The Android files: their grammar, their policy, and init's hand-over of the socket."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from android_init import parse
from daemon_process import DaemonProcess
from devices import require_program
from raw_client import Control, error_name

from switchgear.backends import generate

if TYPE_CHECKING:
    from collections.abc import Sequence

# Nothing in it depends on the Python.
pytestmark = pytest.mark.engine

ROOT: Final = Path(__file__).resolve().parent.parent
ANDROID: Final = ROOT / "android"
POLICY: Final = Path(__file__).resolve().parent / "data" / "sepolicy"
RC: Final = (ANDROID / "switchgear.rc").read_text()
END_LIMIT_S: Final = 15.0
# AIDs that a build may give to the system_ext partition.
SYSTEM_EXT_AIDS: Final = range(7500, 8000)


# init's file.


def test_the_init_file_keeps_to_the_grammar() -> None:
    found = parse(RC)
    assert found.problems == []
    service = found.services["switchgear"]
    assert service.command[1:] == ["serve"]
    assert service.option("capabilities") == []
    assert service.option("disabled") == []
    owner = service.option("user")
    assert owner is not None
    name, kind, mode, *owners = service.option("socket") or []
    assert (name, kind, mode) == ("switchgear", "stream+listen", "0666")
    assert owners == [*owner, *owner]


def test_a_property_turns_it_on_and_off() -> None:
    actions = parse(RC).actions
    assert actions["property:persist.switchgear.enable=1"] == [["enable", "switchgear"]]
    assert actions["property:persist.switchgear.enable=0"] == [["stop", "switchgear"]]


def test_its_folders_are_made_for_its_user() -> None:
    found = parse(RC)
    user = found.services["switchgear"].option("user")
    made = {}
    for command, path, mode, *owners in found.actions["post-fs-data"]:
        assert (command, mode, owners[:1]) == ("mkdir", "0700", user)
        made[path] = mode

    for words in found.services["switchgear"].options:
        if words[0] == "setenv" and words[1].endswith(("_DIR", "HOME")):
            assert words[2] in made


def test_the_user_is_defined_in_the_range_of_its_partition() -> None:
    text = (ANDROID / "config.fs").read_text()
    (section,) = re.findall(r"^\[AID_(\w+)\]$", text, re.MULTILINE)
    (value,) = re.findall(r"^value: (\d+)$", text, re.MULTILINE)
    assert [section.lower()] == parse(RC).services["switchgear"].option("user")
    assert int(value) in SYSTEM_EXT_AIDS


@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        ("    disabled", "    disable", "unknown option disable"),
        ("restart_period 5", "restart_period", "takes 1 to 1"),
        ("restart_period 5", "restart_period soon", "number of seconds"),
        ("stream+listen", "stream+listening", "no type of socket"),
        ("listen 0666", "listen 666x", "no mode"),
        ("oom_score_adjust -200", "oom_score_adjust -2000", "-1000 to 1000"),
        ("rlimit nofile 8192 8192", "rlimit nofile 8192", "takes 3 to 3"),
        ("rlimit nofile", "rlimit files", "no limit files"),
        ("    user system_ext_switchgear\n", "", "no user"),
        ("    class late_start\n", "    class a\n    class b\n", "twice"),
        ("on post-fs-data", "on post-fs-dat", "no trigger"),
        ("on post-fs-data", "on boot && post-fs-data", "one event"),
        ("enable=1\n", "enable\n", "no trigger"),
        ("enable switchgear", "enable switchgeer", "no such service"),
        ("enable switchgear", "enabled switchgear", "unknown command"),
        ("service switchgear /", "service switchgear ", "path of a program"),
        ("on post-fs-data", "    on post-fs-data", "at the margin"),
        ("on post-fs-data\n", "", "stands in no section"),
    ],
)
def test_a_broken_line_is_seen(good: str, bad: str, said: str) -> None:
    assert good in RC
    assert any(said in problem for problem in parse(RC.replace(good, bad, 1)).problems)


# SELinux.


def compiled(policy: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The policy as a module, with what it takes from Android's."""
    m4 = require_program("m4", "m4")
    checkmodule = require_program("checkmodule", "checkpolicy")
    expanded = subprocess.run(
        [m4, str(POLICY / "macros.m4"), "-"],
        input=policy,
        capture_output=True,
        text=True,
        check=True,
    )
    source = folder / "switchgear.te"
    source.write_text((POLICY / "require.te").read_text() + expanded.stdout)
    return subprocess.run(
        [checkmodule, "-M", "-m", "-o", str(folder / "switchgear.mod"), str(source)],
        capture_output=True,
        text=True,
    )


def te() -> str:
    return (ANDROID / "sepolicy" / "switchgear.te").read_text()


def test_the_policy_compiles(tmp_path: Path) -> None:
    done = compiled(te(), tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "switchgear.mod").stat().st_size


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("switchgear gpu_device:chr_file", "switchgear gpu_devices:chr_file"),
        ("execmem", "execmemory"),
        ("init_daemon_domain(switchgear)", "init_demon_domain(switchgear)"),
        ("switchgear_socket:sock_file", "switchgear_socket:socket_file"),
        ("setsched getsched signal sigkill };", "setsched getsched signal sigkill }"),
    ],
)
def test_a_wrong_policy_does_not(tmp_path: Path, good: str, bad: str) -> None:
    assert good in te()
    assert compiled(te().replace(good, bad, 1), tmp_path).returncode != 0


def contexts(name: str) -> list[list[str]]:
    lines = (ANDROID / "sepolicy" / name).read_text().splitlines()
    return [line.split() for line in lines if line and not line.startswith("#")]


def test_contexts_name_types_of_the_policy() -> None:
    declared = set(re.findall(r"^type (\w+)", te(), re.MULTILINE))
    labels = [words[1] for words in contexts("file_contexts")]
    labels += [words[1] for words in contexts("property_contexts")]
    found = [re.fullmatch(r"u:object_r:(\w+):s0", label) for label in labels]
    assert all(found)
    assert {match[1] for match in found if match} == declared - {"switchgear"}


def test_file_contexts_cover_what_the_init_file_uses() -> None:
    patterns = {words[0]: words[1] for words in contexts("file_contexts")}
    found = parse(RC)
    used = {
        found.services["switchgear"].command[0]: "switchgear_exec",
        "/dev/socket/switchgear": "switchgear_socket",
    }
    for words in found.actions["post-fs-data"]:
        used[words[1]] = "switchgear_data_file"

    for path, wanted in used.items():
        labels = [label for pattern, label in patterns.items() if re.fullmatch(pattern, path)]
        assert labels == [f"u:object_r:{wanted}:s0"], path

    assert contexts("property_contexts")[0][0] == "persist.switchgear.enable"


# Init's hand-over.


class Init:
    """Makes the socket as init does, and starts the daemon with it."""

    def __init__(self, daemon: DaemonProcess, *, listening: bool) -> None:
        self._daemon = daemon
        self.path = daemon.folder / "switchgear"
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.bind(str(self.path))
        if listening:
            self._sock.listen(8)

    def start(self, variable: str, arguments: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        fd = self._sock.fileno()
        command = [sys.executable, "-W", "error", "-m", "switchgear", "serve", *arguments]
        return subprocess.Popen(
            command,
            env={
                **self._daemon.environment,
                variable: str(fd),
                "SWITCHGEAR_STATE_DIR": str(self._daemon.state_dir),
                "SWITCHGEAR_CACHE_DIR": str(self._daemon.folder / "cache"),
                # Not there, which is no error.
                "SWITCHGEAR_CONFIG": str(self._daemon.folder / "none.toml"),
            },
            pass_fds=[fd],
            cwd="/",
        )

    def close(self) -> None:
        self._sock.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("listening", [True, False])
def test_init_hands_its_socket_over(listening: bool) -> None:
    daemon = DaemonProcess()
    init = Init(daemon, listening=listening)
    try:
        process = init.start("ANDROID_SOCKET_switchgear")
        try:
            served(init, process.pid, waits=listening)
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(END_LIMIT_S)

        assert status == 0
        # It is init's: the next start gets the same one.
        assert init.path.is_socket()
    finally:
        init.close()
        daemon.remove()


def connected(init: Init) -> Control:
    """Connects as soon as somebody listens."""
    while True:
        try:
            return Control(init.path)
        except ConnectionRefusedError:
            continue


def served(init: Init, pid: int, *, waits: bool) -> None:
    # With "+listen" the first client waits in the socket until the daemon is there.
    with Control(init.path) if waits else connected(init) as control:
        assert control.call("GetInfo")["pid"] == pid
        control.load(generate.identity((4,)), name="echo")
        with control.open_session("echo") as session:
            session.write(0, [1.0, 2.0, 3.0, 4.0])
            session.infer(1)
            assert error_name(session.receive()) == ""
            assert session.read(0, 4) == [1.0, 2.0, 3.0, 4.0]

        # No worker may take init's socket for its own.
        for row in control.call("GetStatus")["workers"]:
            environment = Path(f"/proc/{row['pid']}/environ").read_bytes()
            assert b"ANDROID_SOCKET_" not in environment


@pytest.mark.parametrize("value", ["x", "999", "0"])
def test_a_wrong_descriptor_is_told(value: str) -> None:
    daemon = DaemonProcess()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "switchgear", "serve"],
            env={**daemon.environment, "ANDROID_SOCKET_switchgear": value},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=END_LIMIT_S,
        )
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert "descriptor" in done.stderr or value in done.stderr
    finally:
        daemon.remove()
