"""What drivers consist of: a change is seen, and nothing else counts as one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from replaced_file import replace_file

from switchgear.backends import driver_files
from switchgear.backends.driver_files import signature


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """A machine whose registries are in a folder of the test."""
    for name in ("vendors", "lib", "vulkan/icd.d"):
        (tmp_path / name).mkdir(parents=True)

    return {
        "OCL_ICD_VENDORS": str(tmp_path / "vendors"),
        "LD_LIBRARY_PATH": str(tmp_path / "lib"),
        "XDG_DATA_DIRS": str(tmp_path),
        "HOME": str(tmp_path / "home"),
    }


def test_nothing_new_is_the_same(variables: dict[str, str]) -> None:
    assert signature({}, variables) == signature({}, variables)


def test_each_part_of_a_driver_counts(tmp_path: Path, variables: dict[str, str]) -> None:
    library = tmp_path / "elsewhere" / "libcl.so"
    options = {"delegate": str(tmp_path / "npu" / "delegate.so"), "threads": 2}
    seen = [signature(options, variables)]

    def changed() -> bool:
        seen.append(signature(options, variables))
        return seen[-1] not in seen[:-1]

    # An OpenCL driver: its manifest, and the library that this names, there and anew.
    (tmp_path / "vendors" / "a.icd").write_text(f"{library}\n")
    assert changed()
    library.parent.mkdir()
    library.write_bytes(b"one")
    assert changed()
    replace_file(library, b"two")
    assert changed()
    # A Vulkan driver.
    mesa = tmp_path / "elsewhere" / "mesa.so"
    manifest = f'{{"ICD": {{"library_path": "{mesa}"}}}}'
    (tmp_path / "vulkan" / "icd.d" / "mesa.json").write_text(manifest)
    assert changed()
    mesa.write_bytes(b"mesa")
    assert changed()
    # A library of the loader's path, and what the options name.
    (tmp_path / "lib" / "libOpenCL.so.1").write_bytes(b"loader")
    assert changed()
    (tmp_path / "npu").mkdir()
    (tmp_path / "npu" / "delegate.so").write_bytes(b"npu")
    assert changed()


def test_a_node_counts_by_its_number_and_rights(
    tmp_path: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_files, "NODES", (f"{tmp_path}/accel*",))
    before = signature({}, variables)
    (tmp_path / "accel0").symlink_to("/dev/null")
    there = signature({}, variables)
    assert there != before
    # That it is used, is no change.
    Path("/dev/null").write_bytes(b"x")
    assert signature({}, variables) == there
    (tmp_path / "accel0").unlink()
    (tmp_path / "accel0").symlink_to("/dev/zero")
    assert signature({}, variables) != there


def test_what_cannot_be_read_is_no_error(tmp_path: Path, variables: dict[str, str]) -> None:
    (tmp_path / "vendors" / "loop.icd").symlink_to("loop.icd")
    (tmp_path / "vendors" / "bytes.icd").write_bytes(os.urandom(70000))
    (tmp_path / "vendors" / "folder.icd").mkdir()
    options = {"deep": [[[[[[[[[["/a"]]]]]]]]]], "name": "delegate.so", "number": 3}
    assert signature(options, variables)
