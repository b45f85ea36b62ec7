"""Running the tests of the fingerprint for real, on the software drivers of this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from devices import missing

from switchgear.fingerprints.child import Limits
from switchgear.fingerprints.measurement import Failure, Report, Value
from switchgear.fingerprints.runner import Plan, run

MANIFESTS = Path("/usr/share/vulkan/icd.d")
VENDORS = Path("/etc/OpenCL/vendors")
# Small and short: what is tested is the path, not the figures.
TRANSFER_BYTES = 16 * 2**20
BUDGET_S = 0.2
LIMITS = Limits(total_s=15, silence_s=10)


def lavapipe() -> Path:
    """The manifest of the software Vulkan driver; skips the test where it is not installed."""
    found = sorted(MANIFESTS.glob("lvp_icd*.json"))
    if not found:
        missing("the software Vulkan driver (mesa-vulkan-drivers) is not installed")

    return found[0]


def vulkan_drivers(*manifests: Path) -> dict[str, str]:
    """What makes the Vulkan loader open these drivers and no other."""
    named = ":".join(map(str, manifests))
    return {"VK_DRIVER_FILES": named, "VK_ICD_FILENAMES": named}


def pocl() -> Path:
    """The .icd file of the software OpenCL driver; skips where it is not installed."""
    path = VENDORS / "pocl.icd"
    if not path.exists():
        missing("the software OpenCL driver (pocl-opencl-icd) is not installed")

    return path


def opencl_drivers(
    folder: Path, *, stub: Path | None = None, real: bool = True
) -> dict[str, str]:
    """What makes the OpenCL loader open the stub, the software driver, or both."""
    folder.mkdir(exist_ok=True)
    if real:
        shutil.copy(pocl(), folder / "pocl.icd")

    if stub is not None:
        (folder / "a_stub.icd").write_text(f"{stub}\n")

    return {"OCL_ICD_VENDORS": str(folder)}


def plan(
    test: str,
    environment: dict[str, str] | None = None,
    *,
    limits: Limits = LIMITS,
    delegate: str = "",
    delegate_options: dict[str, str] | None = None,
    sysfs: str = "/sys",
    repeat: bool = False,
    yield_cpu: bool = False,
) -> Plan:
    """A quick plan of one test; `environment` is added to this process's own.

    It does not yield the CPU: beside other tests it would take minutes.
    """
    return Plan(
        tests=(test,),
        quick=True,
        delegate=delegate,
        delegate_options=delegate_options or {},
        sysfs=sysfs,
        limits=limits,
        environment={**os.environ, **(environment or {})},
        repeat=repeat,
        yield_cpu=yield_cpu,
        device_budget_s=BUDGET_S,
        max_transfer_bytes=TRANSFER_BYTES,
    )


def measure(what: Plan) -> list[Report]:
    return asyncio.run(run(what))


def number(report: Report, name: str) -> Value:
    """The value of that name; fails the test when it is a failure or missing."""
    value = report.value(name)
    assert isinstance(value, Value), value
    return value


def fault(report: Report, name: str) -> Failure:
    """The failure of that name; fails the test when it is a value or missing."""
    failure = report.value(name)
    assert isinstance(failure, Failure), failure
    return failure
