"""The command that brings what `switchgear doctor` found missing, for this machine."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Final

# By package installer, in the order in which they are looked for: how it is called, and its
# names for things.
_INSTALLERS: Final = {
    "apt-get": (
        "apt-get install",
        {
            "vulkan loader": "libvulkan1",
            "vulkan driver": "mesa-vulkan-drivers",
            "opencl driver": "pocl-opencl-icd",
            "python": "python3",
        },
    ),
    "dnf": (
        "dnf install",
        {
            "vulkan loader": "vulkan-loader",
            "vulkan driver": "mesa-vulkan-drivers",
            "opencl driver": "pocl",
            "python": "python3",
        },
    ),
    "pacman": (
        "pacman -S",
        {
            "vulkan loader": "vulkan-icd-loader",
            "vulkan driver": "vulkan-swrast",
            "opencl driver": "pocl",
            "python": "python",
        },
    ),
}
_PIP: Final = {
    "engine": "ai-edge-litert>=2.3,<3",
    "answer": "ai-edge-litert>=2.3,<3",
    "vulkan package": "switchgear[vulkan]",
    "opencl package": "switchgear[opencl]",
    "opencl engine": "switchgear[opencl]",
}
# What no package brings.
_SENTENCES: Final = {
    "vulkan engine": "install a newer Vulkan driver (Mesa 23 or later; Debian 12: backports)",
    "npu library": "install the vendor's delegate and name it in [npu] delegate",
}


def fix(what: str) -> str:
    """The command for a thing by the name that `doctor_probe` gives it."""
    if what in _PIP:
        again = " --force-reinstall" if what == "answer" else ""
        return f"{sys.executable} -m pip install{again} '{_PIP[what]}'"

    return _SENTENCES.get(what) or package(what)


def package(what: str) -> str:
    """The system's own installer's command; a sentence where its names are not known here."""
    for program, (command, names) in _INSTALLERS.items():
        if shutil.which(program):
            return as_root(f"{command} {names[what]}")

    return f"install the {what} with this system's package manager"


def as_root(command: str) -> str:
    return command if os.geteuid() == 0 else f"sudo {command}"
