"""Verdicts on models survive restarts, bad files and kills, and are written without waiting."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from switchgear.daemon.verdicts import KEPT_BYTES, KEPT_VERDICTS, Verdicts, check_verdict

if TYPE_CHECKING:
    from pathlib import Path

REFUSED = {"ok": False, "domain": "tflite", "code": 1, "name": "ERROR", "text": "no"}
TENSOR = {
    "name": "x",
    "dtype": "float32",
    "shape": [1, 4],
    "signature": [-1, 4],
    "capacity_bytes": 16,
    "dynamic": False,
}
SOUND: dict[str, Any] = {
    "ok": True,
    "engine": "e",
    "engine_version": "1",
    "parse_us": 1,
    "first_run_us": 2,
    "run_us": 3,
    "instance_bytes": 4,
    "inputs": [TENSOR],
    "outputs": [TENSOR],
    "names": "signature",
    "state": False,
    "operators": {"ADD": 1},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "verdicts.json"


def test_what_was_kept_is_there_again(path: Path) -> None:
    kept = Verdicts(path, check_verdict)
    kept.keep("a", SOUND)
    kept.keep("b", REFUSED)
    kept.flush()

    again = Verdicts(path, check_verdict)
    assert again.get("a") == SOUND
    assert again.get("b") == REFUSED
    assert again.get("c") is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["verdicts.json"]


def test_the_one_not_asked_for_longest_goes(path: Path) -> None:
    kept = Verdicts(path, check_verdict)
    for number in range(KEPT_VERDICTS):
        kept.keep(str(number), REFUSED)

    kept.get("0")
    kept.keep("one more", REFUSED)
    kept.flush()
    again = Verdicts(path, check_verdict)

    assert again.get("0") is not None
    assert again.get("1") is None
    assert again.get("2") is not None


def test_large_verdicts_are_kept_in_a_bound_of_their_own(path: Path) -> None:
    kept = Verdicts(path, check_verdict)
    large = {**REFUSED, "text": "x" * (KEPT_BYTES // 10)}
    for number in range(12):
        kept.keep(str(number), large)

    kept.keep("11", REFUSED)
    kept.keep("small", REFUSED)
    kept.flush()
    assert path.stat().st_size < 1.1 * KEPT_BYTES
    again = Verdicts(path, check_verdict)
    for verdicts in (kept, again):
        known = [n for n in range(12) if verdicts.get(str(n)) is not None]
        assert known == [*range(3, 12)]
        assert verdicts.get("small") is not None


def test_the_newest_state_is_the_last_one_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    written: list[int] = []
    write = Verdicts._write

    def slow_disk(self: Verdicts, state: Any) -> None:
        begun.set()
        assert go_on.wait(10)
        written.append(len(state))
        write(self, state)

    monkeypatch.setattr(Verdicts, "_write", slow_disk)
    kept = Verdicts(path, check_verdict)
    kept.keep("0", REFUSED)
    assert begun.wait(10)
    # The disk does not answer, and none of these waits for it.
    for number in range(1, 50):
        kept.keep(str(number), REFUSED)

    go_on.set()
    kept.flush()

    # Those in between are left out; the file is the last one.
    assert written == [1, 50]
    assert Verdicts(path, check_verdict).get("49") == REFUSED


def test_the_end_of_the_process_waits_for_the_last_write(path: Path) -> None:
    script = (
        "import sys, pathlib; from switchgear.daemon.verdicts import Verdicts, check_verdict\n"
        "kept = Verdicts(pathlib.Path(sys.argv[1]), check_verdict)\n"
        f"for n in range(100): kept.keep(str(n), {REFUSED!r})\n"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)

    assert Verdicts(path, check_verdict).get("99") == REFUSED


def test_a_kill_in_the_middle_leaves_a_whole_file(path: Path) -> None:
    script = (
        "import sys, pathlib; from switchgear.daemon.verdicts import Verdicts, check_verdict\n"
        "kept = Verdicts(pathlib.Path(sys.argv[1]), check_verdict)\n"
        "print('on', flush=True)\n"
        f"n = 0\nwhile True:\n    n += 1; kept.keep(str(n % 500), {REFUSED!r})\n"
    )
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"on\n"
            while not path.exists():
                pass

            process.kill()

        assert json.loads(path.read_text())["verdicts"]

    assert Verdicts(path, check_verdict).get("1") == REFUSED
    assert [entry.name for entry in path.parent.iterdir()] == ["verdicts.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 4096,
        b"{",
        b"[]",
        b"[" * 100_000,
        b'{"schema": 2, "verdicts": {}}',
        b'{"schema": 1}',
        b'{"schema": 1, "verdicts": []}',
        b'{"schema": 1, "verdicts": {"a": {"ok": 1}}}',
        b'{"schema": 1, "verdicts": {"a": {"ok": true}}}',
        b"\xff\xfe",
    ],
    ids=[
        *("empty", "zeros", "cut", "list", "deep", "schema", "missing", "kind", "number"),
        *("fields", "utf8"),
    ],
)
def test_a_bad_file_is_told_and_begun_anew(
    content: bytes, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        kept = Verdicts(path, check_verdict)

    assert str(path) in caplog.text
    assert kept.get("a") is None
    kept.keep("a", SOUND)
    kept.flush()
    assert Verdicts(path, check_verdict).get("a") == SOUND


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": [{**TENSOR, "dtype": "float33"}]},
        {"outputs": [{**TENSOR, "capacity_bytes": -1}]},
        {"outputs": None},
        {"outputs": [{}]},
        {"run_us": "soon"},
        {"instance_bytes": -4},
        {"state": 1},
        {"names": None},
        {"operators": {"ADD": "some"}},
    ],
)
def test_what_is_no_verdict_is_refused(change: dict[str, Any]) -> None:
    check_verdict(SOUND)
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        check_verdict({**SOUND, **change})


def test_a_folder_that_takes_no_file_is_told(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    kept = Verdicts(path, check_verdict)
    with caplog.at_level(logging.WARNING):
        kept.keep("a", SOUND)
        kept.flush()

    assert "No space left" in caplog.text
    assert kept.get("a") == SOUND
    assert list(path.parent.iterdir()) == []
