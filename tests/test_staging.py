"""Copies of prepared files: what is new in them takes its place, the rest is left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from switchgear.daemon.staging import discard, publish, stage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "driver").mkdir(parents=True)
    (folder / "artefact").write_bytes(b"old")
    (folder / "golden").write_bytes(b"same")
    (folder / "driver" / "blob").write_bytes(b"old blob")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_nothing_changes_until_it_is_published(folder: Path) -> None:
    before = content(folder)
    staged = stage(folder)
    assert content(staged) == before
    # Written in place, as a driver may.
    with (staged / "driver" / "blob").open("r+b") as file:
        file.write(b"new")

    assert content(folder) == before
    discard(staged)
    assert not staged.exists()
    assert content(folder) == before


def test_what_is_new_or_changed_is_moved_and_nothing_else(folder: Path) -> None:
    kept = (folder / "golden").stat().st_ino
    staged = stage(folder)
    (staged / "artefact").write_bytes(b"new")
    (staged / "more").mkdir()
    (staged / "more" / "tuned").write_bytes(b"tuned")
    with (folder / "artefact").open("rb") as reader:
        publish(staged, folder)
        # Whoever has it open keeps what it has.
        assert reader.read() == b"old"

    assert content(folder) == {
        "artefact": b"new",
        "golden": b"same",
        "driver/blob": b"old blob",
        "more/tuned": b"tuned",
    }
    assert (folder / "golden").stat().st_ino == kept


def test_what_a_killed_daemon_left_is_made_anew(folder: Path) -> None:
    staged = stage(folder)
    (staged / "half").write_bytes(b"half")
    assert "half" not in content(stage(folder))


def test_a_folder_that_is_not_there_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "new"
    staged = stage(folder)
    (staged / "artefact").write_bytes(b"first")
    publish(staged, folder)
    assert content(folder) == {"artefact": b"first"}
    assert os.stat(folder).st_mode & 0o777 == 0o700
