"""One folder of compiled shaders for all Vulkan tests of a session."""

from __future__ import annotations

import functools
import os

import native_build


@functools.cache
def environment() -> dict[str, str]:
    """What to add to an environment so that what one test compiles is there for the next.

    A folder that is set already is kept: a whole catalogue takes an hour to compile.
    """
    chosen = os.environ.get("SWITCHGEAR_TEST_SHADER_CACHE")
    if chosen:
        return {"MESA_SHADER_CACHE_DIR": chosen}

    folder = native_build.folder() / "shaders"
    folder.mkdir(exist_ok=True)
    return {"MESA_SHADER_CACHE_DIR": str(folder)}
