"""Marks of first uses: written before, cleared after, counted, forgiven, expired."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from small_disk import full_disk

from switchgear.backends.crash_marker import EXPIRY_S, CrashMarkers

if TYPE_CHECKING:
    from pathlib import Path

KEY = {"backend": "vulkan", "engine": "x 1", "identity.driver": "Mesa 25", "precision": "fp16"}


class Clock:
    """Seconds since 1970, set by hand."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def marks(tmp_path: Path, clock: Clock) -> CrashMarkers:
    return CrashMarkers(tmp_path / "markers", clock=clock)


DIE = """
import json, os, pathlib, signal, sys
from switchgear.backends.crash_marker import CrashMarkers

CrashMarkers(pathlib.Path(sys.argv[1])).begin(json.loads(sys.argv[2]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_driver_that_kills_twice_is_not_asked_a_third_time(tmp_path: Path) -> None:
    folder = tmp_path / "markers"
    reasons = []
    for _ in range(2):
        reasons.append(CrashMarkers(folder).reason(KEY))
        ended = subprocess.run([sys.executable, "-c", DIE, str(folder), json.dumps(KEY)])
        assert ended.returncode == -signal.SIGKILL

    assert reasons == ["", ""]
    reason = CrashMarkers(folder).reason(KEY)
    assert "ended the process 2 times" in reason
    assert "168 hours" in reason


def test_a_use_that_came_back_is_forgotten(marks: CrashMarkers) -> None:
    for _ in range(5):
        assert marks.reason(KEY) == ""
        marks.begin(KEY)
        marks.clear(KEY)

    assert marks.marks() == []
    marks.clear(KEY)


def test_a_success_between_two_crashes_starts_anew(marks: CrashMarkers) -> None:
    marks.begin(KEY)
    marks.begin(KEY)
    marks.clear(KEY)
    marks.begin(KEY)
    assert marks.reason(KEY) == ""


@pytest.mark.parametrize("changed", ["engine", "identity.driver", "precision", "backend"])
def test_another_version_is_asked_again(marks: CrashMarkers, changed: str) -> None:
    marks.begin(KEY)
    marks.begin(KEY)
    assert marks.reason(KEY)
    assert marks.reason({**KEY, changed: "other"}) == ""


def test_a_mark_expires(marks: CrashMarkers, clock: Clock) -> None:
    marks.begin(KEY)
    marks.begin(KEY)
    clock.now_s += EXPIRY_S - 60
    assert marks.reason(KEY)
    clock.now_s += 120
    assert marks.reason(KEY) == ""
    assert marks.marks() == []


def test_a_clock_that_was_set_back_does_not_keep_a_mark_for_ever(
    marks: CrashMarkers, clock: Clock
) -> None:
    marks.begin(KEY)
    marks.begin(KEY)
    clock.now_s -= EXPIRY_S / 2
    assert marks.reason(KEY)
    clock.now_s -= EXPIRY_S
    assert marks.reason(KEY) == ""


def test_who_was_killed_on_purpose_does_not_count(marks: CrashMarkers) -> None:
    marks.begin(KEY)
    marks.forgive(os.getpid())
    assert marks.marks() == []
    marks.begin(KEY)
    marks.begin(KEY)
    marks.forgive(os.getpid() + 1)
    assert marks.reason(KEY)
    marks.forgive(os.getpid())
    assert marks.reason(KEY) == ""
    (mark,) = marks.marks()
    assert (mark.ends, mark.pid, mark.key) == (1, 0, KEY)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 9}', b"x" * 100_000])
def test_a_damaged_mark_marks_nothing(
    tmp_path: Path, marks: CrashMarkers, content: bytes
) -> None:
    marks.begin(KEY)
    marks.begin(KEY)
    (path,) = (tmp_path / "markers").iterdir()
    path.write_bytes(content)
    assert marks.reason(KEY) == ""
    assert not path.exists()


def test_a_full_disk_stops_the_use_before_it_begins(tmp_path: Path) -> None:
    with full_disk(tmp_path / "disk", 64) as disk, pytest.raises(OSError, match="space"):
        CrashMarkers(disk / "markers").begin(KEY)
