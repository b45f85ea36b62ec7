"""The root of the guest of `thermal_vm.py`: Debian 12 with this checkout, as an initramfs.

The Debian part is made once (minutes, from the network) and kept in `.cache/vm`. What an
emulated processor would have to do again and again is done here: modules are compiled, and what
the guest never opens is left out.
"""

from __future__ import annotations

import compileall
import os
import py_compile
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Final

import native_build
from small_network import small_network
from wide_network import wide_network

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parent.parent
CACHE: Final = ROOT / ".cache" / "vm"
PACKAGES: Final = (
    *("systemd-sysv", "udev", "kmod", "python3", "python3-venv", "linux-image-cloud-amd64"),
)
# The interpreter of Debian 12, whose compiled modules the guest reads.
PYTHON_MINOR: Final = "3.11"
# Of the environment's packages, what the daemon and the CPU backend need.
PYTHON_PACKAGES: Final = (
    *("ai_edge_litert", "annotated_types", "flatbuffers", "numpy", "numpy.libs", "psutil"),
    *("pydantic", "pydantic_core", "typing_inspection"),
)
# Zones come from a module of this folder, which the kernel asks udev for; the rest of what the
# guest has is built into the kernel.
KERNEL_MODULES: Final = "kernel/drivers/thermal"
NOT_NEEDED: Final = (
    *("boot", "usr/bin/perl", "usr/include", "usr/lib/firmware", "usr/lib/locale"),
    *(
        "usr/lib/python3",
        "usr/lib/udev/hwdb.bin",
        "usr/lib/udev/hwdb.d",
        "usr/share",
        "var/lib",
    ),
    *("usr/lib/x86_64-linux-gnu/gconv", "usr/lib/x86_64-linux-gnu/perl", "var/cache"),
    *("usr/lib/x86_64-linux-gnu/perl-base", "usr/lib/x86_64-linux-gnu/libperl.so.5.36.0"),
)
NEEDED: Final = ("usr/share/dbus-1",)
# Of LiteRT: plug-ins and programs that neither the CPU nor a delegate opens.
NOT_NEEDED_PACKAGES: Final = (
    *("aot", "tools", "vendors", "libLiteRtWebGpuAccelerator.so", "pywrap_genai_ops.so"),
    *("_pywrap_litert_converter.so", "tests", "testing", "f2py"),
)
# More than a limit that `vm_limits.py` sets.
WIDE_MIB: Final = 128
UNIT: Final = """[Unit]
Description=Obeys the host
After=basic.target
[Service]
ExecStart=/usr/bin/python3 /opt/vm_guest.py /dev/ttyS1
[Install]
WantedBy=multi-user.target
"""


def kernel(debian: Path) -> Path:
    (found,) = (debian / "boot").glob("vmlinuz-*")
    return found


def debian_root() -> Path:
    """The Debian part."""
    root = CACHE / "root"
    if not root.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        making = CACHE / "making"
        shutil.rmtree(making, ignore_errors=True)
        command = ["mmdebstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
        subprocess.run([*command, "bookworm", str(making)], check=True)
        making.rename(root)

    return root


def initramfs(debian: Path, target: Path) -> None:
    """Packs the root: the Debian part, then, over it, what is ours."""
    ours = target.with_suffix(".ours")
    shutil.rmtree(ours, ignore_errors=True)
    _add_ours(ours)
    # Two archives in a row are one root to the kernel.
    with target.open("wb") as file:
        _pack(debian, _debian_names(debian), file.fileno())
        _pack(ours, _names(ours, ()), file.fileno())

    shutil.rmtree(ours)


def _pack(folder: Path, names: Iterator[str], to: int) -> None:
    subprocess.run(
        ["cpio", "--quiet", "-0", "-o", "-H", "newc"],
        cwd=folder,
        input="".join(f"{name}\0" for name in names).encode(),
        stdout=to,
        check=True,
    )


def _debian_names(debian: Path) -> Iterator[str]:
    (modules,) = (debian / "usr/lib/modules").iterdir()
    inside = modules.relative_to(debian)
    yield from _names(debian, (*NOT_NEEDED, f"{inside}/kernel"))
    wanted = (*NEEDED, f"{inside}/{KERNEL_MODULES}")
    made: dict[str, None] = {}
    for name in wanted:
        for parent in reversed(Path(name).parents[:-1]):
            made[str(parent)] = None

    # A folder's own entry has to come before what lies in it; again does no harm.
    yield from made
    for name in wanted:
        yield name
        for path in _names(debian / name, ()):
            yield f"{name}/{path}"


def _names(folder: Path, without: tuple[str, ...]) -> Iterator[str]:
    """All below a folder, relative to it, parents first."""
    for place, folders, files in os.walk(folder):
        inside = Path(place).relative_to(folder)
        folders[:] = sorted(name for name in folders if str(inside / name) not in without)
        for name in (*folders, *sorted(files)):
            path = str(inside / name)
            if path not in without:
                yield path


def _add_ours(ours: Path) -> None:
    tree = ours / "opt" / "tree"
    tree.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "HEAD"], capture_output=True, check=True
    ).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    for name in ("tests", "docs", "benchmarks", "examples"):
        shutil.rmtree(tree / name)

    site = Path(sysconfig.get_path("purelib"))
    packages = ours / "opt" / "packages"
    packages.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", *NOT_NEEDED_PACKAGES)
    for name in PYTHON_PACKAGES:
        shutil.copytree(site / name, packages / name, ignore=ignored)

    shutil.copy(site / "typing_extensions.py", packages)
    # Versions and entry points are read from them.
    for name in ("switchgear", *PYTHON_PACKAGES):
        for info in site.glob(f"{name}-*.dist-info"):
            shutil.copytree(info, packages / info.name)

    here = Path(__file__).parent
    shutil.copy(here / "vm_guest.py", ours / "opt")
    models = ours / "opt" / "models"
    models.mkdir()
    (models / "net.tflite").write_bytes(small_network())
    (models / "wide.tflite").write_bytes(wide_network(WIDE_MIB))
    shutil.copy(native_build.delegate(), ours / "opt" / "npu.so")
    _compile(ours)
    # Root's, and readable to the service's user.
    for path in ours.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)

    units = ours / "etc" / "systemd" / "system"
    wants = units / "multi-user.target.wants"
    wants.mkdir(parents=True)
    (units / "vm-guest.service").write_text(UNIT)
    (wants / "vm-guest.service").symlink_to("../vm-guest.service")
    (ours / "init").symlink_to("/sbin/init")


def _compile(ours: Path) -> None:
    """Compiled modules that are taken without a look at their sources: the service's user may
    not write them, and each process would compile all of them again."""
    if sysconfig.get_python_version() != PYTHON_MINOR:
        raise SystemExit(
            f"the guest's Python is {PYTHON_MINOR}: run this with a {PYTHON_MINOR}"
        )

    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(
        ours / "opt", quiet=2, stripdir=str(ours), invalidation_mode=mode, maxlevels=20
    )
