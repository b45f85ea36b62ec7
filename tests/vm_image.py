"""The root of the guest of `thermal_vm.py`: Debian 12 with this checkout, as an initramfs.

The Debian part is made once (minutes, from the network) and kept in `.cache/vm`.
"""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
CACHE: Final = ROOT / ".cache" / "vm"
PACKAGES: Final = (
    *("systemd-sysv", "udev", "kmod", "python3", "python3-venv", "linux-image-cloud-amd64"),
)
# Of the environment's packages, what the daemon and the CPU backend need.
PYTHON_PACKAGES: Final = (
    *("ai_edge_litert", "annotated_types", "flatbuffers", "numpy", "numpy.libs", "psutil"),
    *("pydantic", "pydantic_core", "typing_inspection"),
)
# The emulated processor unpacks all of it. Zones and serial lines need no module.
NOT_NEEDED: Final = (
    *("./boot", "./usr/lib/modules", "./usr/lib/firmware", "./usr/lib/locale", "./var/lib/apt"),
    *("./usr/share/doc", "./usr/share/locale", "./usr/share/man", "./usr/share/perl5"),
    *("./var/cache", "./usr/lib/x86_64-linux-gnu/gconv"),
)
UNIT: Final = """[Unit]
Description=Obeys the host
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
    leave_out = " ".join(f"-path {path} -prune -o" for path in NOT_NEEDED)
    pack = "cpio --quiet -o -H newc"
    script = (
        f"(cd '{debian}' && find . {leave_out} -print | {pack};"
        f" cd '{ours}' && find . -print | {pack}) >'{target}'"
    )
    subprocess.run(["sh", "-c", script], check=True)
    shutil.rmtree(ours)


def _add_ours(ours: Path) -> None:
    tree = ours / "opt" / "tree"
    tree.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "HEAD"], capture_output=True, check=True
    ).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    site = Path(sysconfig.get_path("purelib"))
    packages = ours / "opt" / "packages"
    packages.mkdir()
    for name in PYTHON_PACKAGES:
        shutil.copytree(site / name, packages / name)

    shutil.copy(site / "typing_extensions.py", packages)
    for info in site.glob("switchgear-*.dist-info"):
        shutil.copytree(info, packages / info.name)

    shutil.copy(Path(__file__).parent / "vm_guest.py", ours / "opt")
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
