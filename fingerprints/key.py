"""The profile's key: what the numbers depend on, read without opening any driver.

`current_key` reads it, `stale_parts` compares two. Each test has its own inputs, so that an
update of one driver makes only that driver's numbers stale. What only a driver can tell (its
own version and info) joins with `with_drivers` once a report is there.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from switchgear.fingerprints import measurement
from switchgear.fingerprints.driver_files import file_identity, opencl_files, vulkan_files
from switchgear.fingerprints.profile import SCHEMA_VERSION, DriverIdentity, Key
from switchgear.fingerprints.soc import read_soc, system_image

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from switchgear.fingerprints.measurement import Subject

# The packages whose code runs inside each test.
_ENGINES: Final[dict[str, tuple[str, ...]]] = {
    measurement.CPU: ("ai-edge-litert", "tflite-runtime"),
    measurement.OPENCL_BANDWIDTH: ("pyopencl",),
    measurement.VULKAN_MATMUL: ("vulkan",),
    measurement.NPU_UTILISATION: ("ai-edge-litert", "tflite-runtime"),
}
_API_TESTS: Final[dict[str, str]] = {
    "opencl": measurement.OPENCL_BANDWIDTH,
    "vulkan": measurement.VULKAN_MATMUL,
    "npu": measurement.NPU_UTILISATION,
}
_DRIVER: Final = "driver:"

# How thoroughly a part was measured: a quick run satisfies another quick one only.
_EFFORT: Final = "effort"
_QUICK: Final = "quick"
_FULL: Final = "full"

# An input that an older profile did not record and that is taken for unchanged.
UNKNOWN: Final = "?"


def current_key(
    *,
    npu_libraries: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> Key:
    """The key of this machine now. `npu_libraries` are the configured delegates' paths.

    Reads files only, a few hundred kilobytes in all; blocks on the disk for some 10 ms.
    """
    variables = os.environ if environment is None else environment
    soc, soc_source = read_soc(root)
    kernel = platform.release()
    image = system_image(root)
    engines = {
        package: version
        for package in dict.fromkeys(name for names in _ENGINES.values() for name in names)
        if (version := _package_version(package))
    }
    common = {"soc": soc, "kernel": kernel, "image": image, "schema": str(SCHEMA_VERSION)}
    common["cpus"] = _line(root / "sys/devices/system/cpu/possible")
    gpus = _gpus(root)
    files = {
        measurement.CPU: {},
        measurement.OPENCL_BANDWIDTH: opencl_files(variables, root),
        measurement.VULKAN_MATMUL: vulkan_files(variables, root),
        measurement.NPU_UTILISATION: {
            path: file_identity(Path(path)) for path in npu_libraries
        },
    }
    parts: dict[str, dict[str, str]] = {}
    for test in _ENGINES:
        part = {**common}
        part |= engine_inputs(test, engines)
        part |= {f"file:{path}": identity for path, identity in files[test].items()}
        if test in (measurement.OPENCL_BANDWIDTH, measurement.VULKAN_MATMUL):
            part |= gpus

        parts[test] = part

    return Key(
        schema_version=SCHEMA_VERSION,
        soc=soc,
        soc_source=soc_source,
        kernel=kernel,
        system_image=image,
        engines=engines,
        parts=parts,
    )


def engine_inputs(test: str, engines: Mapping[str, str]) -> dict[str, str]:
    """The inputs of a test that are versions of packages, out of all package versions."""
    return {f"engine:{name}": engines[name] for name in _ENGINES[test] if name in engines}


def with_drivers(key: Key, subjects: Iterable[Subject]) -> Key:
    """The key with what the drivers say of themselves, from the reports' subjects."""
    drivers: list[DriverIdentity] = []
    parts = {test: dict(part) for test, part in key.parts.items()}
    for subject in subjects:
        test = _API_TESTS.get(subject.api)
        if test is None:
            continue

        identity = DriverIdentity(
            api=subject.api,
            device=subject.name,
            name=subject.driver_name,
            version=subject.driver_version,
            info=subject.driver_info,
        )
        if identity not in drivers:
            drivers.append(identity)

        said = " ".join(
            text for text in (identity.name, identity.version, identity.info) if text
        )
        parts.setdefault(test, {})[f"{_DRIVER}{subject.name}"] = said

    return key.model_copy(update={"drivers": tuple(drivers), "parts": parts})


def with_effort(key: Key, *, quick: bool) -> Key:
    """The key of a run that measures quickly, or in full."""
    effort = _QUICK if quick else _FULL
    parts = {test: {**part, _EFFORT: effort} for test, part in key.parts.items()}
    return key.model_copy(update={"parts": parts})


def stale_parts(
    old: Key | None,
    new: Key,
    *,
    tests: Sequence[str] = measurement.TESTS,
    force: bool = False,
) -> dict[str, tuple[str, ...]]:
    """The tests that must be measured again, each with what changed, in the order of `tests`.

    `old` None (no profile) and `force` make all of them stale. What the drivers say of
    themselves is compared only where `new` knows it, since asking them means opening them.
    """
    stale: dict[str, tuple[str, ...]] = {}
    for test in tests:
        if force:
            reasons: tuple[str, ...] = ("forced",)
        elif old is None or test not in old.parts:
            reasons = ("never measured",)
        else:
            reasons = _changes(old.parts[test], new.parts.get(test, {}))

        if reasons:
            stale[test] = reasons

    return stale


def merge_parts(old: Key | None, new: Key, measured: Iterable[str]) -> Key:
    """`new`, but with the old inputs for every test that was not measured now.

    A stale part that could not be measured therefore stays stale.
    """
    fresh = set(measured)
    parts = {test: part for test, part in new.parts.items() if test in fresh}
    if old is not None:
        parts |= {test: part for test, part in old.parts.items() if test not in fresh}

    return new.model_copy(update={"parts": parts})


def _changes(old: dict[str, str], new: dict[str, str]) -> tuple[str, ...]:
    knows_drivers = any(name.startswith(_DRIVER) for name in new)
    changes: list[str] = []
    for name in dict.fromkeys([*old, *new]):
        if name.startswith(_DRIVER) and not knows_drivers:
            continue

        before, after = old.get(name), new.get(name)
        if name == _EFFORT and (before, after) != (_QUICK, _FULL):
            continue

        if before != after and before != UNKNOWN:
            changes.append(f"{name}: {_shown(before)} -> {_shown(after)}")

    return tuple(changes)


def _shown(value: str | None) -> str:
    return "absent" if value is None else value or "empty"


def _package_version(package: str) -> str:
    """The version in the package's metadata; the package itself is not imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _gpus(root: Path) -> dict[str, str]:
    """The GPUs that the kernel drives: a new card, or another kernel driver, is a change."""
    found: dict[str, str] = {}
    folder = root / "sys/class/drm"
    try:
        nodes = sorted(name for name in os.listdir(folder) if name.startswith("renderD"))
    except OSError:
        return found

    for node in nodes:
        device = folder / node / "device"
        module = Path(os.path.realpath(device / "driver/module"))
        said = [_line(device / "vendor"), _line(device / "device"), module.name]
        said.append(_line(module / "version"))
        found[f"gpu:{Path(os.path.realpath(device)).name}"] = " ".join(filter(None, said))

    return found


def _line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(4096).decode("utf-8", "replace").strip("\0 \n")
    except OSError:
        return ""
