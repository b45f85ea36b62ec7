"""The folders of the drivers' caches, and that the drivers here really use them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from devices import require_opencl, require_vulkan
from small_disk import full_disk, read_only_disk

from switchgear.backends.driver_caches import environment, make_folders
from switchgear.ipc.errors import DriverError


def test_every_folder_lies_under_the_root(tmp_path: Path) -> None:
    folders = [v for v in environment(tmp_path).values() if v.startswith("/")]
    assert len(folders) == len(set(folders)) >= 8
    assert all(Path(each).is_relative_to(tmp_path / "drivers") for each in folders)
    assert list(tmp_path.iterdir()) == []
    make_folders(tmp_path)
    for each in folders:
        assert Path(each).stat().st_mode & 0o777 == 0o700
        assert list(Path(each).iterdir()) == []

    make_folders(tmp_path)


def test_a_relative_root_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert environment(Path("cache"))["POCL_CACHE_DIR"] == f"{tmp_path}/cache/drivers/pocl"


def test_the_reason_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "drivers").write_text("a file")
    with pytest.raises(DriverError) as caught:
        make_folders(tmp_path)

    assert (caught.value.domain, caught.value.name) == ("errno", "ENOTDIR")
    assert str(tmp_path / "drivers" / "mesa") in caught.value.text


def test_a_read_only_disk_is_named(tmp_path: Path) -> None:
    with read_only_disk(tmp_path / "disk") as disk, pytest.raises(DriverError) as caught:
        make_folders(disk)

    assert caught.value.name == "EROFS"


def test_a_folder_that_was_made_before_the_disk_filled_up(tmp_path: Path) -> None:
    with full_disk(tmp_path / "disk", 256, free_kib=200) as disk:
        with pytest.raises(DriverError) as caught:
            make_folders(disk)

        # The folders are there by now, and little else fits.
        assert caught.value.name == "ENOSPC"
        assert "are needed" in caught.value.text
        fill(disk)
        with pytest.raises(DriverError) as caught:
            make_folders(disk)

        assert caught.value.name == "ENOSPC"


def fill(disk: Path) -> None:
    with open(disk / "more", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 1024)


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]


def run_with_caches(root: Path, home: Path, *arguments: str) -> None:
    make_folders(root)
    home.mkdir()
    subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment(root), "HOME": str(home)},
        check=True,
        capture_output=True,
    )


def test_mesa_writes_there(tmp_path: Path) -> None:
    require_vulkan()
    home = tmp_path / "home"
    run_with_caches(tmp_path, home, "-m", "switchgear.backends.canary")
    assert files_below(tmp_path / "drivers" / "mesa")
    # Nothing where an ordinary program would have put it.
    assert files_below(home) == []


# One kernel is enough: each takes PoCL a second or more.
ONE_KERNEL = """
import pyopencl as cl

device = cl.get_platforms()[0].get_devices()[0]
context = cl.Context([device])
queue = cl.CommandQueue(context)
program = cl.Program(context, "kernel void one(global float *x) { x[0] = 1.0f; }").build()
kernel = cl.Kernel(program, "one")
buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, 4)
kernel.set_args(buffer)
cl.enqueue_nd_range_kernel(queue, kernel, (1,), None).wait()
"""


def test_pocl_and_pyopencl_write_there(tmp_path: Path) -> None:
    require_opencl()
    home = tmp_path / "home"
    run_with_caches(tmp_path, home, "-c", ONE_KERNEL)
    assert files_below(tmp_path / "drivers" / "pocl")
    # pyopencl has a cache of its own.
    assert files_below(tmp_path / "drivers" / "xdg")
    assert files_below(home) == []
