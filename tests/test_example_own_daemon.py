"""The example's daemon: it never outlives the block, and says why it did not start.

What is started is a stand-in for the interpreter; the test of the example itself
runs the real one.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import examples_path
import own_daemon
import pytest
from own_daemon import DaemonError, running_daemon

if TYPE_CHECKING:
    from pathlib import Path

assert examples_path.EXAMPLES.is_dir()

_LISTEN = """
import json, os, pathlib, signal, socket, sys
path = pathlib.Path(sys.argv[sys.argv.index("--socket") + 1])
kept = {name: value for name, value in os.environ.items() if name.startswith("SWITCHGEAR_")}
path.with_name("environment.json").write_text(json.dumps([os.getpid(), kept]))
listening = socket.socket(socket.AF_UNIX)
listening.bind(str(path))
listening.listen()
"""
_UNTIL_TERMINATED = _LISTEN + "signal.pause()\n"
_STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    + _LISTEN
    + ("while True: signal.pause()\n")
)
_BROKEN = "import sys; print('no such option: --socket', file=sys.stderr); sys.exit(2)\n"
_SILENT = "import signal; signal.pause()\n"


def interpreter(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a script in the place of the interpreter; returns the daemon's folder."""
    script = folder / "interpreter"
    script.write_text(f"#!{sys.executable}\n{body}")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    home = folder / "home"
    home.mkdir()
    return home


def no_report(text: str) -> None:
    assert text


def child_is_gone() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True

    return False


def test_it_listens_inside_the_block_and_is_gone_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = interpreter(tmp_path, _UNTIL_TERMINATED, monkeypatch)
    reports: list[str] = []

    with running_daemon(home, report=reports.append) as path:
        assert path.is_socket()
        assert path.parent == home
        assert not child_is_gone()

    assert child_is_gone()
    assert len(reports) == 3


def test_its_folders_are_not_those_of_another_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = interpreter(tmp_path, _UNTIL_TERMINATED, monkeypatch)
    monkeypatch.setenv("SWITCHGEAR_STATE_DIR", "/nowhere")

    with running_daemon(home, report=no_report):
        written = (home / "environment.json").read_text()

    assert "/nowhere" not in written
    assert str(home / "state") in written


def test_an_error_in_the_block_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = interpreter(tmp_path, _UNTIL_TERMINATED, monkeypatch)

    with pytest.raises(ZeroDivisionError), running_daemon(home, report=no_report):
        raise ZeroDivisionError

    assert child_is_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_it_and_handlers_are_as_before(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = interpreter(tmp_path, _UNTIL_TERMINATED, monkeypatch)
    before = signal.getsignal(number)

    with pytest.raises(SystemExit) as caught, running_daemon(home, report=no_report):
        signal.raise_signal(number)

    assert caught.value.code == 128 + number
    assert child_is_gone()
    assert signal.getsignal(number) == before


def test_one_that_ignores_the_stop_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = interpreter(tmp_path, _STUBBORN, monkeypatch)
    monkeypatch.setattr(own_daemon, "_STOP_LIMIT_S", 0.1)
    reports: list[str] = []

    with running_daemon(home, report=reports.append):
        pass

    assert child_is_gone()
    assert f"status {-signal.SIGKILL}" in reports[-1]


def test_one_that_ends_at_once_shows_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = interpreter(tmp_path, _BROKEN, monkeypatch)

    with (
        pytest.raises(DaemonError, match=r"(?s)status 2.*no such option: --socket"),
        running_daemon(home, report=no_report),
    ):
        pytest.fail("there is no daemon")

    assert child_is_gone()


def test_one_that_never_listens_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = interpreter(tmp_path, _SILENT, monkeypatch)
    monkeypatch.setattr(own_daemon, "_READY_LIMIT_S", 0.1)

    with (
        pytest.raises(DaemonError, match="no daemon on"),
        running_daemon(home, report=no_report),
    ):
        pytest.fail("there is no daemon")

    assert child_is_gone()
