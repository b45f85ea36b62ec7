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

from switchgear.backends.driver_caches import clear, environment, make_folders
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
    assert f"{tmp_path}/drivers/" in caught.value.text


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


def run_with_caches(
    root: Path, home: Path, *arguments: str
) -> subprocess.CompletedProcess[bytes]:
    make_folders(root)
    home.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment(root), "HOME": str(home)},
        capture_output=True,
    )


def flip_bytes(folder: Path) -> None:
    for path in files_below(folder):
        content = bytearray(path.read_bytes())
        content[::97] = bytes(byte ^ 0x55 for byte in content[::97])
        path.write_bytes(content)


# Four kernels compiled twice: 4 s of CPU, as with PoCL.
@pytest.mark.timeout(60)
def test_mesa_writes_there_and_survives_damage(tmp_path: Path) -> None:
    require_vulkan()
    home = tmp_path / "home"
    assert run_with_caches(tmp_path, home, "-m", "switchgear.backends.canary").returncode == 0
    assert files_below(tmp_path / "drivers" / "mesa")
    # Nothing where an ordinary program would have put it.
    assert files_below(home) == []
    flip_bytes(tmp_path / "drivers" / "mesa")
    assert run_with_caches(tmp_path, home, "-m", "switchgear.backends.canary").returncode == 0


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


# PoCL compiles for 3 s of CPU here, which a busy machine makes ten times as long.
@pytest.mark.timeout(60)
def test_pocl_and_pyopencl_write_there_and_a_cleared_cache_works_again(tmp_path: Path) -> None:
    require_opencl()
    home = tmp_path / "home"
    assert run_with_caches(tmp_path, home, "-c", ONE_KERNEL).returncode == 0
    assert files_below(tmp_path / "drivers" / "pocl")
    # pyopencl has a cache of its own.
    assert files_below(tmp_path / "drivers" / "xdg")
    assert files_below(home) == []

    flip_bytes(tmp_path / "drivers")
    clear(tmp_path, "opencl")
    assert files_below(tmp_path / "drivers") == []
    assert run_with_caches(tmp_path, home, "-c", ONE_KERNEL).returncode == 0
    assert files_below(tmp_path / "drivers" / "pocl")


def test_clearing_keeps_what_is_not_the_backends(tmp_path: Path) -> None:
    make_folders(tmp_path)
    others = [tmp_path / "blobs" / "a.blob", tmp_path / "drivers" / "pocl" / "program"]
    mesa = tmp_path / "drivers" / "mesa" / "part" / "shader"
    outside = tmp_path / "outside"
    for path in (*others, mesa, outside):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")

    (tmp_path / "drivers" / "mesa" / "link").symlink_to(outside)
    clear(tmp_path, "vulkan")
    assert all(path.exists() for path in (*others, outside))
    assert list((tmp_path / "drivers" / "mesa").iterdir()) == []
    clear(tmp_path / "absent", "vulkan")
