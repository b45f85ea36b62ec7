"""Wheel and sdist hold the real files, though the packages of src/switchgear are links.

Built by setuptools itself from a copy of the tree, so that no network is needed and the
checkout gets no build folder.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("ipc", "client", "backends", "fingerprints", "daemon")
NOT_COPIED = shutil.ignore_patterns(
    ".venv*", ".git", "__pycache__", ".*_cache", ".cache", ".hypothesis", "*.egg-info", "build",
    "dist", "out", "*.so",
)  # fmt: skip
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"


def build(kind: str, tree: Path, target: Path) -> Path:
    """The wheel or the sdist of the source `tree`, made in the folder `target`."""
    target.mkdir()
    subprocess.run(
        [sys.executable, "-c", BUILD.format(kind=kind), str(target)],
        cwd=tree,
        check=True,
        capture_output=True,
    )
    (made,) = target.iterdir()
    return made


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("packaging") / "tree"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=NOT_COPIED)
    return copy


@pytest.fixture(scope="module")
def sdist(tree: Path) -> Path:
    return build("sdist", tree, tree.parent / "sdist")


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    return build("wheel", tree, tree.parent / "wheel")


def data_files(folder: Path) -> set[str]:
    """What the package's code reads at run time, relative to the checkout."""
    read = {
        str(path.relative_to(folder))
        for layer in LAYERS
        for suffix in ("*.py", "*.varlink", "*.spv", "*.comp", "*.tflite", "*.toml")
        for path in (folder / layer).rglob(suffix)
    }
    shipped = {
        str(path.relative_to(folder))
        for part in ("systemd", "android", "client/c")
        for path in (folder / part).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len(shipped) > 10
    return read | shipped


def test_the_wheel_holds_every_module_and_data_file(tree: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        infos = {info.filename: info for info in archive.infolist()}
        for name in data_files(tree):
            packed = archive.read(f"switchgear/{name}")
            assert packed == (tree / name).read_bytes(), name

        entry_points = next(name for name in infos if name.endswith("entry_points.txt"))
        assert "switchgear = switchgear.daemon.cli:main" in archive.read(entry_points).decode()

    assert "switchgear/py.typed" in infos
    tops = {name.partition("/")[0] for name in infos}
    assert tops == {"switchgear", f"switchgear-{wheel.name.split('-')[1]}.dist-info"}
    # A link would be stored with its own file type in the high bits of the attributes.
    assert not [n for n, i in infos.items() if (i.external_attr >> 28) == 0o12]


def test_the_sdist_builds_and_tests_itself(tree: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}

    # Not tarfile's own: Python 3.11.2 has no `filter` yet, and later ones warn without it.
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(tmp_path)], check=True)
    wanted = {"dev", "constraints.txt", "LICENSE", "README.md", "pyproject.toml", ".ci/run"}
    wanted |= {str(p.relative_to(tree)) for p in (tree / "tests").rglob("*") if p.is_file()}
    wanted |= {str(p.relative_to(tree)) for p in (tree / "docs").glob("*.md")}
    assert wanted - set(members) == set()
    assert members["dev"].mode & 0o111
    assert not [name for name, member in members.items() if member.issym()]

    (unpacked,) = tmp_path.iterdir()
    again = build("wheel", unpacked, tmp_path / "again")
    with zipfile.ZipFile(again) as archive:
        names = set(archive.namelist())

    assert {f"switchgear/{name}" for name in data_files(tree)} <= names
